// Gated delta-nets (transformers: Qwen3_5GatedDeltaNet) between their projections: a convolution
// over the last rows of a sequence, the gated delta rule with one state a value head, and the gated
// norm.
//
// A row's result depends on its sequence's rows up to it only, to the last bit, for any chunks and
// batch: rows go through the rule one by one. Thread-safe for distinct states. All may be captured
// into graphs. `rows`, the weights and the states are read while earlier kernels of the stream may
// still run: none of them may write these.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/decoder/rows.h"
#include "kernels/isa/isa.h"

namespace dorad::kernels {

// Heads share a key head in groups of value_heads / key_heads.
struct DeltaShape {
  int32_t key_heads = 0;  // of queries and keys
  int32_t value_heads = 0;
  int32_t key_dim = 0;      // a multiple of 4, at most 128
  int32_t value_dim = 0;    // a multiple of 4
  int32_t convolution = 0;  // rows that an output of the convolution sees, 2 to 4

  constexpr int32_t key_size() const { return key_heads * key_dim; }
  constexpr int32_t value_size() const { return value_heads * value_dim; }
  constexpr int32_t qkv_size() const { return 2 * key_size() + value_size(); }
};

// cudaErrorInvalidValue of the functions below: a shape that this refuses.
bool IsDeltaShape(const DeltaShape& shape);

// The blocks of one delta-net's states in the KV cache (model::DeltaStateLayout). A page has one
// block in each plane; block i of a state lies in plane i / pages.
struct DeltaStates {
  std::byte* memory = nullptr;  // the first plane
  int64_t plane_bytes = 0;      // from one plane to the next
  int32_t block_bytes = 0;      // also from one page to the next; a multiple of 16
  int32_t pages = 0;            // of a sequence's state
  int32_t first_block = 0;      // of the net, in a sequence's blocks
  int32_t tile = 0;             // columns of a state's block, [key_dim, tile] fp32
  int32_t state_blocks = 0;     // the blocks behind them: bf16 rows of the convolution
};

struct DeltaParams {
  StepRows rows;             // with `states`
  bool single_rows = false;  // no sequence has more than one row: faster, with the same results
  KernelIsa isa = KernelIsa::kSm90;  // the results are the same
  DeltaShape shape;
  DeltaStates states;
  const __nv_bfloat16* qkvz = nullptr;  // [rows, qkv_size + value_size], 16-byte aligned
  // In: [rows, b of each value head, then a of each]. DeltaConvolution replaces them by the factor
  // of the update, sigmoid(b), and the factor of the state, exp(-exp(decay_log) softplus(a +
  // time_bias)).
  float* factors = nullptr;
  const float* convolution = nullptr;  // [qkv_size, convolution]
  const float* decay_log = nullptr;    // [value_heads]
  const float* time_bias = nullptr;    // [value_heads]
  const float* norm = nullptr;         // [value_dim], 16-byte aligned
  float eps = 0.0f;
  // Scratch, 16-byte aligned: silu(convolution) with queries and keys of length 1, then the rule's
  // outputs in place of the values.
  float* mixed = nullptr;        // [rows, qkv_size]
  __nv_bfloat16* out = nullptr;  // [rows, value_size], 16-byte aligned
};

// In this order, on one stream.
cudaError_t DeltaConvolution(const DeltaParams& params, cudaStream_t stream);
// Writes the sequences' states.
cudaError_t DeltaRule(const DeltaParams& params, cudaStream_t stream);
// out = norm(outputs) · silu(z). Writes the convolution's rows of the states.
cudaError_t DeltaNorm(const DeltaParams& params, cudaStream_t stream);

}  // namespace dorad::kernels
