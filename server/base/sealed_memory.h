// Memory in a file without a name (memfd) that is written once and then sealed: from there on
// nobody can change it, neither this process nor those that its descriptors are given to.
//
// Owned by whoever makes it. Thread-compatible; sealed, it is immutable, hence thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/unique_fd.h"

namespace dorad {

class SealedMemory {
 public:
  SealedMemory() = default;
  // Zeros that can be written. `name` is what /proc shows. RESOURCE_EXHAUSTED (OUT_OF_MEMORY).
  // REQUIRES: bytes > 0.
  static absl::StatusOr<SealedMemory> Create(const std::string& name, size_t bytes);
  SealedMemory(SealedMemory&& other) noexcept { Swap(other); }
  SealedMemory& operator=(SealedMemory&& other) noexcept {
    SealedMemory taken(std::move(other));
    Swap(taken);
    return *this;
  }
  ~SealedMemory();

  // Stays the same when it is sealed.
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

  // Ends writing: who still writes, here or through a descriptor, fails. INTERNAL
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
