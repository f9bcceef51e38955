#include "server/backends/cuda/page_copier.h"

#include <algorithm>

#include "server/platform/error.h"

namespace dorad::cuda {
namespace {

// Pages in the copy engine's queue at a time, 40 µs each. Then the queue is empty for a moment: a
// busy copy engine serves no other stream (measured: a step's own copy waited for all pages).
constexpr size_t kPagesAtOnce = 8;

}  // namespace

absl::StatusOr<PageCopier> PageCopier::Create() {
  DORAD_ASSIGN_OR_RETURN(Stream stream, Stream::Create(Priority::kLow));
  DORAD_ASSIGN_OR_RETURN(Event copied, Event::Create(Event::Wait::kSleeping));
  return PageCopier(std::move(stream), std::move(copied));
}

template <typename CopyPage>
absl::Status PageCopier::CopyAll(size_t pages, int64_t bytes, std::string_view what,
                                 CopyPage copy_page) {
  constexpr int64_t kBytes = PinnedPages::kPageBytes;
  absl::Status status;
  for (size_t i = 0; i < pages && status.ok(); ++i) {
    const int64_t at = static_cast<int64_t>(i) * kBytes;
    status = ToStatus(copy_page(i, at, std::min(kBytes, bytes - at)), what);
    if (!status.ok() || (i + 1) % kPagesAtOnce != 0) continue;
    status = copied_.Record(stream_, what);
    if (status.ok()) status = copied_.Synchronize(what);
  }
  status.Update(stream_.Synchronize(what));
  return status;
}

absl::Status PageCopier::ToDevice(const PinnedPages::Pages& pages, std::byte* device, int64_t bytes,
                                  std::string_view what) {
  return CopyAll(pages.size(), bytes, what, [&](size_t i, int64_t at, int64_t size) {
    return cudaMemcpyAsync(device + at, pages[i], size, cudaMemcpyHostToDevice, stream_.get());
  });
}

absl::Status PageCopier::FromDevice(const PinnedPages::Pages& pages, const std::byte* device,
                                    int64_t bytes, std::string_view what) {
  return CopyAll(pages.size(), bytes, what, [&](size_t i, int64_t at, int64_t size) {
    return cudaMemcpyAsync(pages[i], device + at, size, cudaMemcpyDeviceToHost, stream_.get());
  });
}

}  // namespace dorad::cuda
