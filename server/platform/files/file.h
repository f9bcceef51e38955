// Reads small and large files into memory with a size cap and uniform statuses.
//
// Files are read, never mapped: truncation of a mapped file kills the process. The functions are
// thread-safe; a RegularFile belongs to one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/platform/files/byte_buffer.h"
#include "server/platform/net/unique_fd.h"

namespace dorad {

// A regular file that is open for reading. Owns the descriptor.
class RegularFile {
 public:
  // NOT_FOUND (FILE_NOT_FOUND), RESOURCE_EXHAUSTED (FILE_TOO_LARGE), UNAVAILABLE (FILE_UNREADABLE;
  // also for anything that is not a regular file). Never waits for a pipe's other end.
  static absl::StatusOr<RegularFile> Open(const std::string& path, uint64_t max_bytes);

  uint64_t size() const { return size_; }  // bytes
  // Every user of the host may write to it.
  bool writable_by_others() const { return writable_by_others_; }

  // Fills `out` with the bytes from `offset` on. UNAVAILABLE (FILE_UNREADABLE), also when the file
  // has become shorter. Thread-safe.
  absl::Status ReadAt(uint64_t offset, absl::Span<std::byte> out) const;
  // Appends the next `bytes` bytes to *out, unchanged after an error. Several threads read large
  // parts. Errors as of ReadAt.
  absl::Status Append(uint64_t bytes, ByteBuffer* out);
  // All of it. Errors as of ReadAt.
  absl::StatusOr<ByteBuffer> ReadAll();

 private:
  RegularFile(UniqueFd fd, uint64_t size, bool writable_by_others, std::string path);
  UniqueFd fd_;
  uint64_t size_ = 0;
  uint64_t next_ = 0;  // of Append
  bool writable_by_others_ = false;
  std::string path_;
};

// The bytes of a regular file; statuses as of RegularFile.
absl::StatusOr<ByteBuffer> ReadFileBytes(const std::string& path, uint64_t max_bytes);

// As ReadFileBytes, as text.
absl::StatusOr<std::string> ReadFileText(const std::string& path, uint64_t max_bytes);

}  // namespace dorad
