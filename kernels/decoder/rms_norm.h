// Root-mean-square norms in fp32 (transformers' `*RMSNorm`). Thread-safe.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace dorad::kernels {

// residual += delta (if not null; delta / sqrt(mean(delta²) + eps) · delta_weight with that), then
// out = round(residual / sqrt(mean(residual²) + eps) · weight). A row's result does not depend on
// the other rows. The weights are read while earlier kernels of the stream may still run: none of
// them may write these.
struct AddRmsNormParams {
  int32_t rows = 0;
  int32_t size = 0;                     // at most 16384 if a multiple of 4, otherwise 4096
  float* residual = nullptr;            // [rows, size], 16-byte aligned as all of these
  const float* delta = nullptr;         // [rows, size]
  const float* delta_weight = nullptr;  // [size]; null: the delta is not normed
  const float* weight = nullptr;        // [size]
  float eps = 0.0f;
  // The residual's row for row i of `out`; null: i. With it delta must be null.
  const int32_t* gather = nullptr;
  __nv_bfloat16* out = nullptr;  // [rows, size]
};

// cudaErrorInvalidValue: a size out of bounds, or bad alignment.
cudaError_t AddRmsNorm(const AddRmsNormParams& params, cudaStream_t stream);

}  // namespace dorad::kernels
