#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/dora/import.h"

namespace dorad::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 4096;  // with a grid-stride loop
constexpr int kVector = 8;
constexpr int kTile = 32;
constexpr int kTileRows = 8;  // of a tile at once

__device__ float ToFloat(float x) { return x; }
__device__ float ToFloat(__half x) { return __half2float(x); }
__device__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T, int size>
struct alignas(sizeof(T) * size) Vector {
  T values[size];
};

// Rounds; sets `bad` for values that are not finite.
__device__ __nv_bfloat16 Round(float x, bool& bad) {
  const __nv_bfloat16 rounded = __float2bfloat16_rn(x);
  bad |= (__bfloat16_as_ushort(rounded) & 0x7F80) == 0x7F80;
  return rounded;
}

// Rows without gaps between them: one array.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    ImportFlatKernel(const T* __restrict__ from, int64_t count, __nv_bfloat16* __restrict__ to,
                     uint32_t* not_finite) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  bool bad = false;
  for (int64_t i = thread; i < count / kVector; i += stride) {
    // 16 bytes at once at most.
    constexpr int kLoad = 16 / sizeof(T);
    Vector<__nv_bfloat16, kVector> out;
#pragma unroll
    for (int part = 0; part < kVector / kLoad; ++part) {
      const auto in = reinterpret_cast<const Vector<T, kLoad>*>(from + i * kVector)[part];
#pragma unroll
      for (int j = 0; j < kLoad; ++j) {
        out.values[part * kLoad + j] = Round(ToFloat(in.values[j]), bad);
      }
    }
    *reinterpret_cast<Vector<__nv_bfloat16, kVector>*>(to + i * kVector) = out;
  }
  for (int64_t i = count / kVector * kVector + thread; i < count; i += stride) {
    to[i] = Round(ToFloat(from[i]), bad);
  }
  if (bad) *not_finite = 1;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) ImportRowsKernel(ImportParams p) {
  const T* const from = static_cast<const T*>(p.from);
  bool bad = false;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t row = (p.first + i) / p.columns;
    const int64_t column = (p.first + i) % p.columns;
    __nv_bfloat16* const to = p.to + row * p.ld;
    to[column] = Round(ToFloat(from[i]), bad);
    if (column + 1 < p.columns) continue;
    for (int64_t rest = p.columns; rest < p.ld; ++rest) to[rest] = __ushort_as_bfloat16(0);
  }
  if (bad) *p.not_finite = 1;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    ImportVectorKernel(const T* __restrict__ from, int64_t count, float* __restrict__ to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) to[i] = ToFloat(from[i]);
}

__global__ void __launch_bounds__(kTile* kTileRows)
    TransposeKernel(const __nv_bfloat16* __restrict__ from, int64_t rows, int64_t columns,
                    __nv_bfloat16* __restrict__ to) {
  __shared__ __nv_bfloat16 tile[kTile][kTile + 2];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kTile;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * kTile; row < rows;
       row += static_cast<int64_t>(gridDim.y) * kTile) {
    for (int i = threadIdx.y; i < kTile && row + i < rows; i += kTileRows) {
      if (column + threadIdx.x < columns) {
        tile[i][threadIdx.x] = from[(row + i) * columns + column + threadIdx.x];
      }
    }
    __syncthreads();
    for (int i = threadIdx.y; i < kTile && column + i < columns; i += kTileRows) {
      if (row + threadIdx.x < rows) {
        to[(column + i) * rows + row + threadIdx.x] = tile[threadIdx.x][i];
      }
    }
    __syncthreads();
  }
}

bool Aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

unsigned BlocksFor(int64_t threads) {
  return static_cast<unsigned>(
      std::clamp<int64_t>((threads + kThreads - 1) / kThreads, 1, kMostBlocks));
}

template <typename T>
cudaError_t ImportAs(const ImportParams& p, cudaStream_t stream) {
  if (p.ld == p.columns && p.first % kVector == 0 && Aligned(p.from) && Aligned(p.to)) {
    ImportFlatKernel<T><<<BlocksFor(p.count / kVector), kThreads, 0, stream>>>(
        static_cast<const T*>(p.from), p.count, p.to + p.first, p.not_finite);
  } else {
    ImportRowsKernel<T><<<BlocksFor(p.count), kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

template <typename T>
cudaError_t ImportVectorAs(const void* from, int64_t count, float* to, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  ImportVectorKernel<T><<<blocks, kThreads, 0, stream>>>(static_cast<const T*>(from), count, to);
  return cudaGetLastError();
}

}  // namespace

cudaError_t ImportFactor(const ImportParams& params, cudaStream_t stream) {
  if (params.first < 0 || params.count < 0 || params.columns < 1 || params.ld < params.columns) {
    return cudaErrorInvalidValue;
  }
  if (params.count == 0) return cudaSuccess;
  switch (params.type) {
    case FloatType::kF32:
      return ImportAs<float>(params, stream);
    case FloatType::kF16:
      return ImportAs<__half>(params, stream);
    case FloatType::kBF16:
      return ImportAs<__nv_bfloat16>(params, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t ImportVector(const void* from, FloatType type, int64_t count, float* to,
                         cudaStream_t stream) {
  if (count < 0) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  switch (type) {
    case FloatType::kF32:
      return ImportVectorAs<float>(from, count, to, stream);
    case FloatType::kF16:
      return ImportVectorAs<__half>(from, count, to, stream);
    case FloatType::kBF16:
      return ImportVectorAs<__nv_bfloat16>(from, count, to, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t Transpose(const __nv_bfloat16* from, int64_t rows, int64_t columns, __nv_bfloat16* to,
                      cudaStream_t stream) {
  if (rows < 0 || columns < 0) return cudaErrorInvalidValue;
  if (rows == 0 || columns == 0) return cudaSuccess;
  const auto tiles = [](int64_t size) { return (size + kTile - 1) / kTile; };
  const dim3 grid(static_cast<unsigned>(tiles(columns)),
                  static_cast<unsigned>(std::min<int64_t>(tiles(rows), 65535)));
  TransposeKernel<<<grid, dim3(kTile, kTileRows), 0, stream>>>(from, rows, columns, to);
  return cudaGetLastError();
}

}  // namespace dorad::kernels
