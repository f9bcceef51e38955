// Page-locked host memory in pages of one size, all allocated at the start: pinning is slow (0.3 s
// a GiB) and blocks other CUDA calls. Pages of one size cannot fragment.
//
// The caller owns it; it outlives its taken pages. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/backends/cuda/device.h"

namespace dorad::cuda {

class PinnedPages {
 public:
  static constexpr int64_t kPageBytes = 2 << 20;
  using Pages = std::vector<std::byte*>;

  // As many whole pages as fit into `bytes`.
  static absl::StatusOr<std::unique_ptr<PinnedPages>> Create(int64_t bytes);

  int64_t total_pages() const { return total_; }
  static int64_t PagesFor(int64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes; }
  // RESOURCE_EXHAUSTED (OUT_OF_MEMORY) when fewer are free; nothing is taken.
  absl::StatusOr<Pages> Take(int64_t count);
  void Return(const Pages& pages);

 private:
  PinnedPages() = default;

  std::vector<PinnedBuffer> memory_;
  int64_t total_ = 0;
  mutable absl::Mutex mu_;
  Pages free_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::cuda
