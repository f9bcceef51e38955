#include "server/platform/files/safetensors.h"

#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/platform/check.h"
#include "server/platform/error.h"
#include "server/platform/files/file.h"
#include "server/platform/files/safetensors_header.h"

namespace dorad {
namespace {

absl::Status TooSmall(const std::string& subject, uint64_t bytes) {
  return MakeInvalid(subject, {{"header", "SAFETENSORS_HEADER_TOO_SMALL",
                                absl::StrCat("the file has ", bytes, " bytes, fewer than the ",
                                             kSafetensorsPrefixBytes, " of the header's length")}});
}

std::string_view TextOf(const ByteBuffer& image, size_t offset, size_t size) {
  return {reinterpret_cast<const char*>(image.data()) + offset, size};
}

std::map<std::string, TensorView> MakeViews(const SafetensorsHeader& header,
                                            const std::byte* data) {
  std::map<std::string, TensorView> views;
  for (const auto& [name, entry] : header.tensors) {
    views.emplace_hint(
        views.end(), name,
        TensorView{entry.dtype, entry.shape,
                   absl::MakeConstSpan(data + entry.begin, entry.end - entry.begin)});
  }
  return views;
}

}  // namespace

size_t SizeOf(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

const char* NameOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "F32";
    case DType::kF16:
      return "F16";
    case DType::kBF16:
      return "BF16";
  }
  DORAD_CHECK(false);
}

int64_t TensorView::num_elements() const {
  int64_t elements = 1;
  for (const int64_t dimension : shape) elements *= dimension;
  return elements;
}

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Parse(
    SharedBytes bytes, const std::string& subject) {
  const ByteBuffer& image = *bytes;
  if (image.size() < kSafetensorsPrefixBytes) return TooSmall(subject, image.size());
  DORAD_ASSIGN_OR_RETURN(
      const uint64_t length,
      SafetensorsHeaderLength(TextOf(image, 0, kSafetensorsPrefixBytes), image.size(), subject));
  const uint64_t data_offset = kSafetensorsPrefixBytes + length;
  DORAD_ASSIGN_OR_RETURN(SafetensorsHeader header,
                         ParseSafetensorsHeader(TextOf(image, kSafetensorsPrefixBytes, length),
                                                image.size() - data_offset, subject));
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile());
  file->metadata_ = std::move(header.metadata);
  file->tensors_ = MakeViews(header, image.data() + data_offset);
  file->image_ = std::move(bytes);
  return file;
}

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Read(const std::string& path,
                                                                       uint64_t max_bytes) {
  DORAD_ASSIGN_OR_RETURN(RegularFile source, RegularFile::Open(path, max_bytes));
  if (source.size() < kSafetensorsPrefixBytes) return TooSmall(path, source.size());
  ByteBuffer image;
  DORAD_RETURN_IF_ERROR(source.Append(kSafetensorsPrefixBytes, &image));
  DORAD_ASSIGN_OR_RETURN(
      const uint64_t length,
      SafetensorsHeaderLength(TextOf(image, 0, kSafetensorsPrefixBytes), source.size(), path));
  // Checks the header before allocating memory for the data.
  DORAD_RETURN_IF_ERROR(source.Append(length, &image));
  const uint64_t data_bytes = source.size() - image.size();
  DORAD_ASSIGN_OR_RETURN(
      SafetensorsHeader header,
      ParseSafetensorsHeader(TextOf(image, kSafetensorsPrefixBytes, length), data_bytes, path));
  ReserveBytes(source.size(), &image);
  DORAD_RETURN_IF_ERROR(source.Append(data_bytes, &image));
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile());
  file->metadata_ = std::move(header.metadata);
  file->tensors_ = MakeViews(header, image.data() + kSafetensorsPrefixBytes + length);
  file->image_ = Share(std::move(image));
  return file;
}

const TensorView* SafetensorsFile::Find(const std::string& name) const {
  const auto position = tensors_.find(name);
  return position == tensors_.end() ? nullptr : &position->second;
}

}  // namespace dorad
