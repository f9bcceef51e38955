// The driver's encoder of tensor maps. Thread-safe.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

namespace dorad::kernels {

// Looked up once, because nothing here links to the driver; nullptr: none.
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

// For EncodeTensor of tensor_map.h. strides: in bytes.
inline cudaError_t EncodeTiled(const __nv_bfloat16* data, cuuint32_t dimensions,
                               const cuuint64_t* sizes, const cuuint64_t* strides,
                               const cuuint32_t* box, CUtensorMapSwizzle swizzle,
                               CUtensorMap* map) {
  if (TensorMapEncoder() == nullptr) return cudaErrorNotSupported;
  constexpr cuuint32_t kSteps[] = {1, 1, 1};
  const CUresult result = TensorMapEncoder()(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, dimensions, const_cast<__nv_bfloat16*>(data), sizes,
      strides, box, kSteps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace dorad::kernels
