// Strict reader of the safetensors format.
//
// Accepts a subset of the reference (Rust) reader's files: the same rules (header first, duplicate
// keys refused, tensors contiguous from offset 0 without holes or overlap, size of each equal to
// its shape, last one ending at the end of the file) plus our own caps: header <= 8 MiB, <= 65,536
// tensors, names <= 512 printable bytes, rank <= 8, dtype F32, F16 or BF16 for every tensor. The
// file object keeps the bytes (read, never mapped: truncation of a mapped file kills the process),
// so views live as long as it does. Immutable after construction and therefore thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/platform/files/byte_buffer.h"

namespace dorad {

enum class DType { kF32, kF16, kBF16 };
size_t SizeOf(DType dtype);
const char* NameOf(DType dtype);  // "F32", "F16", "BF16"

struct TensorView {
  DType dtype;
  std::vector<int64_t> shape;
  absl::Span<const std::byte> bytes;  // row-major, little-endian; may be unaligned

  int64_t num_elements() const;
};

class SafetensorsFile {
 public:
  // Keeps a whole file's bytes. `subject` is its name in errors. INVALID_ARGUMENT with
  // reason SAFETENSORS_* otherwise.
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Parse(SharedBytes bytes,
                                                                const std::string& subject);
  // Reads a regular file of at most max_bytes. NOT_FOUND (FILE_NOT_FOUND), INVALID_ARGUMENT
  // (SAFETENSORS_*), RESOURCE_EXHAUSTED (FILE_TOO_LARGE), UNAVAILABLE (FILE_UNREADABLE).
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Read(const std::string& path,
                                                               uint64_t max_bytes);

  // By name, in ascending order of names.
  const std::map<std::string, TensorView>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // The whole file.
  absl::Span<const std::byte> image() const { return *image_; }
  // nullptr when absent.
  const TensorView* Find(const std::string& name) const;

 private:
  SafetensorsFile() = default;
  SharedBytes image_;
  std::map<std::string, TensorView> tensors_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace dorad
