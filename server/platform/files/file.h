// Reading small and large files into memory with a size cap and one way to report failures.
//
// Files are read, never mapped: a mapped file that somebody truncates kills the process.
// The functions are thread-safe; a RegularFile belongs to one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/platform/net/unique_fd.h"

namespace dorad {

// A regular file, open for one pass from its first byte to its last. Owns the descriptor.
class RegularFile {
 public:
  // NOT_FOUND (FILE_NOT_FOUND), RESOURCE_EXHAUSTED (FILE_TOO_LARGE), UNAVAILABLE (FILE_UNREADABLE;
  // also for anything that is not a regular file). Never waits for a pipe's other end.
  static absl::StatusOr<RegularFile> Open(const std::string& path, uint64_t max_bytes);

  uint64_t size() const { return size_; }  // bytes
  // Every user of the host may write to it.
  bool writable_by_others() const { return writable_by_others_; }

  // Appends the next `bytes` bytes to *out. UNAVAILABLE (FILE_UNREADABLE), also when the file has
  // become shorter meanwhile.
  absl::Status Append(uint64_t bytes, std::vector<std::byte>* out);
  // All of it. As Append.
  absl::StatusOr<std::vector<std::byte>> ReadAll();

 private:
  RegularFile(UniqueFd fd, uint64_t size, bool writable_by_others, std::string path);
  UniqueFd fd_;
  uint64_t size_ = 0;
  bool writable_by_others_ = false;
  std::string path_;
};

// As out->reserve(bytes), in huge pages where the system has them: a large buffer then costs some
// hundred page faults instead of some hundred thousand, and giving it back does not hold up the
// process's other threads.
void ReserveBytes(uint64_t bytes, std::vector<std::byte>* out);

// The bytes of a regular file; statuses as of RegularFile.
absl::StatusOr<std::vector<std::byte>> ReadFileBytes(const std::string& path, uint64_t max_bytes);

// As ReadFileBytes, as text.
absl::StatusOr<std::string> ReadFileText(const std::string& path, uint64_t max_bytes);

}  // namespace dorad
