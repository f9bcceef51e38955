// How the copy engine finds a matrix in device memory. Thread-safe.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "kernels/common/status.h"

namespace dorad::kernels {

// A [rows, columns] matrix with leading dimension `ld` (a multiple of 8), 16-byte aligned, fetched
// in boxes of [box_rows, 64] into the 128-byte swizzle; out of bounds reads as zero.
inline cudaError_t EncodeTensorMap(const __nv_bfloat16* data, int rows, int columns, int ld,
                                   int box_rows, CUtensorMap* map) {
  // Nothing here links to the driver.
  void* symbol = nullptr;
  cudaDriverEntryPointQueryResult found;
  DORAD_CUDA_RETURN_IF_ERROR(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol,
                                                              12000, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(ld) * sizeof(__nv_bfloat16)};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(symbol)(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<__nv_bfloat16*>(data), sizes, strides,
      box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace dorad::kernels
