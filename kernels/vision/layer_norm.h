// Layer norm in fp32 (torch's LayerNorm). Thread-safe.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace dorad::kernels {

// residual += delta (if not null), then
// out = round((residual - mean) / sqrt(variance + eps) · weight + bias). A row's result does not
// depend on the other rows.
struct AddLayerNormParams {
  int32_t rows = 0;
  int32_t size = 0;               // at most 8192
  float* residual = nullptr;      // [rows, size]
  const float* delta = nullptr;   // [rows, size]
  const float* weight = nullptr;  // [size]
  const float* bias = nullptr;    // [size]
  float eps = 0.0f;
  __nv_bfloat16* out = nullptr;  // [rows, size]
};

// cudaErrorInvalidValue: a size out of bounds, or a missing pointer.
cudaError_t AddLayerNorm(const AddLayerNormParams& params, cudaStream_t stream);

}  // namespace dorad::kernels
