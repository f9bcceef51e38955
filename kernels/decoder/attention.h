// Between the query, key and value projections and the output projection: norms of query and key,
// rotary embedding, the paged cache, and causal attention over it.
//
// Cache of one layer: k and v are [pages, kv_heads, kKvPageTokens, head_dim] bf16 each.
// A row's result depends on its own query and on the cache at its positions only, to the last bit.
// Functions are thread-safe for distinct pages.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/decoder/rows.h"

namespace dorad::kernels {

struct AttentionShape {
  int32_t heads = 0;
  int32_t kv_heads = 0;  // divides heads
  int32_t head_dim = 0;  // even, at most 256
};

struct KvCache {
  __nv_bfloat16* k = nullptr;
  __nv_bfloat16* v = nullptr;
};

// Pairs (i, i + head_dim / 2) are rotated, as in transformers' rotate_half.
struct RopeAppendParams {
  StepRows rows;
  AttentionShape shape;
  const float* qkv = nullptr;     // [rows, (heads + 2·kv_heads) · head_dim]
  const float* q_norm = nullptr;  // [head_dim]; null: the model has none (Qwen3 has both)
  const float* k_norm = nullptr;
  float eps = 0.0f;
  const float* cos = nullptr;  // [positions, head_dim / 2]
  const float* sin = nullptr;
  __nv_bfloat16* q = nullptr;  // out: [rows, heads · head_dim]
  KvCache cache;               // out: the rows' positions
};

cudaError_t RopeAppend(const RopeAppendParams& params, cudaStream_t stream);

// Attention of every row over its own sequence's positions [lo, p], where lo = 0, or p - window + 1
// when window > 0.
struct PagedAttentionParams {
  StepRows rows;
  AttentionShape shape;
  const __nv_bfloat16* q = nullptr;
  KvCache cache;
  float softmax_scale = 0.0f;
  int32_t window = 0;
  __nv_bfloat16* out = nullptr;  // [rows, heads · head_dim]
};

cudaError_t PagedAttention(const PagedAttentionParams& params, cudaStream_t stream);

}  // namespace dorad::kernels
