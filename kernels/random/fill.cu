#include "kernels/random/fill.h"

namespace dorad::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 4096;

// Mixes all bits of a counter (the finaliser of MurmurHash3).
__device__ uint32_t Mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x85EBCA6B;
  x ^= x >> 13;
  x *= 0xC2B2AE35;
  return x ^ x >> 16;
}

__global__ void FillRandomKernel(__nv_bfloat16* out, int64_t size, float limit, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < size;
       i += int64_t{kThreads} * gridDim.x) {
    const uint32_t bits =
        Mix(static_cast<uint32_t>(i) ^ Mix(seed ^ static_cast<uint32_t>(i >> 32)));
    out[i] = __float2bfloat16_rn((static_cast<float>(bits) * 0x1p-31f - 1.0f) * limit);
  }
}

__global__ void FillConstantKernel(float* out, int64_t size, float value) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < size;
       i += int64_t{kThreads} * gridDim.x) {
    out[i] = value;
  }
}

}  // namespace

cudaError_t FillRandom(__nv_bfloat16* out, int64_t size, float limit, uint32_t seed,
                       cudaStream_t stream) {
  FillRandomKernel<<<kBlocks, kThreads, 0, stream>>>(out, size, limit, seed);
  return cudaGetLastError();
}

cudaError_t FillConstant(float* out, int64_t size, float value, cudaStream_t stream) {
  FillConstantKernel<<<kBlocks, kThreads, 0, stream>>>(out, size, value);
  return cudaGetLastError();
}

}  // namespace dorad::kernels
