#include "server/platform/files/safetensors.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

ByteBuffer Bytes(const std::string& text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

std::string Prefix(uint64_t length) {
  std::string prefix(8, '\0');
  for (int i = 0; i < 8; ++i) prefix[i] = static_cast<char>(length >> (8 * i));
  return prefix;
}

std::string Image(const std::string& header, size_t data_bytes) {
  std::string data;
  for (size_t i = 0; i < data_bytes; ++i) data.push_back(static_cast<char>(i));
  return Prefix(header.size()) + header + data;
}

absl::StatusOr<std::unique_ptr<SafetensorsFile>> Parse(const std::string& header,
                                                       size_t data_bytes) {
  return SafetensorsFile::Parse(Share(Bytes(Image(header, data_bytes))), "test.safetensors");
}

std::string Tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   uint64_t begin, uint64_t end) {
  return absl::StrCat("\"", name, "\":{\"dtype\":\"", dtype, "\",\"shape\":", shape,
                      ",\"data_offsets\":[", begin, ",", end, "]}");
}

// Two tensors, metadata and padding: 8 + header + 16 bytes.
std::string GoodHeader() {
  return absl::StrCat("{\"__metadata__\":{\"format\":\"pt\"},", Tensor("b", "BF16", "[2]", 12, 16),
                      ",", Tensor("a", "F32", "[3,1]", 0, 12), "}   ");
}

TEST(SafetensorsTest, ReadsTensorsAndMetadata) {
  const auto file = Parse(GoodHeader(), 16);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->metadata().at("format"), "pt");
  ASSERT_EQ((*file)->tensors().size(), 2);
  const TensorView* a = (*file)->Find("a");
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(a->dtype, DType::kF32);
  EXPECT_THAT(a->shape, ElementsAre(3, 1));
  EXPECT_EQ(a->num_elements(), 3);
  ASSERT_EQ(a->bytes.size(), 12);
  EXPECT_EQ(a->bytes[11], std::byte{11});
  const TensorView* b = (*file)->Find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->dtype, DType::kBF16);
  ASSERT_EQ(b->bytes.size(), 4);
  EXPECT_EQ(b->bytes[0], std::byte{12});
  EXPECT_EQ((*file)->Find("c"), nullptr);
}

TEST(SafetensorsTest, AcceptsWhatTheReferenceAccepts) {
  EXPECT_TRUE(Parse("{}", 0).ok());
  EXPECT_TRUE(Parse("{\"__metadata__\":{}}", 0).ok());
  // Rank 0, a dimension of 0 in the middle, blanks inside of the object, escapes in a name.
  EXPECT_TRUE(Parse("{" + Tensor("s", "F32", "[]", 0, 4) + "}", 4).ok());
  EXPECT_TRUE(Parse("{" + Tensor("x", "F16", "[2]", 0, 4) + "," +
                        Tensor("e", "F32", "[0,7]", 4, 4) + "," + Tensor("y", "F16", "[1]", 4, 6) +
                        "}",
                    6)
                  .ok());
  EXPECT_TRUE(Parse("{ \"x\" :\n{ \"data_offsets\" : [ 0 , 2 ] ,\t\"shape\":[1],\r\n"
                    "\"dtype\":\"F16\" } }",
                    2)
                  .ok());
  const auto escaped = Parse("{" + Tensor("\\u0061", "F16", "[1]", 0, 2) + "}", 2);
  ASSERT_TRUE(escaped.ok());
  EXPECT_NE((*escaped)->Find("a"), nullptr);
}

struct BadHeader {
  const char* what;
  std::string header;
  size_t data_bytes;
  const char* reason;
  const char* in_message;
};

void PrintTo(const BadHeader& bad, std::ostream* out) { *out << bad.what; }

std::string One(const std::string& body) { return "{\"w\":{" + body + "}}"; }

std::vector<BadHeader> SyntaxErrors() {
  const char* json = "SAFETENSORS_HEADER_JSON";
  const std::string good = Tensor("w", "F16", "[1]", 0, 2);
  return {
      {"empty", "", 0, json, "begin with '{'"},
      {"byte order mark", "\xef\xbb\xbf{}", 0, json, "begin with '{'"},
      {"leading space", " {}", 0, json, "begin with '{'"},
      {"array", "[]", 0, json, "begin with '{'"},
      {"cut", "{\"w\":", 0, json, "end with '}'"},
      {"comma", "{" + good + ",}", 2, json, "not JSON at byte"},
      {"two objects", "{}{}", 0, json, "not JSON at byte"},
      {"text after the object", "{} x }", 0, json, "not JSON at byte"},
      {"newline after the object", "{}\n", 0, json, "at most spaces"},
      {"NUL after the object", std::string("{}\0}", 4), 0, json, "NUL"},
      {"comment", "{/* */}", 0, json, "not JSON"},
      {"single quotes", "{'w':1}", 0, json, "not JSON"},
      {"not UTF-8", "{\"__metadata__\":{\"a\":\"\xff\"}}", 0, json, "not JSON"},
      {"lone surrogate", "{\"__metadata__\":{\"a\":\"\\ud800\"}}", 0, json, "not JSON"},
      {"raw control character", "{\"__metadata__\":{\"a\":\"\x01\"}}", 0, json, "not JSON"},
      {"tensor is a number", "{\"w\":1}", 0, json, "w: the value must be an object"},
      {"tensor is an array", "{\"w\":[]}", 0, json, "w: the value must be an object"},
      {"tensor is null", "{\"w\":null}", 0, json, "w: the value must be an object"},
      {"metadata is a string", "{\"__metadata__\":\"x\"}", 0, json, "__metadata__"},
      {"metadata holds a number", "{\"__metadata__\":{\"a\":1}}", 0, json, "must be strings"},
      {"metadata holds null", "{\"__metadata__\":{\"a\":null}}", 0, json, "must be strings"},
      {"metadata holds an object", "{\"__metadata__\":{\"a\":{}}}", 0, json, "must be strings"},
      {"metadata holds an array", "{\"__metadata__\":{\"a\":[]}}", 0, json, "must be strings"},
      {"unknown key", One("\"dtypo\":\"F32\""), 0, json, "w: unknown key 'dtypo'"},
      {"deep arrays", "{\"w\":" + std::string(100000, '[') + "}", 0, json, "w: "},
      {"deep objects", One("\"shape\":{\"a\":{\"b\":{}}}"), 0, "SAFETENSORS_SHAPE", "an object"},
  };
}

std::vector<BadHeader> KeyErrors() {
  const char* twice = "SAFETENSORS_DUPLICATE_KEY";
  const char* name = "SAFETENSORS_NAME";
  const std::string good = Tensor("w", "F16", "[1]", 0, 2);
  return {
      {"tensor twice", "{" + good + "," + good + "}", 2, twice, "w: the tensor occurs twice"},
      {"tensor twice by escape", "{" + good + "," + Tensor("\\u0077", "F16", "[1]", 0, 2) + "}", 2,
       twice, "w: the tensor occurs twice"},
      {"dtype twice", One("\"dtype\":\"F16\",\"dtype\":\"F16\""), 2, twice, "dtype occurs twice"},
      {"shape twice", One("\"shape\":[1],\"shape\":[1]"), 2, twice, "shape occurs twice"},
      {"offsets twice", One("\"data_offsets\":[0,2],\"data_offsets\":[0,2]"), 2, twice,
       "data_offsets occurs twice"},
      {"metadata twice", "{\"__metadata__\":{},\"__metadata__\":{}}", 0, twice, "__metadata__"},
      {"metadata's key twice", "{\"__metadata__\":{\"k\":\"\",\"k\":\"\"}}", 0, twice, "'k'"},
      {"empty name", "{" + Tensor("", "F16", "[1]", 0, 2) + "}", 2, name, "must not be empty"},
      {"long name", "{" + Tensor(std::string(513, 'n'), "F16", "[1]", 0, 2) + "}", 2, name, "513"},
      {"NUL in a name", "{" + Tensor("a\\u0000b", "F16", "[1]", 0, 2) + "}", 2, name, "'a\\000b'"},
      {"newline in a name", "{" + Tensor("a\\nb", "F16", "[1]", 0, 2) + "}", 2, name, "'a\\nb'"},
      {"not ASCII", "{" + Tensor("\xc3\xa9", "F16", "[1]", 0, 2) + "}", 2, name, "unprintable"},
  };
}

std::vector<BadHeader> FieldErrors() {
  const char* dtype = "SAFETENSORS_DTYPE";
  const char* shape = "SAFETENSORS_SHAPE";
  const char* offsets = "SAFETENSORS_OFFSETS";
  const std::string s = "\"dtype\":\"F16\",\"shape\":[1],";
  return {
      {"I64", "{" + Tensor("w", "I64", "[1]", 0, 8) + "}", 8, dtype, "w: dtype 'I64'"},
      {"lower case", "{" + Tensor("w", "f32", "[1]", 0, 4) + "}", 4, dtype, "'f32'"},
      {"dtype is a number", One("\"dtype\":1"), 0, dtype, "w: dtype must be a string"},
      {"dtype is null", One("\"dtype\":null"), 0, dtype, "w: dtype must be a string"},
      {"no dtype", One("\"shape\":[1],\"data_offsets\":[0,2]"), 2, dtype, "w: dtype is missing"},
      {"negative dimension", One("\"shape\":[-1]"), 0, shape, "w: a dimension must be an unsigned"},
      {"minus zero", One("\"shape\":[-0]"), 0, shape, "negative"},
      {"fraction", One("\"shape\":[1.0]"), 0, shape, "unsigned 64-bit integer"},
      {"exponent", One("\"shape\":[1e0]"), 0, shape, "unsigned 64-bit integer"},
      {"2^64", One("\"shape\":[18446744073709551616]"), 0, shape, "unsigned 64-bit integer"},
      {"2^64 - 1", One("\"shape\":[18446744073709551615]"), 0, shape, "2^48"},
      {"dimension is a string", One("\"shape\":[\"1\"]"), 0, shape, "a string"},
      {"dimension is true", One("\"shape\":[true]"), 0, shape, "a boolean"},
      {"shape is a number", One("\"shape\":1"), 0, shape, "w: shape must be an array"},
      {"rank 9", One("\"shape\":[1,1,1,1,1,1,1,1,1]"), 0, shape, "more than 8 dimensions"},
      {"no shape", One("\"dtype\":\"F16\",\"data_offsets\":[0,2]"), 2, shape, "shape is missing"},
      {"no offsets", One("\"dtype\":\"F16\",\"shape\":[1]"), 2, offsets, "data_offsets is missing"},
      {"one offset", One(s + "\"data_offsets\":[0]"), 2, offsets, "two elements, not 1"},
      {"three offsets", One(s + "\"data_offsets\":[0,2,4]"), 2, offsets, "two elements"},
      {"negative offset", One(s + "\"data_offsets\":[-2,0]"), 2, offsets, "negative"},
      {"backwards", One(s + "\"data_offsets\":[2,0]"), 2, offsets, "w: it ends at 0, before"},
      {"beyond 2^48", One(s + "\"data_offsets\":[0,281474976710656]"), 2, offsets, "2^48"},
      {"offsets are an object", One(s + "\"data_offsets\":{}"), 2, offsets, "an object"},
  };
}

std::vector<BadHeader> LayoutErrors() {
  const char* offsets = "SAFETENSORS_OFFSETS";
  const char* size = "SAFETENSORS_SIZE";
  const char* incomplete = "SAFETENSORS_INCOMPLETE";
  const auto two = [](uint64_t begin, uint64_t end) {
    return "{" + Tensor("a", "F16", "[2]", 0, 4) + "," + Tensor("b", "F16", "[1]", begin, end) +
           "}";
  };
  return {
      {"hole at the front", "{" + Tensor("w", "F16", "[1]", 2, 4) + "}", 4, offsets,
       "w: it begins"},
      {"hole", two(6, 8), 8, offsets, "b: it begins at 6, leaving a hole after 4"},
      {"overlap", two(2, 4), 4, offsets, "b: it begins at 2, overlapping data that ends at 4"},
      {"same place", two(0, 2), 4, offsets, "overlapping"},
      {"too few bytes", "{" + Tensor("w", "F32", "[2]", 0, 4) + "}", 4, size, "needs 8 bytes"},
      {"too many bytes", "{" + Tensor("w", "BF16", "[2]", 0, 8) + "}", 8, size,
       "w: shape [2] of BF16 needs 4 bytes, data_offsets give 8"},
      {"empty shape with bytes", "{" + Tensor("w", "F16", "[0]", 0, 2) + "}", 2, size, "needs 0"},
      {"product of 2^64", "{" + Tensor("w", "F16", "[140737488355328,131072]", 0, 0) + "}", 0, size,
       "more than 2^64"},
      {"product overflows to the right size",
       "{" + Tensor("w", "F16", "[140737488355328,65536,2,1]", 0, 0) + "}", 0, size,
       "more than 2^64"},
      {"data cut", "{" + Tensor("w", "F16", "[2]", 0, 4) + "}", 3, incomplete,
       "w: the tensors end at byte 4 of the data, the file has 3"},
      {"data too long", "{" + Tensor("w", "F16", "[2]", 0, 4) + "}", 5, incomplete, "has 5"},
      {"no tensors but data", "{}", 1, incomplete, "has 1"},
  };
}

class SafetensorsBadHeaderTest : public ::testing::TestWithParam<BadHeader> {};

TEST_P(SafetensorsBadHeaderTest, IsRefusedWithReasonAndCulprit) {
  const BadHeader& bad = GetParam();
  const auto file = Parse(bad.header, bad.data_bytes);
  ASSERT_FALSE(file.ok());
  EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(file.status()), bad.reason) << file.status();
  const std::string message(file.status().message());
  EXPECT_THAT(message, HasSubstr(bad.in_message));
  EXPECT_THAT(message, HasSubstr("test.safetensors"));
  EXPECT_LT(message.size(), 1000);
}

INSTANTIATE_TEST_SUITE_P(Syntax, SafetensorsBadHeaderTest, ::testing::ValuesIn(SyntaxErrors()));
INSTANTIATE_TEST_SUITE_P(Keys, SafetensorsBadHeaderTest, ::testing::ValuesIn(KeyErrors()));
INSTANTIATE_TEST_SUITE_P(Fields, SafetensorsBadHeaderTest, ::testing::ValuesIn(FieldErrors()));
INSTANTIATE_TEST_SUITE_P(Layout, SafetensorsBadHeaderTest, ::testing::ValuesIn(LayoutErrors()));

TEST(SafetensorsTest, RefusesLengthsThatLie) {
  const auto reason = [](uint64_t length, size_t bytes_after) {
    return ReasonOf(
        SafetensorsFile::Parse(Share(Bytes(Prefix(length) + std::string(bytes_after, ' '))), "x")
            .status());
  };
  EXPECT_EQ(reason(3, 2), "SAFETENSORS_HEADER_LENGTH");
  EXPECT_EQ(reason(8 << 20, 2), "SAFETENSORS_HEADER_LENGTH");
  EXPECT_EQ(reason((8 << 20) + 1, 2), "SAFETENSORS_HEADER_TOO_LARGE");
  EXPECT_EQ(reason(UINT64_MAX, 2), "SAFETENSORS_HEADER_TOO_LARGE");
  EXPECT_EQ(reason(UINT64_MAX - 7, 2), "SAFETENSORS_HEADER_TOO_LARGE");  // 8 + length wraps
  EXPECT_EQ(reason(0, 2), "SAFETENSORS_HEADER_JSON");
}

TEST(SafetensorsTest, ListsEveryTensorThatIsWrong) {
  const auto file =
      Parse("{" + Tensor("a", "F32", "[1]", 0, 2) + "," + Tensor("b", "F32", "[2]", 2, 4) + "}", 4);
  ASSERT_FALSE(file.ok());
  const std::vector<Violation> violations = ViolationsOf(file.status());
  ASSERT_EQ(violations.size(), 2);
  EXPECT_EQ(violations[0].field, "a");
  EXPECT_EQ(violations[1].field, "b");
}

TEST(SafetensorsTest, RefusesAFileCutAnywhere) {
  const std::string image = Image(GoodHeader(), 16);
  const size_t header_end = image.size() - 16;
  ASSERT_TRUE(SafetensorsFile::Parse(Share(Bytes(image)), "whole").ok());
  for (size_t size = 0; size < image.size(); ++size) {
    const auto file = SafetensorsFile::Parse(Share(Bytes(image.substr(0, size))), "cut");
    ASSERT_FALSE(file.ok()) << size;
    EXPECT_EQ(ReasonOf(file.status()), size < 8            ? "SAFETENSORS_HEADER_TOO_SMALL"
                                       : size < header_end ? "SAFETENSORS_HEADER_LENGTH"
                                                           : "SAFETENSORS_INCOMPLETE")
        << size;
  }
}

// Whatever a flipped bit turns the file into: either it is refused with a reason, or every view
// lies in the file and has the size its shape says.
TEST(SafetensorsTest, SurvivesEveryFlippedBit) {
  const std::string image = Image(GoodHeader(), 16);
  int accepted = 0, refused = 0;
  for (size_t bit = 0; bit < 8 * (image.size() - 16); ++bit) {
    std::string flipped = image;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    const auto file = SafetensorsFile::Parse(Share(Bytes(flipped)), "flipped");
    if (!file.ok()) {
      EXPECT_TRUE(absl::StartsWith(ReasonOf(file.status()), "SAFETENSORS_")) << file.status();
      ++refused;
      continue;
    }
    ++accepted;
    size_t bytes = 0;
    for (const auto& [name, view] : (*file)->tensors()) {
      EXPECT_EQ(view.bytes.size(), view.num_elements() * SizeOf(view.dtype)) << name;
      bytes += view.bytes.size();
    }
    EXPECT_EQ(bytes, 16) << bit;
  }
  EXPECT_GT(accepted, 10);  // flips in names and metadata
  EXPECT_GT(refused, 500);
}

TEST(SafetensorsTest, CapsTheNumberOfTensorsAndOfMetadataEntries) {
  std::string tensors = "{", metadata = "{\"__metadata__\":{";
  for (int i = 0; i <= 65536; ++i) {
    absl::StrAppend(&tensors, i > 0 ? "," : "", Tensor(absl::StrCat(i), "F16", "[0]", 0, 0));
  }
  for (int i = 0; i <= 4096; ++i) {
    absl::StrAppend(&metadata, i > 0 ? "," : "", "\"", i, "\":\"\"");
  }
  EXPECT_EQ(ReasonOf(Parse(tensors + "}", 0).status()), "SAFETENSORS_HEADER_TOO_LARGE");
  EXPECT_EQ(ReasonOf(Parse(metadata + "}}", 0).status()), "SAFETENSORS_HEADER_TOO_LARGE");
}

class SafetensorsReadTest : public ::testing::Test {
 protected:
  std::string Write(const std::string& image) {
    const std::string path = ::testing::TempDir() + "/read_test.safetensors";
    std::ofstream(path, std::ios::binary) << image;
    return path;
  }
};

TEST_F(SafetensorsReadTest, ReadsAFile) {
  const auto file = SafetensorsFile::Read(Write(Image(GoodHeader(), 16)), 1 << 20);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_NE((*file)->Find("b"), nullptr);
  EXPECT_EQ((*file)->Find("b")->bytes[3], std::byte{15});
}

TEST_F(SafetensorsReadTest, TellsAbsentLargeAndShortFilesApart) {
  EXPECT_EQ(ReasonOf(SafetensorsFile::Read("/no/such/file", 10).status()), "FILE_NOT_FOUND");
  const std::string path = Write(Image(GoodHeader(), 16));
  EXPECT_EQ(ReasonOf(SafetensorsFile::Read(path, 10).status()), "FILE_TOO_LARGE");
  EXPECT_EQ(ReasonOf(SafetensorsFile::Read(Write("short"), 10).status()),
            "SAFETENSORS_HEADER_TOO_SMALL");
}

// A sparse file of 64 GiB costs nothing to make; judged by its header it costs nothing to refuse.
TEST_F(SafetensorsReadTest, RefusesABadHeaderBeforeReadingTheData) {
  const std::string path = Write(Image("{]", 0));
  ASSERT_EQ(truncate(path.c_str(), int64_t{64} << 30), 0);
  EXPECT_EQ(ReasonOf(SafetensorsFile::Read(path, UINT64_MAX).status()), "SAFETENSORS_HEADER_JSON");
  rusage usage;
  ASSERT_EQ(getrusage(RUSAGE_SELF, &usage), 0);
  EXPECT_LT(usage.ru_maxrss, 1 << 20);  // KiB
  unlink(path.c_str());
}

}  // namespace
}  // namespace dorad
