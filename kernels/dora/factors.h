// Adapters and the rows of a batch, as plain data in device memory for the kernels. The pointers
// stay the same when adapters change, so that captured graphs stay valid. Written by the adapter's
// owner before a step that uses it is launched.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace dorad::kernels {

// One linear module of one resident adapter. All pointers are to device memory, 16-byte aligned.
// Leading dimensions are in elements and multiples of 8; elements between rank and ld are zero.
struct DoraFactors {
  const __nv_bfloat16* a = nullptr;  // [rank, in_features], contiguous
  const __nv_bfloat16* b = nullptr;  // [out_features, ldb]
  const float* g = nullptr;          // [out_features]; nullptr: plain LoRA
  float scale = 0.0f;                // s = alpha / r, or alpha / sqrt(r)
  int32_t rank = 0;                  // 0: this module is not adapted
  int32_t ldb = 0;
  int32_t unused = 0;
};

// Rows [begin, end) of the batch use one slot of the table of adapters; slot -1: the base model.
// Segments are ascending, without gaps or overlap, and no slot has two.
struct RowSegment {
  int32_t slot = -1;
  int32_t begin = 0;
  int32_t end = 0;
};

// The segments of a batch of any size: rows [256 b, 256 (b + 1)), block b, are described by
// counts[b] segments at blocks[256 b], whose begin and end count from the block's first row.
inline constexpr int32_t kSegmentBlockRows = 256;
struct RowSegments {
  const RowSegment* blocks = nullptr;
  const int32_t* counts = nullptr;
};

// The table of adapters: factors of slot s, module m at [s * modules + m].
struct AdapterTable {
  const DoraFactors* factors = nullptr;
  int32_t modules = 0;
};

}  // namespace dorad::kernels
