#include "server/platform/files/file.h"

#include <sys/stat.h>
#include <unistd.h>

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

class FileTest : public ::testing::Test {
 protected:
  ~FileTest() override { unlink(path_.c_str()); }
  void Write(const std::string& text) { std::ofstream(path_, std::ios::binary) << text; }
  const std::string path_ = ::testing::TempDir() + "/base_file_test";
};

TEST_F(FileTest, ReadsAllBytesOfSeveralBlocks) {
  std::string text;
  while (text.size() < (9 << 20)) text += std::to_string(text.size()) + ",";
  Write(text);
  const auto read = ReadFileText(path_, text.size());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, text);
  const auto bytes = ReadFileBytes(path_, text.size());
  ASSERT_TRUE(bytes.ok());
  EXPECT_EQ(bytes->size(), text.size());
}

TEST_F(FileTest, ReadsPartsInAnyOrder) {
  Write("0123456789");
  const auto file = RegularFile::Open(path_, 100);
  ASSERT_TRUE(file.ok());
  std::string part(3, ' ');
  const auto bytes = absl::MakeSpan(reinterpret_cast<std::byte*>(part.data()), part.size());
  for (const auto& [offset, expected] : {std::pair(7, "789"), {0, "012"}, {4, "456"}}) {
    ASSERT_TRUE(file->ReadAt(offset, bytes).ok());
    EXPECT_EQ(part, expected);
  }
  EXPECT_EQ(ReasonOf(file->ReadAt(8, bytes)), "FILE_UNREADABLE");
}

TEST(ReserveBytes, KeepsTheContentAndMakesRoom) {
  for (const uint64_t room : {uint64_t{0}, uint64_t{100}, uint64_t{70} << 20}) {
    ByteBuffer bytes = {std::byte{1}, std::byte{2}};
    ReserveBytes(room, &bytes);
    EXPECT_GE(bytes.capacity(), room);
    EXPECT_EQ(bytes, (ByteBuffer{std::byte{1}, std::byte{2}}));
    bytes.resize(std::max<uint64_t>(room, 2), std::byte{3});
    EXPECT_EQ(bytes.back(), room > 2 ? std::byte{3} : std::byte{2});
  }
}

TEST_F(FileTest, ReadsAnEmptyFile) {
  Write("");
  const auto read = ReadFileText(path_, 0);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, "");
}

TEST_F(FileTest, RefusesMoreBytesThanAllowed) {
  Write("12345");
  EXPECT_TRUE(ReadFileText(path_, 5).ok());
  const auto read = ReadFileText(path_, 4);
  EXPECT_EQ(read.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(read.status()), "FILE_TOO_LARGE");
}

TEST_F(FileTest, SaysThatAFileIsAbsent) {
  for (const std::string& path : {std::string("/no/such/file"), path_ + "/below-nothing"}) {
    const auto read = ReadFileText(path, 10);
    EXPECT_EQ(read.status().code(), absl::StatusCode::kNotFound) << path;
    EXPECT_EQ(ReasonOf(read.status()), "FILE_NOT_FOUND");
  }
}

TEST_F(FileTest, RefusesFoldersDevicesPipesAndNuls) {
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);  // must not wait for a writer
  for (const std::string& path :
       {std::string("/tmp"), std::string("/dev/zero"), path_, std::string("/etc/passwd\0x", 13)}) {
    const auto read = ReadFileText(path, 10);
    EXPECT_EQ(read.status().code(), absl::StatusCode::kUnavailable) << path;
    EXPECT_EQ(ReasonOf(read.status()), "FILE_UNREADABLE") << path;
  }
}

TEST_F(FileTest, NoticesThatAFileBecameShorter) {
  Write("0123456789");
  auto file = RegularFile::Open(path_, 100);
  ASSERT_TRUE(file.ok());
  ByteBuffer bytes;
  ASSERT_TRUE(file->Append(2, &bytes).ok());
  ASSERT_EQ(truncate(path_.c_str(), 5), 0);
  EXPECT_EQ(ReasonOf(file->Append(8, &bytes)), "FILE_UNREADABLE");
  EXPECT_EQ(bytes.size(), 2) << "as before the failure";
}

}  // namespace
}  // namespace dorad
