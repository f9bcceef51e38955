#include "server/adapter/store/disk.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/platform/error.h"
#include "server/platform/log.h"
#include "server/platform/net/unique_fd.h"

namespace dorad::adapter {
namespace {

constexpr mode_t kFileMode = 0640;
constexpr mode_t kFolderMode = 0750;
constexpr size_t kMaxWrite = size_t{1} << 30;  // the system takes no more than 2 GiB at once

}  // namespace

ssize_t Disk::Write(int fd, const void* data, size_t bytes) { return write(fd, data, bytes); }
// Not fdatasync: a folder's new names are not data to every file system.
int Disk::Sync(int fd) { return fsync(fd); }
int Disk::Truncate(int fd, int64_t bytes) { return ftruncate(fd, bytes); }
int Disk::Rename(const std::string& from, const std::string& to) {
  return rename(from.c_str(), to.c_str());
}

absl::Status DiskError(const std::string& doing, const std::string& path, int error) {
  LogWarning("the store's disk fails",
             {{"doing", doing}, {"path", path}, {"error", std::string(std::strerror(error))}});
  // Names only the file: publishers must not learn the host's folders.
  const std::string name = path.substr(path.find_last_of('/') + 1);
  const std::string text =
      absl::StrCat("the store cannot ", doing, " \"", name, "\": ", std::strerror(error));
  if (error == ENOSPC || error == EDQUOT) {
    return MakeError(absl::StatusCode::kResourceExhausted, "STORE_FULL", text);
  }
  return MakeError(absl::StatusCode::kUnavailable, "STORE_UNAVAILABLE", text);
}

absl::Status WriteAll(Disk& disk, int fd, std::string_view bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t n = disk.Write(fd, bytes.data(), std::min(bytes.size(), kMaxWrite));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return DiskError("write", path, errno);
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return absl::OkStatus();
}

absl::Status WriteNewFile(Disk& disk, const std::string& path,
                          const std::vector<std::string_view>& pieces) {
  const UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, kFileMode));
  if (!fd.ok()) return DiskError("create", path, errno);
  for (const std::string_view piece : pieces) {
    DORAD_RETURN_IF_ERROR(WriteAll(disk, fd.get(), piece, path));
  }
  if (disk.Sync(fd.get()) != 0) return DiskError("sync", path, errno);
  return absl::OkStatus();
}

absl::Status MakeFolder(const std::string& path) {
  if (mkdir(path.c_str(), kFolderMode) != 0 && errno != EEXIST) {
    return DiskError("create", path, errno);
  }
  return absl::OkStatus();
}

absl::Status SyncFolder(Disk& disk, const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.ok()) return DiskError("open", path, errno);
  if (disk.Sync(fd.get()) != 0) return DiskError("sync", path, errno);
  return absl::OkStatus();
}

}  // namespace dorad::adapter
