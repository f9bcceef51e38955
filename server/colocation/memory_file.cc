#include "server/colocation/memory_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/platform/error.h"

namespace dorad::shared_memory {
namespace {

absl::Status Invalid(const std::string& message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "SHARED_MEMORY_MEMORY_INVALID", message);
}

class MemoryFile final : public adapter::PeerMemory {
 public:
  MemoryFile(UniqueFd fd, uint64_t size) : fd_(std::move(fd)), size_(size) {}

  uint64_t size() const override { return size_; }

  absl::Status Read(uint64_t offset, absl::Span<std::byte> to) const override {
    while (!to.empty()) {
      const ssize_t n = pread(fd_.get(), to.data(), to.size(), static_cast<off_t>(offset));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return Invalid(absl::StrCat("cannot read the memory: ", std::strerror(errno)));
      if (n == 0) return Invalid("the memory has become shorter");
      offset += static_cast<uint64_t>(n);
      to.remove_prefix(static_cast<size_t>(n));
    }
    return absl::OkStatus();
  }

 private:
  const UniqueFd fd_;
  const uint64_t size_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<const adapter::PeerMemory>> OpenMemoryFile(UniqueFd fd,
                                                                          uint64_t size) {
  struct stat info;
  // Only memory files have seals, even if none is set.
  if (fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode) || fcntl(fd.get(), F_GET_SEALS) < 0) {
    return Invalid("the descriptor is not a memory file");
  }
  if ((fcntl(fd.get(), F_GETFL) & O_ACCMODE) == O_WRONLY) {
    return Invalid("the descriptor is not open for reading");
  }
  if (size > static_cast<uint64_t>(info.st_size)) {
    return Invalid(absl::StrCat("the memory has ", info.st_size, " bytes, not ", size));
  }
  return std::make_shared<const MemoryFile>(std::move(fd), size);
}

}  // namespace dorad::shared_memory
