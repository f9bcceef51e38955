// Gated delta-nets (transformers: Qwen3_5GatedDeltaNet): a convolution over the last rows of a
// sequence, then the gated delta rule with one state a value head.
//
// Guarantee: the result of a row depends on its sequence's rows up to it only, for any chunks and
// batch: both go through the rows one by one. Functions are thread-safe for distinct states.
//
// Shape suffixes: T rows, C qkv_size, H value heads, V value_dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "server/model/model_config.h"

namespace dorad::ops {

// The rows of one sequence in a step, [row_begin, row_begin + count), and the blocks of its state,
// as model::DeltaStateLayout has them for one delta-net: before the rows (empty: zeros) and after.
struct DeltaRows {
  int64_t row_begin = 0;
  int64_t count = 0;
  std::vector<const float*> from;
  std::vector<float*> to;
};

struct DeltaShape {
  model::DeltaSizes sizes;
  int64_t tile = 0;          // columns of a state's block
  int64_t state_blocks = 0;  // the others have the convolution's rows
  int64_t block_size = 0;    // elements of those
};

// silu(convolution) of each row and the ones before it. qkv_TC: fp32 contiguous; weight: [C, 1, K].
// Writes the last K - 1 rows of each sequence to its state. Returns [T, C].
at::Tensor DeltaConvolution(const at::Tensor& qkv_TC, const at::Tensor& weight,
                            absl::Span<const DeltaRows> sequences, const DeltaShape& shape);

// qkv_TC: of DeltaConvolution; b_TH, a_TH: fp32 contiguous; decay_log_H, time_bias_H: fp32. Updates
// the states. Returns [T, H, V].
at::Tensor GatedDeltaRule(const at::Tensor& qkv_TC, const at::Tensor& b_TH, const at::Tensor& a_TH,
                          const at::Tensor& decay_log_H, const at::Tensor& time_bias_H,
                          absl::Span<const DeltaRows> sequences, const DeltaShape& shape);

}  // namespace dorad::ops
