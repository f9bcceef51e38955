// Pieces of the attention kernels: tiles of the cache in shared memory, their barriers, and the
// softmax's arithmetic.
#pragma once

#include <cstdint>

#include "kernels/decoder/attention_layout.h"
#include "kernels/isa/mma/mma.cuh"

namespace dorad::kernels {

// Below every score, and finite, so that differences are never NaN.
inline constexpr float kNoScore = -1e30f;

// Tiles of the cache in shared memory: positions by head_dim (by half of it in eight bits, two
// codes for each bf16), in blocks of kColumns columns that the copy engine swizzles (and threads in
// its place), so that eight rows of one 16-byte column lie in different banks.
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

// Where KvCache::factors has those of a page's keys (kind 0) or values (1) of a head.
__device__ inline int64_t FactorsAt(int64_t page, int kv_heads, int head, int kind, int head_dim) {
  return page * (kv_heads * kKvPageTokens * head_dim / 2) + (2 * head + kind) * kKvPageTokens;
}

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

// The pages of a tile and where they are: the i-th one's number is lane page_lane + i's `page`.
// Those of [first, end) are fetched.
struct TilePages {
  int page;
  int page_lane;
  int kv_heads;
  int head;
  int first, end;
};

}  // namespace dorad::kernels
