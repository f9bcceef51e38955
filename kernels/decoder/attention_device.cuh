// Pieces of the attention kernels: tensor-core steps, the softmax's arithmetic, and copies of cache
// pages into shared memory.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/decoder/attention_layout.h"
#include "kernels/isa/mma/mma.cuh"
#include "kernels/isa/sm90/tensor_map.h"
#include "kernels/isa/sm90/wgmma.cuh"

namespace dorad::kernels {

// Below every score, and finite, so that differences are never NaN.
inline constexpr float kNoScore = -1e30f;

// Tiles of the cache in shared memory: positions by head_dim, in blocks of kColumns columns that
// the copy engine swizzles, so that eight rows of one 16-byte column lie in different banks.
template <int kHeadDim>
struct CacheTile {
  static constexpr int kColumns = kHeadDim % 64 == 0 ? 64 : kHeadDim % 32 == 0 ? 32 : 16;
  static constexpr int kBlocks = kHeadDim / kColumns;
  static constexpr int kRowBytes = 2 * kColumns;
  static constexpr int kBlockBytes = kAttentionTile * kRowBytes;
  static constexpr int kBytes = kBlocks * kBlockBytes;
  static_assert(kBlocks * kColumns == kHeadDim);

  // The offset of the 16 bytes at (row, column), column a multiple of 8.
  static __device__ uint32_t Offset(int row, int column) {
    const int unit = column % kColumns / 8;
    // The swizzle combines address bits above 128 bytes with the bits of the 16-byte unit.
    const int turn = row * kRowBytes / 128 % (kColumns / 8);
    return column / kColumns * kBlockBytes + row * kRowBytes + ((unit ^ turn) * 16);
  }
};

// Scores are scaled by `scale` = softmax_scale · log2(e) inside the exponentials.
__device__ inline float ScaledOffset(float most, float scale) { return -__fmul_rn(most, scale); }
__device__ inline float Numerator(float score, float scale, float offset) {
  return Exp2(__fmaf_rn(score, scale, offset));
}
__device__ inline float Decay(float before, float now, float scale) {
  return Exp2(__fmul_rn(__fsub_rn(before, now), scale));
}

// One row's softmax so far: maximum and denominator.
struct SoftmaxState {
  float most = kNoScore;
  float sum = 0.0f;
};

// The final factor of the numerators.
__device__ inline float Share(const SoftmaxState& state) { return __frcp_rn(state.sum); }

// Factors that join a chunk to the earlier chunks.
struct JoinFactors {
  float before, chunk;
};

__device__ inline float Join(float before, float chunk, JoinFactors f) {
  return __fmaf_rn(chunk, f.chunk, __fmul_rn(before, f.before));
}

// Adds a chunk's state to the state of the chunks before it.
__device__ inline JoinFactors JoinChunk(SoftmaxState& state, float most, float sum, float scale) {
  const float now = fmaxf(state.most, most);
  const JoinFactors f{Decay(state.most, now, scale), Decay(most, now, scale)};
  state.most = now;
  state.sum = Join(state.sum, sum, f);
  return f;
}

// A box of a cache page that is read once: L2 should not keep it.
__device__ inline void CopyCacheBox(uint32_t destination, const CUtensorMap* map, int column,
                                    int row, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// Pages [first, end) of a tile's kAttentionTilePages: keys to `destination`, values behind them.
// Whole warp; the i-th page's number is lane page_lane + i's `page`.
template <int kHeadDim>
__device__ void CopyPages(const CUtensorMap& k, const CUtensorMap& v, uint32_t destination,
                          uint32_t barrier, int page, int page_lane, int kv_heads, int head,
                          int first, int end, uint64_t policy) {
  using Tile = CacheTile<kHeadDim>;
  constexpr int kBoxes = 2 * kAttentionTilePages * Tile::kBlocks;
  for (int box = threadIdx.x % 32; box < (kBoxes + 31) / 32 * 32; box += 32) {
    const int in_tile = box / (2 * Tile::kBlocks) % kAttentionTilePages;
    const int row =
        (__shfl_sync(0xFFFFFFFF, page, page_lane + in_tile) * kv_heads + head) * kKvPageTokens;
    if (box < kBoxes && in_tile >= first && in_tile < end) {
      const int block = box % Tile::kBlocks;
      const bool is_v = box / Tile::kBlocks % 2 == 1;
      CopyCacheBox(destination + (is_v ? Tile::kBytes : 0) + block * Tile::kBlockBytes +
                       in_tile * kKvPageTokens * Tile::kRowBytes,
                   is_v ? &v : &k, block * Tile::kColumns, row, barrier, policy);
    }
  }
}

__device__ inline uint64_t EvictFirst() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ inline uint64_t EvictLast() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Map of a layer's keys or values as [pages · kv_heads · kKvPageTokens, head_dim], in boxes of
// `rows` rows by one CacheTile block.
template <int kHeadDim>
cudaError_t EncodeCache(const __nv_bfloat16* cache, int rows, CUtensorMap* map) {
  if (TensorMapEncoder() == nullptr) return cudaErrorNotSupported;
  using Tile = CacheTile<kHeadDim>;
  // The true number of pages is not needed: page lists contain valid pages only.
  const cuuint64_t sizes[2] = {kHeadDim, cuuint64_t{1} << 31};
  const cuuint64_t strides[1] = {2 * kHeadDim};
  const cuuint32_t box[2] = {Tile::kColumns, static_cast<cuuint32_t>(rows)};
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

}  // namespace dorad::kernels
