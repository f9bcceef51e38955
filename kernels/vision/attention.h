// Attention of a vision tower: every patch of a segment (an image, or a window of it) sees all
// patches of the segment. Thread-safe.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/isa/isa.h"

namespace dorad::kernels {

// Query rows of one tile, at most.
inline constexpr int32_t kSegmentTileRows = 192;

// Rows [row, row + rows) of a segment's rows [begin, end).
struct SegmentTile {
  int32_t row = 0;
  int32_t rows = 0;
  int32_t begin = 0;
  int32_t end = 0;
};

// out = softmax(scale · q kᵀ) v for each row and head. A row's result depends on its segment only,
// to the last bit: keys are taken in tiles of 64 from the segment's begin.
struct SegmentAttentionParams {
  const __nv_bfloat16* qkv = nullptr;  // [rows, 3, heads, head_dim], 16-byte aligned
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t head_dim = 0;                // a multiple of 8, at most 128
  const SegmentTile* tiles = nullptr;  // device
  int32_t num_tiles = 0;
  int32_t first_row = 0;  // the one at out[0]
  float softmax_scale = 0.0f;
  KernelIsa isa = KernelIsa::kSm90;  // with bits of its own
  __nv_bfloat16* out = nullptr;      // of the tiles' rows, [.., heads · head_dim], 4-byte aligned
};

// Whether SegmentAttention has the head size.
inline bool HasSegmentAttention(int64_t head_dim) {
  return head_dim > 0 && head_dim <= 128 && head_dim % 8 == 0;
}

// cudaErrorInvalidValue: a shape out of bounds, or bad alignment.
cudaError_t SegmentAttention(const SegmentAttentionParams& params, cudaStream_t stream);

}  // namespace dorad::kernels
