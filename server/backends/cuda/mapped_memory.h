// Device memory whose pages can be released while its addresses stay: pointers in graphs and tensor
// maps are valid again after the next Map, with undefined contents.
//
// The caller owns it and ends all work on it before an Unmap. Move-only. Thread-compatible.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/backends/cuda/device.h"
#include "server/platform/net/unique_fd.h"

namespace dorad::cuda {

// Granularity of mapped device memory.
inline constexpr int64_t kMappedPageBytes = 2 << 20;

// Reserved device addresses without memory. Move-only.
class AddressRange {
 public:
  AddressRange() = default;
  // 2 MiB aligned; bytes: a multiple of that.
  static absl::StatusOr<AddressRange> Reserve(int64_t bytes, const std::string& kind);
  AddressRange(AddressRange&& other) noexcept { Swap(other); }
  AddressRange& operator=(AddressRange&& other) noexcept {
    AddressRange taken(std::move(other));
    Swap(taken);
    return *this;
  }
  ~AddressRange();

  CUdeviceptr address() const { return address_; }

 private:
  void Swap(AddressRange& other) noexcept {
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
  }

  CUdeviceptr address_ = 0;
  int64_t bytes_ = 0;
};

class MappedMemory {
 public:
  MappedMemory() = default;
  // Mapped, not initialised, 2 MiB aligned. RESOURCE_EXHAUSTED (OUT_OF_MEMORY) as
  // MemoryLedger::Reserve, and when the device has no more. The ledger is borrowed; whole pages of
  // 2 MiB are accounted for. `shareable`: other processes can map it, too (Share).
  static absl::StatusOr<MappedMemory> Create(MemoryLedger* ledger, std::string kind, int64_t bytes,
                                             bool shareable = false);
  // At addresses that the caller has reserved; not mapped yet.
  MappedMemory(MemoryLedger* ledger, std::string kind, CUdeviceptr address, int64_t bytes);
  MappedMemory(MappedMemory&& other) noexcept { Swap(other); }
  MappedMemory& operator=(MappedMemory&& other) noexcept {
    MappedMemory taken(std::move(other));
    Swap(taken);
    return *this;
  }
  ~MappedMemory();

  // Releases the pages. A refusal by the driver is logged, and the memory counts as unmapped.
  // REQUIRES: mapped.
  void Unmap();
  // OUT_OF_MEMORY as Create; then it is not mapped. REQUIRES: not mapped.
  absl::Status Map(MemoryLedger::Source source = MemoryLedger::Source::kDevice);
  bool mapped() const { return !pieces_.empty(); }

  // Bytes of the pieces of device memory, in order of address.
  std::vector<uint64_t> piece_bytes() const;
  // A descriptor of one piece, for another process to map. While that is open or mapped anywhere,
  // Unmap does not return the piece to the device. INTERNAL (CUDA_ERROR). REQUIRES: shareable,
  // mapped.
  absl::StatusOr<UniqueFd> Share(size_t piece) const;

  template <typename T = void>
  T* as(int64_t offset_bytes = 0) const {
    return reinterpret_cast<T*>(address_ + static_cast<CUdeviceptr>(offset_bytes));
  }
  // As requested.
  int64_t bytes() const { return bytes_; }
  // Of the pages.
  int64_t size() const { return size_; }

 private:
  void Swap(MappedMemory& other) noexcept;
  absl::Status MapPieces();
  void UnmapPieces();

  MemoryLedger* ledger_ = nullptr;
  std::string kind_;
  bool shareable_ = false;
  AddressRange own_addresses_;  // or none
  CUdeviceptr address_ = 0;
  int64_t bytes_ = 0;
  int64_t size_ = 0;
  std::vector<CUmemGenericAllocationHandle> pieces_;
};

}  // namespace dorad::cuda
