// The KV cache's device memory: one range of addresses, with chunks of memory that are mapped and
// unmapped one by one. Owned by the decoder. Move-only; confined to the engine thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/backends/cuda/device.h"
#include "server/backends/cuda/kv_layout.h"
#include "server/backends/cuda/mapped_memory.h"

namespace dorad::cuda {

class KvMemory {
 public:
  KvMemory() = default;
  // Whole chunks for `pages` pages, all mapped. OUT_OF_MEMORY as MappedMemory. The ledger is
  // borrowed.
  static absl::StatusOr<KvMemory> Create(const KvLayout& layout, int64_t pages,
                                         MemoryLedger* ledger);

  const KvLayout& layout() const { return layout_; }
  template <typename T = std::byte>
  T* as() const {
    return reinterpret_cast<T*>(addresses_.address());
  }

  // All planes of a page. Ordered with the stream's work.
  absl::Status CopyPage(int32_t from, int32_t to, const Stream& stream);

  // REQUIRES: it is mapped.
  void Unmap(int32_t chunk) { chunks_[static_cast<size_t>(chunk)].Unmap(); }
  // OUT_OF_MEMORY also when other processes would soon need the memory. REQUIRES: it is not mapped.
  absl::Status Map(int32_t chunk) {
    return chunks_[static_cast<size_t>(chunk)].Map(MemoryLedger::Source::kSpare);
  }

  // Unmaps all chunks; returns the bytes.
  int64_t UnmapAll();
  // Maps the chunks of UnmapAll again. OUT_OF_MEMORY: none is mapped.
  absl::Status MapAgain();

 private:
  absl::Status MapAll(absl::Span<MappedMemory* const> chunks);

  MemoryLedger* ledger_ = nullptr;
  KvLayout layout_;
  AddressRange addresses_;  // outlives the chunks
  std::vector<MappedMemory> chunks_;
  std::vector<MappedMemory*> unmapped_;  // by UnmapAll
};

}  // namespace dorad::cuda
