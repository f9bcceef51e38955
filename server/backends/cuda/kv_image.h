// The contents of some pages of the KV cache in host memory, while the cache's own memory is given
// back. Owned by the decoder; confined to the engine thread.
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
  // Holds nothing.
  KvImage() = default;
  // `pages`, in ascending order, of a cache that is laid out so. Waits for the copy. The memory is
  // taken for the time: it is not page-locked, which would take longer than the copy.
  // RESOURCE_EXHAUSTED (OUT_OF_MEMORY) before anything is copied when the host has too little.
  static absl::StatusOr<KvImage> Save(const std::byte* cache, const KvLayout& layout,
                                      absl::Span<const int32_t> pages, const Stream& stream);
  // Back into a cache of the same form. Waits for the copy.
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
