// What attention needs of every GPU from compute capability 8.0 on: pages of the cache by
// asynchronous copies of a warp, and its products. The members are those of attention_sm90.cuh.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/decoder/attention_device.cuh"
#include "kernels/isa/mma/attention.cuh"

namespace dorad::kernels {

struct MmaPages : MmaAttention {
  using Map = const __nv_bfloat16*;  // [pages, kv_heads, kKvPageTokens, head_dim]
  struct Policy {};

  template <int kHeadDim>
  static cudaError_t Encode(const __nv_bfloat16* cache, Map* map) {
    *map = cache;
    return cudaSuccess;
  }

  __device__ static void Prefetch(const Map&) {}
  __device__ static void FenceStages() {}
  __device__ static Policy EvictFirst() { return {}; }
  __device__ static Policy EvictLast() { return {}; }

  // Rows of one page and head from `from` on, to rows of a CacheTile that begin at a multiple of 8.
  // Whole warp.
  template <int kHeadDim, int kRows>
  __device__ static void FetchRows(const __nv_bfloat16* from, uint32_t to) {
    using Tile = CacheTile<kHeadDim>;
    constexpr int kUnits = kHeadDim / 8;  // of a row, 16 bytes each
    static_assert(kRows % 8 == 0 && kRows * kUnits % 32 == 0);
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int j = 0; j < kRows * kUnits / 32; ++j) {
      const int unit = lane + 32 * j;
      CopyAsync16(to + Tile::Offset(unit / kUnits, unit % kUnits * 8), from + 8 * unit, true);
    }
  }
  template <int kHeadDim>
  __device__ static const __nv_bfloat16* PageAt(const Map& cache, int page, int kv_heads,
                                                int head) {
    return cache + (int64_t{page} * kv_heads + head) * (kKvPageTokens * kHeadDim);
  }

  // The factors of a tile's keys (kind 0) or values (1), of KvCache::factors. Whole warp; then
  // Complete.
  __device__ static void FetchFactors(const __nv_bfloat16* factors, int head_dim, int kind,
                                      uint32_t destination, uint32_t, const TilePages& pages) {
    constexpr int kUnits = kKvPageTokens / 8;  // of a page, 16 bytes each
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int i = lane / kUnits, unit = lane % kUnits;
    const int page = __shfl_sync(0xFFFFFFFF, pages.page, (pages.page_lane + i) % 32);
    if (i < pages.first || i >= pages.end) return;
    CopyAsync16(destination + lane * 16,
                factors + FactorsAt(page, pages.kv_heads, pages.head, kind, head_dim) + 8 * unit,
                true);
  }

  // Keys or values of a tile. Whole warp; then Complete.
  template <int kHeadDim>
  __device__ static void FetchPages(const Map& cache, uint32_t destination,
                                    const TilePages& pages) {
    for (int i = pages.first; i < pages.end; ++i) {
      const int page = __shfl_sync(0xFFFFFFFF, pages.page, pages.page_lane + i);
      FetchRows<kHeadDim, kKvPageTokens>(
          PageAt<kHeadDim>(cache, page, pages.kv_heads, pages.head),
          destination + i * kKvPageTokens * CacheTile<kHeadDim>::kRowBytes);
    }
  }
};

}  // namespace dorad::kernels
