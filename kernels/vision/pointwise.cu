#include "kernels/common/gelu.cuh"
#include "kernels/common/host.h"
#include "kernels/vision/pointwise.h"

namespace dorad::kernels {
namespace {

constexpr int kThreads = 256;

int Blocks(int64_t items) { return static_cast<int>((items + kThreads - 1) / kThreads); }

__device__ int64_t Item() { return int64_t{blockIdx.x} * kThreads + threadIdx.x; }

struct TanhGelu {
  __device__ float operator()(float x) const {
    return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
  }
};

// kWidth neighbouring elements a thread.
template <typename Function, int kWidth>
__global__ void __launch_bounds__(kThreads) ApplyKernel(__nv_bfloat16* x, int64_t count) {
  struct Group {
    alignas(2 * kWidth) __nv_bfloat16 values[kWidth];
  };
  const int64_t i = Item() * kWidth;
  if (i >= count) return;
  Group group = *reinterpret_cast<const Group*>(x + i);
#pragma unroll
  for (__nv_bfloat16& value : group.values) {
    value = __float2bfloat16_rn(Function()(__bfloat162float(value)));
  }
  *reinterpret_cast<Group*>(x + i) = group;
}

template <typename Function>
cudaError_t ApplyTo(__nv_bfloat16* x, int64_t count, cudaStream_t stream) {
  if (count <= 0 || !IsThere(x, 16)) return cudaErrorInvalidValue;
  if (count % 8 == 0) {
    ApplyKernel<Function, 8><<<Blocks(count / 8), kThreads, 0, stream>>>(x, count);
  } else {
    ApplyKernel<Function, 1><<<Blocks(count), kThreads, 0, stream>>>(x, count);
  }
  return cudaGetLastError();
}

__global__ void __launch_bounds__(kThreads) AddKernel(float* to, const float* from, int64_t count) {
  const int64_t i = Item();
  if (i < count) to[i] += from[i];
}

__global__ void __launch_bounds__(kThreads)
    ByChannelKernel(const __nv_bfloat16* from, int64_t count, int patches, int channels,
                    __nv_bfloat16* to) {
  const int64_t i = Item();
  if (i >= count) return;
  const int64_t token = i / (patches * channels);
  const int c = static_cast<int>(i / patches % channels);
  to[i] = from[(token * patches + i % patches) * channels + c];
}

__global__ void __launch_bounds__(kThreads)
    PoolPatchesKernel(const __nv_bfloat16* from, int64_t count, int patches, int channels,
                      float* to) {
  const int64_t i = Item();
  if (i >= count) return;
  const __nv_bfloat16* const first = from + i / channels * patches * channels + i % channels;
  float sum = 0.0f;
  for (int p = 0; p < patches; ++p) sum += __bfloat162float(first[int64_t{p} * channels]);
  to[i] = sum / static_cast<float>(patches);
}

__global__ void __launch_bounds__(kThreads)
    ScatterRowsKernel(const float* from, const int32_t* places, int width, float* to) {
  const int64_t place = places[blockIdx.x];
  for (int i = threadIdx.x; i < width; i += kThreads) {
    to[place * width + i] = from[int64_t{blockIdx.x} * width + i];
  }
}

__global__ void __launch_bounds__(kThreads)
    AddTableRowsKernel(float* residual, const PatchTaps* taps, const float* table, int width) {
  const PatchTaps tap = taps[blockIdx.x];
  for (int i = threadIdx.x; i < width; i += kThreads) {
    float sum = 0.0f;
#pragma unroll
    for (int t = 0; t < 4; ++t) sum += table[int64_t{tap.rows[t]} * width + i] * tap.weights[t];
    residual[int64_t{blockIdx.x} * width + i] += sum;
  }
}

// One block a row; a thread has pairs of queries, then of keys.
__global__ void __launch_bounds__(kThreads) RotatePatchesKernel(const PatchRotaryParams p) {
  const int half = p.head_dim / 2;
  const PatchTaps tap = p.taps[blockIdx.x];
  __nv_bfloat16* const row = p.qkv + int64_t{blockIdx.x} * 3 * p.heads * p.head_dim;
  for (int i = threadIdx.x; i < 2 * p.heads * half; i += kThreads) {
    const int pair = i % half;
    const int64_t at = int64_t{pair < half / 2 ? tap.row : tap.column} * half + pair;
    const float cos = p.cos[at];
    const float sin = p.sin[at];
    __nv_bfloat16* const low = row + i / half * p.head_dim + pair;
    const float a = __bfloat162float(low[0]);
    const float b = __bfloat162float(low[half]);
    low[0] = __float2bfloat16_rn(a * cos - b * sin);
    low[half] = __float2bfloat16_rn(b * cos + a * sin);
  }
}

}  // namespace

cudaError_t Gelu(__nv_bfloat16* x, int64_t count, cudaStream_t stream) {
  return ApplyTo<ExactGelu>(x, count, stream);
}

cudaError_t GeluTanh(__nv_bfloat16* x, int64_t count, cudaStream_t stream) {
  return ApplyTo<TanhGelu>(x, count, stream);
}

cudaError_t AddInPlace(float* to, const float* from, int64_t count, cudaStream_t stream) {
  if (count <= 0 || to == nullptr || from == nullptr) return cudaErrorInvalidValue;
  AddKernel<<<Blocks(count), kThreads, 0, stream>>>(to, from, count);
  return cudaGetLastError();
}

cudaError_t ByChannel(const __nv_bfloat16* from, int64_t tokens, int32_t patches, int32_t channels,
                      __nv_bfloat16* to, cudaStream_t stream) {
  if (tokens <= 0 || patches <= 0 || channels <= 0 || from == nullptr || to == nullptr) {
    return cudaErrorInvalidValue;
  }
  const int64_t count = tokens * patches * channels;
  ByChannelKernel<<<Blocks(count), kThreads, 0, stream>>>(from, count, patches, channels, to);
  return cudaGetLastError();
}

cudaError_t PoolPatches(const __nv_bfloat16* from, int64_t tokens, int32_t patches,
                        int32_t channels, float* to, cudaStream_t stream) {
  if (tokens <= 0 || patches <= 0 || channels <= 0 || from == nullptr || to == nullptr) {
    return cudaErrorInvalidValue;
  }
  const int64_t count = tokens * channels;
  PoolPatchesKernel<<<Blocks(count), kThreads, 0, stream>>>(from, count, patches, channels, to);
  return cudaGetLastError();
}

cudaError_t ScatterRows(const float* from, const int32_t* places, int32_t rows, int32_t width,
                        float* to, cudaStream_t stream) {
  if (rows <= 0 || width <= 0 || from == nullptr || places == nullptr || to == nullptr) {
    return cudaErrorInvalidValue;
  }
  ScatterRowsKernel<<<rows, kThreads, 0, stream>>>(from, places, width, to);
  return cudaGetLastError();
}

cudaError_t AddTableRows(float* residual, const PatchTaps* taps, const float* table, int32_t rows,
                         int32_t width, cudaStream_t stream) {
  if (rows <= 0 || width <= 0 || residual == nullptr || taps == nullptr || table == nullptr) {
    return cudaErrorInvalidValue;
  }
  AddTableRowsKernel<<<rows, kThreads, 0, stream>>>(residual, taps, table, width);
  return cudaGetLastError();
}

cudaError_t RotatePatches(const PatchRotaryParams& params, cudaStream_t stream) {
  if (params.rows <= 0 || params.heads <= 0 || params.head_dim <= 0 || params.head_dim % 4 != 0 ||
      params.qkv == nullptr || params.taps == nullptr || params.cos == nullptr ||
      params.sin == nullptr) {
    return cudaErrorInvalidValue;
  }
  RotatePatchesKernel<<<params.rows, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace dorad::kernels
