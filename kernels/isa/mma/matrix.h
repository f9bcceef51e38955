// A matrix in device memory as threads fetch it where there is no copy engine. Thread-safe.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace dorad::kernels {

// [rows, columns], fetched in boxes of [box_rows, 64]; out of bounds reads as zero. 16-byte
// aligned; ld is a multiple of 8, and so are the columns of what MmaIsa fetches.
struct PlainMatrix {
  const __nv_bfloat16* data;
  int32_t rows;
  int32_t columns;
  int32_t ld;
  int32_t box_rows;
};

inline cudaError_t EncodeMatrix(const __nv_bfloat16* data, int64_t rows, int64_t columns,
                                int64_t ld, int box_rows, PlainMatrix* matrix) {
  *matrix = {data, static_cast<int32_t>(rows), static_cast<int32_t>(columns),
             static_cast<int32_t>(ld), box_rows};
  return cudaSuccess;
}

}  // namespace dorad::kernels
