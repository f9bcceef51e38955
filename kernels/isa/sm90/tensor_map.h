// Tensor maps: the copy engine's description of a matrix in device memory. Thread-safe.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace dorad::kernels {

// The driver's encoder, looked up once, because nothing here links to the driver; nullptr: none.
inline decltype(&cuTensorMapEncodeTiled) TensorMapEncoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &found);
    if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encoder;
}

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
  if (TensorMapEncoder() == nullptr) return cudaErrorNotSupported;
  cuuint64_t strides[kDimensions - 1];
  for (int i = 0; i + 1 < kDimensions; ++i) strides[i] = boxes.strides[i] * sizeof(__nv_bfloat16);
  cuuint32_t steps[kDimensions];
  for (cuuint32_t& step : steps) step = 1;
  const CUtensorMapSwizzle swizzle = boxes.box[0] == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : boxes.box[0] == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                          : CU_TENSOR_MAP_SWIZZLE_32B;
  const CUresult result = TensorMapEncoder()(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kDimensions, const_cast<__nv_bfloat16*>(data),
      boxes.sizes, strides, boxes.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
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
