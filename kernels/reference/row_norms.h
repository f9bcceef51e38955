// ||W + s·B·A|| by the definition, element by element in fp32 with a sum in double: what the fast
// norms are held against, and the form for shapes they do not take. O(rows · cols · rank).
// Thread-safe.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace dorad::kernels {

// Element (row, col) of the weight lies at weight[row · row_stride + col · col_stride]: a linear
// layer's rows are its output features; for an embedding [V, D] row is the dimension d, col the
// token v.
struct RowNormsParams {
  const __nv_bfloat16* weight = nullptr;
  int64_t rows = 0, cols = 0;
  int64_t row_stride = 0, col_stride = 0;
  const float* a = nullptr;  // [rank, cols]
  const float* b = nullptr;  // [rows, rank]
  int32_t rank = 0;
  float scale = 0.0f;
  float* norms = nullptr;  // [rows]
};

cudaError_t RowNorms(const RowNormsParams& params, cudaStream_t stream);

}  // namespace dorad::kernels
