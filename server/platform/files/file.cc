#include "server/platform/files/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/platform/error.h"
#include "server/platform/parallel_for.h"

namespace dorad {
namespace {

// Growing the vector by blocks of about an L2 cache keeps the zeros of resize() in the cache until
// read() overwrites them: memory is touched once, not twice.
constexpr uint64_t kBlockBytes = 4 << 20;
constexpr int kMaxReaders = 8;

absl::Status Unreadable(const std::string& path, const std::string& why) {
  return MakeError(absl::StatusCode::kUnavailable, "FILE_UNREADABLE",
                   absl::StrCat("cannot read ", path, ": ", why));
}

absl::Status OpenFailed(const std::string& path, int error) {
  if (error == ENOENT || error == ENOTDIR) {
    return MakeError(absl::StatusCode::kNotFound, "FILE_NOT_FOUND",
                     absl::StrCat("no such file: ", path));
  }
  return Unreadable(path, std::strerror(error));
}

}  // namespace

RegularFile::RegularFile(UniqueFd fd, uint64_t size, bool writable_by_others, std::string path)
    : fd_(std::move(fd)),
      size_(size),
      writable_by_others_(writable_by_others),
      path_(std::move(path)) {}

absl::StatusOr<RegularFile> RegularFile::Open(const std::string& path, uint64_t max_bytes) {
  // A NUL would silently name another file. O_NONBLOCK: opening a FIFO must not wait for a writer.
  if (path.find('\0') != std::string::npos) return Unreadable(path, "the path contains a NUL");
  UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.ok()) return OpenFailed(path, errno);
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return Unreadable(path, std::strerror(errno));
  if (!S_ISREG(info.st_mode)) return Unreadable(path, "not a regular file");
  const uint64_t size = static_cast<uint64_t>(info.st_size);
  if (size > max_bytes) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, "FILE_TOO_LARGE",
        absl::StrCat(path, " has ", size, " bytes, more than the allowed ", max_bytes));
  }
  (void)posix_fadvise(fd.get(), 0, 0, POSIX_FADV_SEQUENTIAL);
  return RegularFile(std::move(fd), size, (info.st_mode & S_IWOTH) != 0, path);
}

absl::Status RegularFile::ReadAt(uint64_t offset, absl::Span<std::byte> out) const {
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t n =
        pread(fd_.get(), out.data() + done, out.size() - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Unreadable(path_, std::strerror(errno));
    if (n == 0) return Unreadable(path_, "it became shorter while it was read");
    done += static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

absl::Status RegularFile::Append(uint64_t bytes, ByteBuffer* out) {
  const size_t old_size = out->size();
  out->resize(old_size + bytes);
  const absl::Span<std::byte> added = absl::MakeSpan(*out).subspan(old_size);
  const size_t blocks = (bytes + kBlockBytes - 1) / kBlockBytes;
  const absl::Status status = ParallelFor(UsableCores(kMaxReaders), blocks, [&](size_t i) {
    return ReadAt(next_ + i * kBlockBytes, added.subspan(i * kBlockBytes, kBlockBytes));
  });
  if (status.ok()) {
    next_ += bytes;
  } else {
    out->resize(old_size);
  }
  return status;
}

absl::StatusOr<ByteBuffer> RegularFile::ReadAll() {
  ByteBuffer bytes;
  ReserveBytes(size_, &bytes);
  DORAD_RETURN_IF_ERROR(Append(size_, &bytes));
  return bytes;
}

absl::StatusOr<ByteBuffer> ReadFileBytes(const std::string& path, uint64_t max_bytes) {
  DORAD_ASSIGN_OR_RETURN(RegularFile file, RegularFile::Open(path, max_bytes));
  return file.ReadAll();
}

absl::StatusOr<std::string> ReadFileText(const std::string& path, uint64_t max_bytes) {
  DORAD_ASSIGN_OR_RETURN(const ByteBuffer bytes, ReadFileBytes(path, max_bytes));
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

}  // namespace dorad
