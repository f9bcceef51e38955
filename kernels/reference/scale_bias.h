// The end of the simple form of an adapted linear layer, after library products have left
// W x + s·B(A x) in y: y = g ⊙ y + bias. Thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace dorad::kernels {

// Rows [0, rows) and columns [0, cols) of y, whose rows are ld elements apart. g and bias: [cols]
// fp32 or null.
cudaError_t ScaleBias(float* y, int64_t ld, int32_t rows, int32_t cols, const float* g,
                      const float* bias, cudaStream_t stream);

}  // namespace dorad::kernels
