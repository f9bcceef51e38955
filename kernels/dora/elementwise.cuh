// Common parts of the element-wise kernels of this room: types, vectors, and grids.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

namespace dorad::kernels {

inline constexpr int kThreads = 256;
inline constexpr int64_t kMostElements = int64_t{1} << 40;

// A vector of `size` elements.
template <typename T, int size>
struct alignas(sizeof(T) * size) Vector {
  T values[size];
};

inline __device__ float ToFloat(float x) { return x; }
inline __device__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
inline __device__ float ToFloat(__half x) { return __half2float(x); }

template <typename T>
__device__ T FromFloat(float x);
template <>
inline __device__ float FromFloat<float>(float x) {
  return x;
}
template <>
inline __device__ __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
inline __device__ __half FromFloat<__half>(float x) {
  return __float2half_rn(x);
}

// A block's shape: x over a row's vectors, y over rows. Wide enough for the row, so that few
// threads idle at small `out`. threads: at most kThreads.
inline dim3 BlockFor(int64_t vectors, unsigned threads = kThreads) {
  unsigned x = 32;
  while (x < threads && x < vectors) x *= 2;
  return dim3(x, threads / x);
}

// The grid; a block takes steps of gridDim.y if there are more rows than a grid can have.
inline dim3 GridFor(dim3 block, int64_t vectors, int64_t rows, int rows_each) {
  const int64_t x = (vectors + block.x - 1) / block.x;
  const int64_t per_block = static_cast<int64_t>(block.y) * rows_each;
  const int64_t y = std::min<int64_t>(65535, (rows + per_block - 1) / per_block);
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

inline bool Aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

inline bool GoodSizes(int64_t rows, int64_t out) {
  return rows >= 0 && out >= 0 && (rows == 0 || out <= kMostElements / rows);
}

}  // namespace dorad::kernels
