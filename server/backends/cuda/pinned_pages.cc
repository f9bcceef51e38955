#include "server/backends/cuda/pinned_pages.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/platform/error.h"

namespace dorad::cuda {
namespace {

// Pages pinned in one call.
constexpr int64_t kBlockPages = 512;

}  // namespace

absl::StatusOr<std::unique_ptr<PinnedPages>> PinnedPages::Create(int64_t bytes) {
  std::unique_ptr<PinnedPages> made(new PinnedPages());
  absl::MutexLock lock(&made->mu_);
  for (int64_t left = bytes / kPageBytes; left > 0;) {
    const int64_t count = std::min(left, kBlockPages);
    DORAD_ASSIGN_OR_RETURN(PinnedBuffer block, PinnedBuffer::Allocate(count * kPageBytes));
    for (int64_t i = 0; i < count; ++i) made->free_.push_back(block.as<>(i * kPageBytes));
    made->memory_.push_back(std::move(block));
    made->total_ += count;
    left -= count;
  }
  return made;
}

absl::StatusOr<PinnedPages::Pages> PinnedPages::Take(int64_t count) {
  absl::MutexLock lock(&mu_);
  if (count > static_cast<int64_t>(free_.size())) {
    return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                     absl::StrCat(count, " pages of pinned host memory are needed; of ", total_,
                                  ", ", free_.size(), " are free"));
  }
  Pages taken(free_.end() - count, free_.end());
  free_.resize(free_.size() - static_cast<size_t>(count));
  return taken;
}

void PinnedPages::Return(const Pages& pages) {
  absl::MutexLock lock(&mu_);
  free_.insert(free_.end(), pages.begin(), pages.end());
}

}  // namespace dorad::cuda
