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
  using Policy = uint64_t;  // what L2 should do with them

  // [pages · kv_heads · kKvPageTokens, head_dim], in boxes of a page by one CacheTile block.
  template <int kHeadDim>
  static cudaError_t Encode(const __nv_bfloat16* cache, Map* map) {
    if (TensorMapEncoder() == nullptr) return cudaErrorNotSupported;
    using Tile = CacheTile<kHeadDim>;
    // The true number of pages is not needed: page lists contain valid pages only.
    const cuuint64_t sizes[2] = {kHeadDim, cuuint64_t{1} << 31};
    const cuuint64_t strides[1] = {2 * kHeadDim};
    const cuuint32_t box[2] = {Tile::kColumns, static_cast<cuuint32_t>(kKvPageTokens)};
    const cuuint32_t element_strides[2] = {1, 1};
    const CUtensorMapSwizzle swizzle = Tile::kColumns == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : Tile::kColumns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                              : CU_TENSOR_MAP_SWIZZLE_32B;
    const CUresult result = TensorMapEncoder()(
        map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<__nv_bfloat16*>(cache), sizes, strides,
        box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
  }

  // One thread.
  __device__ static void Prefetch(const Map& map) { PrefetchTensorMap(&map); }
  // Orders this thread's accesses to shared memory before later fetches to it.
  __device__ static void FenceStages() { FenceProxyAsync(); }

  __device__ static Policy EvictFirst() {
    Policy policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
  }
  __device__ static Policy EvictLast() {
    Policy policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
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
        CopyCacheBox(destination + (is_v ? Tile::kBytes : 0) + block * Tile::kBlockBytes +
                         in_tile * kKvPageTokens * Tile::kRowBytes,
                     is_v ? &v : &k, block * Tile::kColumns, row, barrier, policy);
      }
    }
  }

 private:
  __device__ static void CopyCacheBox(uint32_t destination, const Map* map, int column, int row,
                                      uint32_t barrier, Policy policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
        : "memory");
  }
};

}  // namespace dorad::kernels
