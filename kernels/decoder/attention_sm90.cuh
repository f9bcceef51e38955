// What attention needs of Hopper: pages of the cache by the copy engine, and its products.
// attention_mma.cuh has the same members for all other GPUs.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/decoder/attention_device.cuh"
#include "kernels/isa/sm90/attention.cuh"
#include "kernels/isa/sm90/copy.cuh"
#include "kernels/isa/sm90/tensor_map.h"

namespace dorad::kernels {

struct Sm90Pages : Sm90Attention {
  using Map = CUtensorMap;  // of a layer's keys or values
  using Policy = CachePolicy;

  // [pages · kv_heads · kKvPageTokens, head_dim], in boxes of a page by one CacheTile block.
  template <int kHeadDim>
  static cudaError_t Encode(const __nv_bfloat16* cache, Map* map) {
    using Tile = CacheTile<kHeadDim>;
    // The true number of pages is not needed: page lists contain valid pages only.
    return EncodeTensor<2>(cache,
                           {{kHeadDim, cuuint64_t{1} << 31},
                            {kHeadDim},
                            {Tile::kColumns, static_cast<cuuint32_t>(kKvPageTokens)}},
                           map);
  }

  // One thread.
  __device__ static void Prefetch(const Map& map) { PrefetchTensorMap(&map); }
  // Orders this thread's accesses to shared memory before later fetches to it.
  __device__ static void FenceStages() { FenceProxyAsync(); }

  __device__ static Policy EvictFirst() { return kernels::EvictFirst(); }
  __device__ static Policy EvictLast() { return kernels::EvictLast(); }

  // The factors of a tile's keys (kind 0) or values (1), of KvCache::factors. Whole warp.
  __device__ static void FetchFactors(const __nv_bfloat16* factors, int head_dim, int kind,
                                      uint32_t destination, uint32_t barrier,
                                      const TilePages& pages) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int page = __shfl_sync(0xFFFFFFFF, pages.page, (pages.page_lane + lane) % 32);
    if (lane < pages.first || lane >= pages.end) return;
    CopyBytes(destination + lane * kKvPageTokens * 2,
              factors + FactorsAt(page, pages.kv_heads, pages.head, kind, head_dim),
              kKvPageTokens * 2, barrier);
  }

  // Keys to `destination`, values behind them. Whole warp.
  template <int kHeadDim>
  __device__ static void FetchPages(const Map& k, const Map& v, uint32_t destination,
                                    uint32_t barrier, const TilePages& pages, Policy policy) {
    using Tile = CacheTile<kHeadDim>;
    constexpr int kBoxes = 2 * kAttentionTilePages * Tile::kBlocks;
    for (int box = threadIdx.x % 32; box < (kBoxes + 31) / 32 * 32; box += 32) {
      const int in_tile = box / (2 * Tile::kBlocks) % kAttentionTilePages;
      const int row =
          (__shfl_sync(0xFFFFFFFF, pages.page, pages.page_lane + in_tile) * pages.kv_heads +
           pages.head) *
          kKvPageTokens;
      if (box < kBoxes && in_tile >= pages.first && in_tile < pages.end) {
        const int block = box % Tile::kBlocks;
        const bool is_v = box / Tile::kBlocks % 2 == 1;
        CopyTensorBoxBy(policy,
                        destination + (is_v ? Tile::kBytes : 0) + block * Tile::kBlockBytes +
                            in_tile * kKvPageTokens * Tile::kRowBytes,
                        is_v ? &v : &k, block * Tile::kColumns, row, barrier);
      }
    }
  }
};

}  // namespace dorad::kernels
