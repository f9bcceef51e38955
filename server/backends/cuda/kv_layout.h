// The layout of the KV cache's pages: chunks of a power of two of pages. Each chunk is whole pieces
// of device memory, so that it can be released. A chunk is [planes, pages of a chunk]; a plane has
// the keys or the values of one layer of each group (model::KvGroups), in pages of their own. In
// eight bits the planes behind them have their factors, of several layers each.
//
// Kernels have one stride, that of a page in a plane. They get page places instead of page numbers:
// a page's place is its distance from its plane's first page in such strides.
//
// A recurrent state has whole pages, and its blocks lie in the planes (model::DeltaStateLayout).
//
// The first kSparePages pages are the runner's own: page p of the engine is p + kSparePages here.
// Immutable and therefore thread-safe.
#pragma once

#include <cstdint>

#include "server/model/delta_config.h"

namespace dorad::cuda {

inline constexpr int32_t kSparePages = 1;

class KvLayout {
 public:
  KvLayout() = default;  // of one plane
  // A cache of `planes` planes with page_bytes for each page. piece_bytes: the granularity of
  // device memory, a power of two. A chunk has at least 64 pages.
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

// Bytes of one page over all planes.
int64_t KvPageBytes(const model::ModelConfig& config);
// Bytes of the largest cache: kernels have 32 bits for the heads of all positions of all planes.
int64_t MostKvBytes(const model::ModelConfig& config);
KvLayout KvLayoutOf(const model::ModelConfig& config);
// Where the factors of a layer's keys and values begin (KvCache::factors); slot: of its KvGroups.
struct FactorsPlace {
  int64_t plane = 0;
  int64_t offset = 0;  // bytes in each page
};
FactorsPlace FactorsPlaceOf(const model::ModelConfig& config, int64_t slot);
// The places of a recurrent state in such pages.
model::DeltaStateLayout StateLayoutOf(const model::ModelConfig& config);

}  // namespace dorad::cuda
