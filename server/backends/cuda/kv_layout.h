// Where the pages of the KV cache lie: in chunks of a power of two of pages, each of which is whole
// pieces of device memory, so that it can be given back. A chunk is [planes, pages of a chunk]; a
// plane has the keys or the values of one layer.
//
// Kernels know one stride only, that of a page in a plane. They are told page places instead of
// page numbers: the place of a page is how many such strides it lies behind its plane's first page.
//
// The first kSparePages pages are the runner's own: page p of the engine is p + kSparePages here.
// Immutable, hence thread-safe.
#pragma once

#include <cstdint>

namespace dorad::cuda {

inline constexpr int32_t kSparePages = 1;

class KvLayout {
 public:
  KvLayout() = default;  // of one plane
  // A cache of so many planes in which a page takes page_bytes. piece_bytes: what device memory
  // comes in, a power of two. At least 64 pages are a chunk.
  KvLayout(int64_t planes, int64_t page_bytes, int64_t piece_bytes)
      : planes_(planes), page_bytes_(page_bytes) {
    while (chunk_bytes() % piece_bytes != 0) ++shift_;
  }

  int64_t planes() const { return planes_; }
  // In one plane.
  int64_t page_bytes() const { return page_bytes_; }
  // From one plane of a chunk to the next.
  int64_t plane_bytes() const { return page_bytes_ << shift_; }
  int64_t chunk_pages() const { return int64_t{1} << shift_; }
  int64_t chunk_bytes() const { return planes_ * plane_bytes(); }
  int64_t ChunksFor(int64_t pages) const { return ((pages - 1) >> shift_) + 1; }

  int32_t Place(int32_t page) const {
    const int32_t chunk = page >> shift_;
    return page + ((chunk * (static_cast<int32_t>(planes_) - 1)) << shift_);
  }
  // From the cache's begin, of its first plane.
  int64_t Offset(int32_t page) const { return Place(page) * page_bytes_; }

 private:
  static constexpr int kLeastShift = 6;

  int64_t planes_ = 1;
  int64_t page_bytes_ = 0;
  int shift_ = kLeastShift;
};

}  // namespace dorad::cuda
