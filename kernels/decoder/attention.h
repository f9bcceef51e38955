// The steps between the query, key and value projections and the output projection: norms of query
// and key, rotary embedding, the paged cache, and causal attention over it.
//
// Cache of one layer: k and v are [pages, kv_heads, kKvPageTokens, head_dim] each, bf16 or, for
// shapes of HasFp8Attention, in eight bits. Only pages that rows name must be mapped. A row's
// result depends on its own query and on the cache at its positions only, to the last bit:
// positions are taken in tiles and chunks that are fixed by position (attention_layout.h), and
// parts are joined in the order of positions, for any distribution over blocks. The instruction
// sets (KernelIsa) differ in bits. Functions are thread-safe for distinct pages and workspaces. All
// may be captured into graphs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/decoder/rows.h"
#include "kernels/isa/isa.h"

namespace dorad::kernels {

struct AttentionShape {
  int32_t heads = 0;
  int32_t kv_heads = 0;  // divides heads
  int32_t head_dim = 0;  // even, at most 256
};

struct KvCache {
  __nv_bfloat16* k = nullptr;
  __nv_bfloat16* v = nullptr;
  // The cache is in eight bits: k and v are bytes, and here are factors for them, 16-byte aligned
  // (attention_fp8.cuh). Of each page and key head [2, kKvPageTokens], keys first; a page of them
  // has the bytes of one of keys, of which it uses the first. Null: k and v are bf16.
  __nv_bfloat16* factors = nullptr;
};

// Whether there may be a cache in eight bits: of head_dim 64, 128 or 256, at most 16 query heads
// per key head, and rotated as a whole or, `width` elements, by fours up to the half.
bool HasFp8Attention(const AttentionShape& shape, int32_t width);

// Pairs (i, i + width / 2) of a head's first `width` elements are rotated, as in transformers'
// rotate_half. `rows`, the norms and the angles are read while earlier kernels of the stream may
// still run: none of them may write these.
struct RopeAppendParams {
  StepRows rows;
  AttentionShape shape;
  int32_t width = 0;       // even; 0: head_dim
  bool has_gates = false;  // each query is followed by its gate, see GateHeads
  // [rows, (heads + gates + 2·kv_heads) · head_dim], 4-byte aligned; as many gates as heads, or
  // none.
  const __nv_bfloat16* qkv = nullptr;
  const float* q_norm = nullptr;  // [head_dim]; null: the model has none (Qwen3 has both)
  const float* k_norm = nullptr;
  float eps = 0.0f;
  const float* cos = nullptr;  // [positions, width / 2]
  const float* sin = nullptr;
  // [width / 2]: the one of StepRows::rotary that turns the pair. Null: the first.
  const uint8_t* axes = nullptr;
  __nv_bfloat16* q = nullptr;  // out: [rows, heads · head_dim]
  KvCache cache;               // out: the rows' positions
};

// cudaErrorInvalidValue: a shape out of bounds.
cudaError_t RopeAppend(const RopeAppendParams& params, cudaStream_t stream);

// Device memory for the work list of a step and for parts of rows; 256-byte aligned. The owner sets
// all bytes to 0xFF once, before the first use. Its size limits the number of rows that can be
// computed in parts; it does not change the result.
struct AttentionWorkspace {
  void* data = nullptr;
  size_t bytes = 0;
  int32_t max_rows = 0;  // of a step
};

// A size that is efficient for steps of up to `max_rows` rows at positions below `max_positions`.
size_t AttentionWorkspaceBytes(const AttentionShape& shape, int32_t max_rows,
                               int32_t max_positions);

enum class AttentionSplit {
  kByLoad,  // as many parts as it takes to fill the GPU
  kAlways,  // the results are the same for all three: for tests and benches
  kNever,
};

// The distribution of a step's rows over the GPU: once per step and window size, before the layers'
// PagedAttention. Reads the positions on the device, so a captured graph may be replayed while
// sequences grow.
struct AttentionPlanParams {
  StepRows rows;
  AttentionShape shape;
  int32_t window = 0;
  // Runs of rows of one sequence at consecutive positions (prefill) are computed as tiles; costs
  // one more launch per layer, so steps of decodes leave it out. The results are the same.
  bool row_tiles = true;
  // Neighbouring rows whose sequences have the same first pages read these together. Costs a little
  // where there are none; see LeastSharedPositions. The results are the same.
  bool shares = false;
  AttentionSplit split = AttentionSplit::kByLoad;
  KernelIsa isa = KernelIsa::kSm90;  // of PagedAttention
  bool is_fp8 = false;               // the cache is in eight bits
  AttentionWorkspace workspace;      // out
};

// cudaErrorInvalidValue: a shape out of bounds, more rows than the workspace's max_rows, or a
// workspace too small for its work list.
cudaError_t PlanAttention(const AttentionPlanParams& params, cudaStream_t stream);

// The positions that the rows of a step must see, all together, for sharing to pay: below, a step
// takes as long as its longest row, and L2 has what several rows read at the same time. Of the
// current device.
cudaError_t LeastSharedPositions(const AttentionShape& shape, KernelIsa isa, int64_t* positions);

// Attention of every row over its own sequence's positions [lo, hi], where lo = 0, or p - window +
// 1 when window > 0, and hi = p or the row's StepRows::reach. `rows`, `shape`, `window`,
// `row_tiles`, `shares`, `isa` and the workspace as they were planned. Fast: head_dim 64, 80, 96,
// 128, 256 and at most 16 query heads per key head. Other shapes, and calls without a workspace, go
// to SimplePagedAttention; with a cache in eight bits they are cudaErrorInvalidValue.
struct PagedAttentionParams {
  StepRows rows;
  AttentionShape shape;
  const __nv_bfloat16* q = nullptr;  // [rows, heads · head_dim], 16-byte aligned
  KvCache cache;                     // 16-byte aligned
  float softmax_scale = 0.0f;        // positive
  int32_t window = 0;
  bool row_tiles = true;
  bool shares = false;
  KernelIsa isa = KernelIsa::kSm90;
  AttentionWorkspace workspace;
  __nv_bfloat16* out = nullptr;  // [rows, heads · head_dim]
};

cudaError_t PagedAttention(const PagedAttentionParams& params, cudaStream_t stream);

// RopeAppend and PagedAttention, in one launch for fast shapes, with the same results in `out` and
// in the cache; append.q may be left unwritten. Both need the same rows, shape and cache, append.q
// and attention.q the same memory, qkv 16-byte aligned, row_tiles false and reach null. No sequence
// may have more than one row, or pages that another one writes. Rows turn by their first rotary
// position alone. Copies of the cache begin while earlier kernels still run: none of them may write
// the plan, or the cache below the rows' positions. PlanAttention ensures that: it lets no kernel
// start before its end.
cudaError_t AppendAttention(const RopeAppendParams& append, const PagedAttentionParams& attention,
                            cudaStream_t stream);

}  // namespace dorad::kernels
