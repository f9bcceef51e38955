// A host copy of some pages of the KV cache, while the cache's own memory is released. Owned by the
// decoder; confined to the engine thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/backends/cuda/device.h"
#include "server/backends/cuda/kv_layout.h"

namespace dorad::cuda {

class KvImage {
 public:
  // An empty copy.
  KvImage() = default;
  // Copies `pages`, in ascending order, of a cache with this layout. Waits for the copy. The memory
  // is not page-locked: locking would take longer than the copy. RESOURCE_EXHAUSTED (OUT_OF_MEMORY)
  // before the copy when the host has too little.
  static absl::StatusOr<KvImage> Save(const std::byte* cache, const KvLayout& layout,
                                      absl::Span<const int32_t> pages, const Stream& stream);
  // Copies back into a cache of the same layout. Waits for the copy.
  absl::Status Restore(std::byte* cache, const Stream& stream) const;

  int64_t bytes() const { return bytes_; }

 private:
  struct Run {
    int64_t at = 0;    // in the first plane, in bytes from the cache's begin
    int64_t size = 0;  // in a plane
  };

  int64_t planes_ = 0;
  int64_t plane_bytes_ = 0;
  int64_t bytes_ = 0;
  std::vector<Run> runs_;              // of consecutive pages of a chunk
  std::unique_ptr<std::byte[]> data_;  // run by run: [planes, size]
};

}  // namespace dorad::cuda
