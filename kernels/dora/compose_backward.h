// The backward pass of Compose: the element-wise half of a DoRA linear for a trainer, in one pass
// over the incoming gradient (paper, "Backward Pass", which leaves the magnitude's gradient to a
// separate sum).
//
// With delta = (g - 1)·base + g·(s·lora) and inner = base + s·lora:
//   d_base = (g - 1)·grad,   d_lora = (s·g)·grad,   d_g = Σ_rows grad·inner.
//
// The norm is detached, so d_magnitude = d_g / norm; the division is done if the norm is given.
// With s = 1 d_lora is the gradient of a whole linear's y = g·inner by inner. Arithmetic is fp32,
// every operation rounded on its own, and one rounding at the end. d_g is added up in two stages in
// an order that depends on the shape alone: the same bits each time. Functions only enqueue work on
// the stream; they are thread-safe and can be captured in graphs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/dora/compose.h"

namespace dorad::kernels {

struct ComposeBackwardParams {
  const void* grad = nullptr;   // [rows, out], contiguous, `type`
  const void* inner = nullptr;  // as grad; read for d_g only
  const float* g = nullptr;     // [out]
  void* d_base = nullptr;       // [rows, out], contiguous, `type`; may be grad; nullptr: not wanted
  void* d_lora = nullptr;       // as d_base; may be inner
  void* d_g = nullptr;          // [out], `d_g_type`; nullptr: not wanted
  FloatType d_g_type = FloatType::kF32;
  const float* norm = nullptr;  // [out]: divides d_g by max(norm, eps); nullptr: no division
  float eps = 0.0f;
  void* workspace = nullptr;  // 16-byte aligned; only with d_g
  size_t workspace_bytes = 0;
  int64_t rows = 0;
  int64_t out = 0;
  float scale = 0.0f;  // s
  FloatType type = FloatType::kBF16;
};

// Its contents are undefined before and after; calls on one stream may share it.
size_t ComposeBackwardWorkspace(int64_t rows, int64_t out);
// Sizes and alignment as for Compose; no rows give d_g = 0. d_base and d_lora must not overlap each
// other. cudaErrorInvalidValue: as Compose, d_g without inner, or a workspace too small.
cudaError_t ComposeBackward(const ComposeBackwardParams& params, cudaStream_t stream);

}  // namespace dorad::kernels
