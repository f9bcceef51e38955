// The emulator's form of kernels/isa/sm90/tensor_map.h. A tensor map holds a FakeMap.
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
  int64_t strides[3];
  int box[3];
};
static_assert(sizeof(FakeMap) <= sizeof(CUtensorMap));

template <int kDimensions>
struct TensorBoxes {
  cuuint64_t sizes[kDimensions];
  cuuint64_t strides[kDimensions - 1];
  cuuint32_t box[kDimensions];
};

template <int kDimensions>
cudaError_t EncodeTensor(const __nv_bfloat16* data, const TensorBoxes<kDimensions>& boxes,
                         CUtensorMap* map) {
  FakeMap fake = {data, {1, 1, 1}, {1, 0, 0}, {1, 1, 1}};
  for (int i = 0; i < kDimensions; ++i) {
    fake.sizes[i] = static_cast<int64_t>(boxes.sizes[i]);
    fake.box[i] = static_cast<int>(boxes.box[i]);
    if (i > 0) fake.strides[i] = static_cast<int64_t>(boxes.strides[i - 1]);
    if (fake.strides[i] % 8 != 0 && i > 0) return cudaErrorInvalidValue;
  }
  *map = {};
  std::memcpy(map, &fake, sizeof(fake));
  return cudaSuccess;
}

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
