// Memory in a file without a name (memfd) that is written once and then sealed. After that neither
// this process nor another one with its descriptor can change it.
//
// The caller owns it. Thread-compatible; immutable once sealed and therefore thread-safe.
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

  // Sealing does not change the address.
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

  // Ends writing: later writes, here or through a descriptor, fail. INTERNAL
  // (MEMORY_NOT_SEALED). REQUIRES: not sealed.
  absl::Status Seal();
  // Another read-only descriptor of it. UNAVAILABLE (DESCRIPTORS_EXHAUSTED). REQUIRES: sealed.
  absl::StatusOr<UniqueFd> Share() const;

 private:
  void Swap(SealedMemory& other) noexcept;

  UniqueFd fd_;  // read-only once it is sealed
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace dorad
