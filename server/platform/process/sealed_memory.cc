#include "server/platform/process/sealed_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad {
namespace {

absl::Status NoMemory(const std::string& name, size_t bytes, int error) {
  return MakeError(
      absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
      absl::StrCat("no ", bytes, " bytes of shared memory for ", name, ": ", std::strerror(error)));
}

absl::Status NotSealed(const std::string& what) {
  return MakeError(
      absl::StatusCode::kInternal, "MEMORY_NOT_SEALED",
      absl::StrCat("shared memory cannot be sealed: ", what, ": ", std::strerror(errno)));
}

// A separate read-only descriptor: it cannot write even if the other one can.
UniqueFd Reopen(int fd) {
  return UniqueFd(open(absl::StrCat("/proc/self/fd/", fd).c_str(), O_RDONLY | O_CLOEXEC));
}

}  // namespace

absl::StatusOr<SealedMemory> SealedMemory::Create(const std::string& name, size_t bytes) {
  DORAD_CHECK(bytes > 0);
  SealedMemory memory;
  memory.fd_ = UniqueFd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.fd_.ok()) return NoMemory(name, bytes, errno);
  // Pages are allocated at the first write. Allocating them now could ask for more than the host
  // has, and the kernel would kill processes.
  if (ftruncate(memory.fd_.get(), static_cast<off_t>(bytes)) != 0) {
    return NoMemory(name, bytes, errno);
  }
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd_.get(), 0);
  if (data == MAP_FAILED) return NoMemory(name, bytes, errno);
  memory.data_ = static_cast<std::byte*>(data);
  memory.size_ = bytes;
  return memory;
}

SealedMemory::~SealedMemory() {
  if (data_ != nullptr) DORAD_CHECK(munmap(data_, size_) == 0);
}

absl::Status SealedMemory::Seal() {
  DORAD_CHECK(data_ != nullptr);
  // The kernel does not seal memory that is mapped for writing. Keeps the addresses reserved
  // meanwhile.
  constexpr int kInPlace = MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  if (mmap(data_, size_, PROT_NONE, kInPlace, -1, 0) == MAP_FAILED) return NotSealed("unmapping");
  constexpr int kSeals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (fcntl(fd_.get(), F_ADD_SEALS, kSeals) != 0) return NotSealed("sealing");
  UniqueFd reader = Reopen(fd_.get());
  if (!reader.ok()) return NotSealed("opening it for reading");
  if (mmap(data_, size_, PROT_READ, MAP_FIXED | MAP_SHARED, reader.get(), 0) == MAP_FAILED) {
    return NotSealed("mapping it again");
  }
  fd_ = std::move(reader);
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> SealedMemory::Share() const {
  UniqueFd fd = Reopen(fd_.get());
  if (fd.ok()) return fd;
  return MakeError(absl::StatusCode::kUnavailable, "DESCRIPTORS_EXHAUSTED",
                   absl::StrCat("no descriptor for shared memory: ", std::strerror(errno)));
}

void SealedMemory::Swap(SealedMemory& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
}

}  // namespace dorad
