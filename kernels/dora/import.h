// Converts adapter tensors from a file's layout to the serving layout: rounded to bf16, rows padded
// to their leading dimension, an embedding's A transposed.
//
// Functions only enqueue work on the stream and are thread-safe. All pointers are to device memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/dora/compose.h"

namespace dorad::kernels {

// Elements [first, first + count) of a matrix, in row-major order.
struct ImportParams {
  const void* from = nullptr;  // [count], `type`, aligned to its elements
  FloatType type = FloatType::kBF16;
  int64_t first = 0;
  int64_t count = 0;
  int64_t columns = 0;
  __nv_bfloat16* to = nullptr;     // the whole matrix, [rows, columns], leading dimension ld
  int64_t ld = 0;                  // at least columns; the padding becomes zero
  uint32_t* not_finite = nullptr;  // [1], set to 1 if a value is NaN or infinite once it is rounded
};

// Rounds to nearest even. Any sizes and alignments are right; the fast path needs ld == columns,
// 16-byte aligned pointers and `first` a multiple of 8. cudaErrorInvalidValue: negative sizes, no
// columns, ld < columns.
cudaError_t ImportFactor(const ImportParams& params, cudaStream_t stream);

// to[i] = from[i] as fp32, exactly. from: [count], `type`.
cudaError_t ImportVector(const void* from, FloatType type, int64_t count, float* to,
                         cudaStream_t stream);

// to[column, row] = from[row, column]; both contiguous. from: [rows, columns].
// cudaErrorInvalidValue: negative sizes.
cudaError_t Transpose(const __nv_bfloat16* from, int64_t rows, int64_t columns, __nv_bfloat16* to,
                      cudaStream_t stream);

}  // namespace dorad::kernels
