// Tensor maps: the copy engine's description of a matrix in device memory. Thread-safe.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/isa/sm90/tensor_encoder.h"

namespace dorad::kernels {

// The size of a tensor's dimensions, those of a box, and the distance from an element to the next
// one, all from the innermost dimension on; that one's elements follow each other.
template <int kDimensions>
struct TensorBoxes {
  cuuint64_t sizes[kDimensions];
  cuuint64_t strides[kDimensions - 1];
  cuuint32_t box[kDimensions];
};

// 16-byte aligned, with strides that are multiples of 8. Rows of a box are 16, 32 or 64 elements,
// and swizzled by 32, 64 or 128 bytes; out of bounds reads as zero.
template <int kDimensions>
cudaError_t EncodeTensor(const __nv_bfloat16* data, const TensorBoxes<kDimensions>& boxes,
                         CUtensorMap* map) {
  cuuint64_t strides[kDimensions - 1];
  for (int i = 0; i + 1 < kDimensions; ++i) strides[i] = boxes.strides[i] * sizeof(__nv_bfloat16);
  const CUtensorMapSwizzle swizzle = boxes.box[0] == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : boxes.box[0] == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                          : CU_TENSOR_MAP_SWIZZLE_32B;
  return EncodeTiled(data, kDimensions, boxes.sizes, strides, boxes.box, swizzle, map);
}

// A [rows, columns] matrix with leading dimension `ld`, fetched in boxes of [box_rows, 64].
inline cudaError_t EncodeMatrix(const __nv_bfloat16* data, int64_t rows, int64_t columns,
                                int64_t ld, int box_rows, CUtensorMap* map) {
  const auto unsigned_of = [](int64_t size) { return static_cast<cuuint64_t>(size); };
  return EncodeTensor<2>(data,
                         {{unsigned_of(columns), unsigned_of(rows)},
                          {unsigned_of(ld)},
                          {64, static_cast<cuuint32_t>(box_rows)}},
                         map);
}

}  // namespace dorad::kernels
