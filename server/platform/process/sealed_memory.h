// Memory in a file without a name (memfd) that is written once and then sealed. After that neither
// this process nor a process that gets a descriptor of it can change it.
//
// Owned by its maker. Thread-compatible; immutable once sealed, hence thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/platform/net/unique_fd.h"

namespace dorad {

class SealedMemory {
 public:
  SealedMemory() = default;
  // Makes writable zeros. /proc shows `name`. RESOURCE_EXHAUSTED (OUT_OF_MEMORY).
  // REQUIRES: bytes > 0.
  static absl::StatusOr<SealedMemory> Create(const std::string& name, size_t bytes);
  SealedMemory(SealedMemory&& other) noexcept { Swap(other); }
  SealedMemory& operator=(SealedMemory&& other) noexcept {
    SealedMemory taken(std::move(other));
    Swap(taken);
    return *this;
  }
  ~SealedMemory();

  // The address stays the same when the memory is sealed.
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

  // Ends writing: later writes, here or through a descriptor, fail. INTERNAL
  // (MEMORY_NOT_SEALED). REQUIRES: not sealed.
  absl::Status Seal();
  // Another descriptor of it, for reading. UNAVAILABLE (DESCRIPTORS_EXHAUSTED). REQUIRES: sealed.
  absl::StatusOr<UniqueFd> Share() const;

 private:
  void Swap(SealedMemory& other) noexcept;

  UniqueFd fd_;  // for reading only, once it is sealed
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace dorad
