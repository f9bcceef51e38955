// Copies between pinned pages and the device in small parts, so that the copies of a decode step do
// not wait behind gigabytes. The caller owns it. Move-only. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/backends/cuda/device.h"
#include "server/backends/cuda/pinned_pages.h"

namespace dorad::cuda {

class PageCopier {
 public:
  static absl::StatusOr<PageCopier> Create();

  // The first `bytes` of the pages, to or from `device`. Done on return, also after a failure.
  absl::Status ToDevice(const PinnedPages::Pages& pages, std::byte* device, int64_t bytes,
                        std::string_view what);
  absl::Status FromDevice(const PinnedPages::Pages& pages, const std::byte* device, int64_t bytes,
                          std::string_view what);
  // The stream of the copies.
  const Stream& stream() const { return stream_; }

 private:
  PageCopier(Stream stream, Event copied)
      : stream_(std::move(stream)), copied_(std::move(copied)) {}
  template <typename CopyPage>
  absl::Status CopyAll(size_t pages, int64_t bytes, std::string_view what, CopyPage copy_page);

  Stream stream_;
  Event copied_;
};

}  // namespace dorad::cuda
