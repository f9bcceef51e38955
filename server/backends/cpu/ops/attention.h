// Rotary embedding, the paged key/value cache, and attention over it.
//
// Layout of the cache (one tensor pair per layer). A page holds kPageTokens consecutive positions:
//   k: [pages, kv_heads, head_dim, kPageTokens]   keys transposed inside a page
//   v: [pages, kv_heads, kPageTokens, head_dim]
// dtype fp32, or bf16 with ComputeDType::kBF16.
//
// Guarantee: the result of a query row depends on its own query and on the keys and values at its
// positions only: for any chunking and batch, a row's softmax walks pages in ascending order.
// Functions are thread-safe for distinct pages.
//
// Shape suffixes: T rows, H query heads, K kv heads, D head_dim, P pages, S sequences.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "server/backends/cpu/ops/dora_linear.h"

namespace dorad::ops {

inline constexpr int64_t kPageTokens = 16;

struct PagedKv {
  at::Tensor k;
  at::Tensor v;
};

PagedKv AllocatePagedKv(int64_t pages, int64_t kv_heads, int64_t head_dim, ComputeDType compute);

// The rows of one sequence in a step: rows [row_begin, row_begin + count) hold positions
// [position, position + count). pages: page index of position p is pages[p / kPageTokens]; any
// value where no row sees it.
struct SequenceRows {
  int64_t row_begin = 0;
  int64_t count = 0;
  int64_t position = 0;
  absl::Span<const int32_t> pages;
  // Three for each row (RopeTable::axes); empty: all are the row's position.
  std::vector<std::array<int64_t, 3>> rotary;
  // The last position that each row sees, ascending; empty: its own.
  std::vector<int64_t> reach;
};

// cos and sin of every position, [positions, width / 2] fp32 each. In the first `width` elements of
// a head the pairs (i, i + width / 2) are rotated, as in transformers' rotate_half.
struct RopeTable {
  at::Tensor cos;
  at::Tensor sin;
  // For each pair, which of a row's rotary positions turns it; empty: the first.
  std::vector<uint8_t> axes;
};

// Rotates q_THD and k_TKD (fp32, contiguous) in place and writes k, v into the pages.
void RopeAndAppend(at::Tensor& q_THD, at::Tensor& k_TKD, const at::Tensor& v_TKD,
                   const RopeTable& rope, absl::Span<const SequenceRows> sequences, PagedKv& kv);

// Attention of every row over its own sequence's positions [lo, hi], where lo = 0, or p - window +
// 1 when window > 0 (transformers' sliding_window: the last `window` positions, its own included),
// and hi = p or the row's reach. Returns [T, H, D] fp32.
at::Tensor PagedAttention(const at::Tensor& q_THD, const PagedKv& kv,
                          absl::Span<const SequenceRows> sequences, double softmax_scale,
                          int64_t window);

}  // namespace dorad::ops
