// What attention of vision towers needs of every GPU from compute capability 8.0 on.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/isa/memory.cuh"
#include "kernels/isa/mma/attention.cuh"
#include "kernels/vision/attention_kernel.cuh"

namespace dorad::kernels {

// Heads by asynchronous copies of many threads.
struct MmaHeads : MmaAttention {
  struct Map {
    const __nv_bfloat16* qkv;
    int32_t rows;
  };

  static cudaError_t Encode(const SegmentAttentionParams& params, Map* map) {
    *map = {params.qkv, params.rows};
    return cudaSuccess;
  }

  // 64 rows of one head, in blocks of 64 columns, as the products read them; out of bounds reads as
  // zero. By `threads`, of which this is number `thread`; then Complete.
  template <int kDim>
  __device__ static void FetchHead(const segment_attention::Args<MmaHeads>& p, uint32_t destination,
                                   int head, int row, int thread, int threads) {
    constexpr int kUnits = (kDim + 15) / 16 * 2;  // of a row, 16 bytes each
#pragma unroll 1
    for (int i = thread; i < 64 * kUnits; i += threads) {
      const int r = i / kUnits, column = i % kUnits * 8;
      const bool valid = row + r < p.map.rows && column < p.head_dim;
      const int64_t at = (int64_t{row + r} * 3 * p.heads + head) * p.head_dim + column;
      CopyAsync16(
          destination + column / 64 * kBlockBytes + r * 128 + ((column % 64 / 8) ^ r % 8) * 16,
          p.map.qkv + (valid ? at : 0), valid);
    }
  }
};

}  // namespace dorad::kernels
