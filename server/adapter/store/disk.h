// The store's disk operations and their errors.
//
// The system calls are virtual so that tests can make a disk fail. Everything is thread-safe.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace dorad::adapter {

// As write(2), fsync(2), ftruncate(2) and rename(2): -1 and errno.
class Disk {
 public:
  virtual ~Disk() = default;
  virtual ssize_t Write(int fd, const void* data, size_t bytes);
  virtual int Sync(int fd);
  virtual int Truncate(int fd, int64_t bytes);
  virtual int Rename(const std::string& from, const std::string& to);
};

// RESOURCE_EXHAUSTED (STORE_FULL) for a full disk or quota, else UNAVAILABLE (STORE_UNAVAILABLE).
// `error` is an errno. The status has the file's name, the log its path.
absl::Status DiskError(const std::string& doing, const std::string& path, int error);

// All of these fail as DiskError.

// Repeats short writes until all bytes are written.
absl::Status WriteAll(Disk& disk, int fd, std::string_view bytes, const std::string& path);
// Writes a new file; it must not exist. Its content is on the disk at the return; its name is after
// a sync of the folder.
absl::Status WriteNewFile(Disk& disk, const std::string& path,
                          const std::vector<std::string_view>& pieces);
absl::Status MakeFolder(const std::string& path);  // OK if it exists
absl::Status SyncFolder(Disk& disk, const std::string& path);

}  // namespace dorad::adapter
