#include "server/cuda/page_copier.h"

#include <algorithm>

#include "server/base/error.h"

namespace dorad::cuda {
namespace {

// Pages that the copy engine has at a time, of 40 us each.
constexpr int kPagesUnderWay = 8;

}  // namespace

absl::StatusOr<PageCopier> PageCopier::Create() {
  DORAD_ASSIGN_OR_RETURN(Stream stream, Stream::Create(Priority::kLoading));
  PageCopier copier(std::move(stream));
  for (int i = 0; i < kPagesUnderWay; ++i) {
    DORAD_ASSIGN_OR_RETURN(Event event, Event::Create(Event::Wait::kSleeping));
    copier.under_way_.push_back(std::move(event));
  }
  return copier;
}

template <typename CopyPage>
absl::Status PageCopier::CopyAll(size_t pages, int64_t bytes, std::string_view what,
                                 CopyPage copy_page) {
  constexpr int64_t kBytes = PinnedPages::kPageBytes;
  absl::Status status;
  for (size_t i = 0; i < pages && status.ok(); ++i) {
    const Event& earlier = under_way_[i % under_way_.size()];
    const int64_t at = static_cast<int64_t>(i) * kBytes;
    status = earlier.Synchronize(what);
    if (status.ok()) status = ToStatus(copy_page(i, at, std::min(kBytes, bytes - at)), what);
    if (status.ok()) status = earlier.Record(stream_, what);
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
