#include "server/platform/files/safetensors_header.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad {
namespace {

using Json = nlohmann::json;

// Our own caps (safetensors.h). With them the parsed form is a small multiple of the header.
constexpr size_t kMaxTensors = 65536;
constexpr size_t kMaxMetadataEntries = 4096;
constexpr size_t kMaxNameBytes = 512;
constexpr size_t kMaxRank = 8;
constexpr uint64_t kMaxExtent = uint64_t{1} << 48;  // of a dimension and of an offset
constexpr size_t kMaxViolations = 64;

// Makes untrusted text safe for a message.
std::string Quote(std::string_view text) {
  constexpr size_t kShown = 96;
  const std::string head(text.substr(0, kShown));
  return absl::StrCat("'", absl::CEscape(head), text.size() > kShown ? "...'" : "'");
}

bool IsPrintable(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= 0x20 && c <= 0x7e; });
}

// The fields of an entry that have been read so far.
struct Draft {
  SafetensorsEntry entry;
  std::vector<uint64_t> offsets;
  bool has_dtype = false, has_shape = false, has_offsets = false;
};

// Reads the header's JSON event by event. The grammar has three levels, so deeper nesting is
// refused at once and no tree is built. The first error ends the parse; CheckTensors then checks
// all tensors.
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  std::map<std::string, Draft> drafts;
  std::map<std::string, std::string> metadata;
  std::optional<Violation> offence;

  bool null() override { return Scalar("null"); }
  bool boolean(bool) override { return Scalar("a boolean"); }
  bool number_integer(number_integer_t) override { return Scalar("a negative number"); }
  bool number_float(number_float_t, const string_t&) override {
    return Scalar("a number that is not an unsigned 64-bit integer");
  }
  bool binary(binary_t&) override { return Scalar("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (where_ == Where::kShape) return Dimension(value);
    if (where_ == Where::kOffsets) return Offset(value);
    return Scalar("a number");
  }

  bool string(string_t& value) override {
    if (where_ == Where::kMetadata) {
      metadata_value_->swap(value);
      return true;
    }
    if (where_ == Where::kTensor && field_ == "dtype") return SetDType(value);
    return Scalar("a string");
  }

  bool start_object(size_t) override {
    if (where_ == Where::kStart) {
      where_ = Where::kRoot;
      return true;
    }
    if (where_ != Where::kRoot) return Scalar("an object");
    where_ = name_ == "__metadata__" ? Where::kMetadata : Where::kTensor;
    return true;
  }

  bool key(string_t& key) override {
    switch (where_) {
      case Where::kRoot:
        return RootKey(key);
      case Where::kMetadata:
        return MetadataKey(key);
      default:
        return TensorKey(key);
    }
  }

  bool end_object() override {
    where_ = where_ == Where::kRoot ? Where::kEnd : Where::kRoot;
    return true;
  }

  bool start_array(size_t) override {
    if (where_ == Where::kTensor && field_ == "shape") {
      where_ = Where::kShape;
    } else if (where_ == Where::kTensor && field_ == "data_offsets") {
      where_ = Where::kOffsets;
    } else {
      return Scalar("an array");
    }
    return true;
  }

  bool end_array() override {
    if (where_ == Where::kOffsets && draft_->offsets.size() != 2) {
      return Offend("SAFETENSORS_OFFSETS", "data_offsets must have two elements, not ",
                    draft_->offsets.size());
    }
    where_ = Where::kTensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const Json::exception&) override {
    name_.clear();
    return Offend("SAFETENSORS_HEADER_JSON", "not JSON at byte ", position, " of the header");
  }

 private:
  enum class Where { kStart, kRoot, kMetadata, kTensor, kShape, kOffsets, kEnd };

  template <typename... Parts>
  bool Offend(const char* reason, const Parts&... parts) {
    offence = Violation{name_.empty() ? "header" : name_, reason, absl::StrCat(parts...)};
    return false;
  }

  // A value in the wrong place.
  bool Scalar(const char* what) {
    switch (where_) {
      case Where::kShape:
        return Offend("SAFETENSORS_SHAPE", "a dimension must be an unsigned integer, not ", what);
      case Where::kOffsets:
        return Offend("SAFETENSORS_OFFSETS", "an offset must be an unsigned integer, not ", what);
      case Where::kTensor:
        return WrongField(what);
      case Where::kMetadata:
        return Offend("SAFETENSORS_HEADER_JSON", "the values must be strings, not ", what);
      case Where::kRoot:
        return Offend("SAFETENSORS_HEADER_JSON", "the value must be an object, not ", what);
      default:
        return Offend("SAFETENSORS_HEADER_JSON", "the header must be an object, not ", what);
    }
  }

  bool WrongField(const char* what) {
    if (field_ == "dtype") {
      return Offend("SAFETENSORS_DTYPE", "dtype must be a string, not ", what);
    }
    if (field_ == "shape") return Offend("SAFETENSORS_SHAPE", "shape must be an array, not ", what);
    return Offend("SAFETENSORS_OFFSETS", "data_offsets must be an array, not ", what);
  }

  bool RootKey(const std::string& key) {
    name_.clear();
    if (key.empty()) return Offend("SAFETENSORS_NAME", "a tensor's name must not be empty");
    if (key.size() > kMaxNameBytes) {
      return Offend("SAFETENSORS_NAME", "the name ", Quote(key), " has ", key.size(),
                    " bytes, more than the allowed ", kMaxNameBytes);
    }
    if (!IsPrintable(key)) {
      return Offend("SAFETENSORS_NAME", "the name ", Quote(key), " has unprintable bytes");
    }
    name_ = key;
    if (key == "__metadata__") {
      if (metadata_seen_) return Offend("SAFETENSORS_DUPLICATE_KEY", "the key occurs twice");
      metadata_seen_ = true;
      return true;
    }
    const auto [position, inserted] = drafts.try_emplace(key);
    if (!inserted) return Offend("SAFETENSORS_DUPLICATE_KEY", "the tensor occurs twice");
    if (drafts.size() > kMaxTensors) {
      return Offend("SAFETENSORS_HEADER_TOO_LARGE", "more than ", kMaxTensors, " tensors");
    }
    draft_ = &position->second;
    return true;
  }

  bool MetadataKey(const std::string& key) {
    const auto [position, inserted] = metadata.try_emplace(key);
    if (!inserted) {
      return Offend("SAFETENSORS_DUPLICATE_KEY", "the key ", Quote(key), " occurs twice");
    }
    if (metadata.size() > kMaxMetadataEntries) {
      return Offend("SAFETENSORS_HEADER_TOO_LARGE", "more than ", kMaxMetadataEntries, " entries");
    }
    metadata_value_ = &position->second;
    return true;
  }

  bool TensorKey(const std::string& key) {
    bool* seen = key == "dtype"          ? &draft_->has_dtype
                 : key == "shape"        ? &draft_->has_shape
                 : key == "data_offsets" ? &draft_->has_offsets
                                         : nullptr;
    if (seen == nullptr) {
      return Offend("SAFETENSORS_HEADER_JSON", "unknown key ", Quote(key),
                    "; dtype, shape and data_offsets are known");
    }
    if (*seen) return Offend("SAFETENSORS_DUPLICATE_KEY", "the key ", key, " occurs twice");
    *seen = true;
    field_ = key;
    return true;
  }

  bool SetDType(const std::string& text) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      if (text == NameOf(dtype)) {
        draft_->entry.dtype = dtype;
        return true;
      }
    }
    return Offend("SAFETENSORS_DTYPE", "dtype ", Quote(text),
                  " is not supported; F32, F16 and BF16 are");
  }

  bool Dimension(uint64_t value) {
    if (value >= kMaxExtent) {
      return Offend("SAFETENSORS_SHAPE", "dimension ", value, " is not below 2^48");
    }
    if (draft_->entry.shape.size() == kMaxRank) {
      return Offend("SAFETENSORS_SHAPE", "more than ", kMaxRank, " dimensions");
    }
    draft_->entry.shape.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool Offset(uint64_t value) {
    if (value >= kMaxExtent) {
      return Offend("SAFETENSORS_OFFSETS", "offset ", value, " is not below 2^48");
    }
    if (draft_->offsets.size() == 2) {
      return Offend("SAFETENSORS_OFFSETS", "data_offsets must have two elements, not more");
    }
    draft_->offsets.push_back(value);
    return true;
  }

  Where where_ = Where::kStart;
  std::string name_;   // the root key at hand
  std::string field_;  // the tensor's key at hand
  Draft* draft_ = nullptr;
  std::string* metadata_value_ = nullptr;
  bool metadata_seen_ = false;
};

// nullopt: overflow.
std::optional<uint64_t> CheckedBytes(const SafetensorsEntry& entry) {
  uint64_t bytes = SizeOf(entry.dtype);
  for (const int64_t dimension : entry.shape) {
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(dimension), &bytes)) {
      return std::nullopt;
    }
  }
  return bytes;
}

// The problem of one tensor taken alone; nullopt: none.
std::optional<Violation> CheckTensor(const std::string& name, const Draft& draft) {
  if (!draft.has_dtype) return Violation{name, "SAFETENSORS_DTYPE", "dtype is missing"};
  if (!draft.has_shape) return Violation{name, "SAFETENSORS_SHAPE", "shape is missing"};
  if (!draft.has_offsets) return Violation{name, "SAFETENSORS_OFFSETS", "data_offsets is missing"};
  const uint64_t begin = draft.offsets[0], end = draft.offsets[1];
  if (end < begin) {
    return Violation{name, "SAFETENSORS_OFFSETS",
                     absl::StrCat("it ends at ", end, ", before its begin ", begin)};
  }
  const std::optional<uint64_t> bytes = CheckedBytes(draft.entry);
  if (!bytes.has_value() || *bytes != end - begin) {
    return Violation{name, "SAFETENSORS_SIZE",
                     absl::StrCat("shape [", absl::StrJoin(draft.entry.shape, ", "), "] of ",
                                  NameOf(draft.entry.dtype), " needs ",
                                  bytes.has_value() ? absl::StrCat(*bytes) : "more than 2^64",
                                  " bytes, data_offsets give ", end - begin)};
  }
  return std::nullopt;
}

// The tensors must cover the data from its first byte to its last, without holes or overlap.
std::optional<Violation> CheckLayout(const std::map<std::string, SafetensorsEntry>& tensors,
                                     uint64_t data_bytes) {
  using Item = std::map<std::string, SafetensorsEntry>::const_pointer;
  std::vector<Item> order;
  order.reserve(tensors.size());
  for (const auto& item : tensors) order.push_back(&item);
  std::sort(order.begin(), order.end(), [](Item a, Item b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  uint64_t covered = 0;
  for (const Item item : order) {
    if (item->second.begin != covered) {
      return Violation{
          item->first, "SAFETENSORS_OFFSETS",
          absl::StrCat("it begins at ", item->second.begin,
                       item->second.begin > covered ? ", leaving a hole after "
                                                    : ", overlapping data that ends at ",
                       covered)};
    }
    covered = item->second.end;
  }
  if (covered == data_bytes) return std::nullopt;
  return Violation{
      order.empty() ? "data" : order.back()->first, "SAFETENSORS_INCOMPLETE",
      absl::StrCat("the tensors end at byte ", covered, " of the data, the file has ", data_bytes)};
}

// nlohmann-json skips a byte order mark and takes a NUL for the end of its input; both are refused
// here, as is anything but spaces after the object.
std::optional<Violation> CheckText(std::string_view text) {
  const auto offence = [](const char* what) {
    return Violation{"header", "SAFETENSORS_HEADER_JSON", what};
  };
  if (text.empty() || text.front() != '{') return offence("it must begin with '{'");
  if (text.find('\0') != std::string_view::npos) return offence("it contains a NUL byte");
  if (text[text.find_last_not_of(' ')] != '}') {
    return offence("it must end with '}' and at most spaces after that");
  }
  return std::nullopt;
}

}  // namespace

absl::StatusOr<uint64_t> SafetensorsHeaderLength(std::string_view prefix, uint64_t file_bytes,
                                                 const std::string& subject) {
  DORAD_CHECK(prefix.size() == kSafetensorsPrefixBytes);
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<uint8_t>(prefix[i]);
  if (length > kSafetensorsMaxHeaderBytes) {
    return MakeInvalid(
        subject,
        {{"header", "SAFETENSORS_HEADER_TOO_LARGE",
          absl::StrCat("it claims ", length, " bytes, more than ", kSafetensorsMaxHeaderBytes)}});
  }
  if (length > file_bytes - kSafetensorsPrefixBytes) {
    return MakeInvalid(subject,
                       {{"header", "SAFETENSORS_HEADER_LENGTH",
                         absl::StrCat("it claims ", length, " bytes, the file has only ",
                                      file_bytes - kSafetensorsPrefixBytes, " after the length")}});
  }
  return length;
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view text, uint64_t data_bytes,
                                                         const std::string& subject) {
  if (auto offence = CheckText(text)) return MakeInvalid(subject, {*std::move(offence)});
  HeaderReader reader;
  const bool parsed = Json::sax_parse(text.begin(), text.end(), &reader);
  if (!parsed) {
    DORAD_CHECK(reader.offence.has_value());
    return MakeInvalid(subject, {*std::move(reader.offence)});
  }
  SafetensorsHeader header;
  header.metadata = std::move(reader.metadata);
  std::vector<Violation> violations;
  size_t omitted = 0;
  for (auto& [name, draft] : reader.drafts) {
    if (auto violation = CheckTensor(name, draft)) {
      if (violations.size() < kMaxViolations) {
        violations.push_back(*std::move(violation));
      } else {
        ++omitted;
      }
      continue;
    }
    draft.entry.begin = draft.offsets[0];
    draft.entry.end = draft.offsets[1];
    header.tensors.emplace_hint(header.tensors.end(), name, std::move(draft.entry));
  }
  if (violations.empty()) {
    if (auto violation = CheckLayout(header.tensors, data_bytes)) {
      violations.push_back(*std::move(violation));
    }
  }
  if (!violations.empty()) return MakeInvalid(subject, std::move(violations), omitted);
  return header;
}

}  // namespace dorad
