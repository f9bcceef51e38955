// The emulator's form of kernels/isa/sm90/tensor_encoder.h. A tensor map holds a FakeMap.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>

namespace dorad::kernels {

// From the innermost dimension on.
struct FakeMap {
  const __nv_bfloat16* data;
  int64_t sizes[3];
  int64_t strides[3];  // elements
  int box[3];
};
static_assert(sizeof(FakeMap) <= sizeof(CUtensorMap));

inline cudaError_t EncodeTiled(const __nv_bfloat16* data, cuuint32_t dimensions,
                               const cuuint64_t* sizes, const cuuint64_t* strides,
                               const cuuint32_t* box, CUtensorMapSwizzle, CUtensorMap* map) {
  FakeMap fake = {data, {1, 1, 1}, {1, 0, 0}, {1, 1, 1}};
  for (cuuint32_t i = 0; i < dimensions; ++i) {
    fake.sizes[i] = static_cast<int64_t>(sizes[i]);
    fake.box[i] = static_cast<int>(box[i]);
    if (i == 0) continue;
    if (strides[i - 1] % 16 != 0) return cudaErrorInvalidValue;
    fake.strides[i] = static_cast<int64_t>(strides[i - 1]) / 2;
  }
  *map = {};
  std::memcpy(map, &fake, sizeof(fake));
  return cudaSuccess;
}

}  // namespace dorad::kernels
