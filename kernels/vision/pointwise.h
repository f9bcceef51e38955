// The small steps of a vision tower between its products. Thread-safe.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace dorad::kernels {

// x = gelu(x), rounded; x: [count], 16-byte aligned. Torch's gelu, exact and approximate="tanh".
cudaError_t Gelu(__nv_bfloat16* x, int64_t count, cudaStream_t stream);
cudaError_t GeluTanh(__nv_bfloat16* x, int64_t count, cudaStream_t stream);

// to += from; [count].
cudaError_t AddInPlace(float* to, const float* from, int64_t count, cudaStream_t stream);

// to[t, c, p] = from[t, p, c]: the elements of a token's patches, channel by channel. [tokens,
// patches, channels].
cudaError_t ByChannel(const __nv_bfloat16* from, int64_t tokens, int32_t patches, int32_t channels,
                      __nv_bfloat16* to, cudaStream_t stream);

// to[t, c] = the mean of from[t, :, c], added in order. [tokens, patches, channels].
cudaError_t PoolPatches(const __nv_bfloat16* from, int64_t tokens, int32_t patches,
                        int32_t channels, float* to, cudaStream_t stream);

// to[places[i]] = from[i], rows of `width` fp32. places: device, [rows].
cudaError_t ScatterRows(const float* from, const int32_t* places, int32_t rows, int32_t width,
                        float* to, cudaStream_t stream);

// A patch and its place in the image, for the position table and the rotary embedding.
struct PatchTaps {
  int32_t rows[4] = {};  // of the table
  float weights[4] = {};
  int32_t row = 0;
  int32_t column = 0;
};

// residual[r] += Σ_t weights[t] · table[rows[t]]. residual: [rows, width] fp32; taps: [rows],
// device; table: [.., width] fp32.
cudaError_t AddTableRows(float* residual, const PatchTaps* taps, const float* table, int32_t rows,
                         int32_t width, cudaStream_t stream);

// Turns queries and keys of patches in place: pairs (i, i + head_dim / 2) of a head, the first half
// of the pairs by the row, the others by the column.
struct PatchRotaryParams {
  __nv_bfloat16* qkv = nullptr;     // [rows, 3, heads, head_dim]
  const PatchTaps* taps = nullptr;  // [rows], device
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t head_dim = 0;        // a multiple of 4
  const float* cos = nullptr;  // [places, head_dim / 2]: of patches whose row and column are equal
  const float* sin = nullptr;
};
cudaError_t RotatePatches(const PatchRotaryParams& params, cudaStream_t stream);

}  // namespace dorad::kernels
