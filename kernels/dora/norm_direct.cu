#include <algorithm>

#include "kernels/common/status.h"
#include "kernels/dora/norm.h"
#include "kernels/dora/norm_finish.h"
#include "kernels/dora/norm_gemm.h"

namespace dorad::kernels {
namespace {

constexpr int kPlainThreads = 128;
constexpr int kPlainRows = 4;  // of a block: each element of A is read once for them

// Any sizes and alignments. Shared memory: B's rows in fp32, [kPlainRows, rank].
__global__ void __launch_bounds__(kPlainThreads)
    PlainSquaresKernel(DoraNormParams p, float scale, float* squares) {
  extern __shared__ float b[];
  __shared__ double sums[kPlainRows][kPlainThreads];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kPlainRows;
  for (int64_t i = threadIdx.x; i < kPlainRows * p.rank; i += kPlainThreads) {
    const int64_t row = first + i / p.rank;
    b[i] = row < p.out ? __bfloat162float(p.b[row * p.ldb + i % p.rank]) : 0.0f;
  }
  __syncthreads();
  double sum[kPlainRows] = {};
  for (int64_t column = threadIdx.x; column < p.in; column += kPlainThreads) {
    float product[kPlainRows] = {};
    for (int64_t r = 0; r < p.rank; ++r) {
      const float a = __bfloat162float(p.a[r * p.in + column]);
#pragma unroll
      for (int i = 0; i < kPlainRows; ++i) product[i] = fmaf(b[i * p.rank + r], a, product[i]);
    }
#pragma unroll
    for (int i = 0; i < kPlainRows; ++i) {
      if (first + i >= p.out) break;
      const float w = __bfloat162float(p.w[(first + i) * p.in + column]);
      const float t = fmaf(scale, product[i], w);
      sum[i] += static_cast<double>(t) * t;
    }
  }
#pragma unroll
  for (int i = 0; i < kPlainRows; ++i) sums[i][threadIdx.x] = sum[i];
  for (int width = kPlainThreads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) {
#pragma unroll
      for (int i = 0; i < kPlainRows; ++i) sums[i][threadIdx.x] += sums[i][threadIdx.x + width];
    }
  }
  __syncthreads();
  if (threadIdx.x < kPlainRows && first + threadIdx.x < p.out) {
    squares[first + threadIdx.x] = static_cast<float>(sums[threadIdx.x][0]);
  }
}

norm::RowGemm GemmOf(const DoraNormParams& p) {
  norm::RowGemm gemm;
  gemm.reduction = norm::Reduction::kSquare;
  gemm.x = {p.b, p.out, p.rank, p.ldb};
  gemm.y = {p.a, p.rank, p.in, p.in};
  gemm.z = {p.w, p.out, p.in, p.in};
  gemm.k = p.rank;
  gemm.scale = static_cast<float>(p.scale);
  gemm.partial = static_cast<float*>(p.workspace);
  return gemm;
}

}  // namespace

size_t DirectNormWorkspace(int64_t out, int64_t in, int64_t rank) {
  DoraNormParams p;
  p.out = out;
  p.in = in;
  p.rank = rank;
  const int64_t count = std::max<int64_t>(1, norm::Partials(GemmOf(p)));
  return sizeof(float) * static_cast<size_t>(count) * static_cast<size_t>(out);
}

cudaError_t DirectNorm(const DoraNormParams& params, cudaStream_t stream) {
  if (params.out < 0 || params.in < 0) return cudaErrorInvalidValue;
  if (!norm::Valid(params, DirectNormWorkspace(params.out, params.in, params.rank))) {
    return cudaErrorInvalidValue;
  }
  if (params.out == 0) return cudaSuccess;
  if (params.scale == 0.0 || params.rank == 0) return norm::BaseNorm(params, stream);
  const norm::RowGemm gemm = GemmOf(params);
  if (params.in > 0 && norm::FitsTensorCores(gemm.x) && norm::FitsTensorCores(gemm.y) &&
      norm::FitsTensorCores(gemm.z)) {
    DORAD_CUDA_RETURN_IF_ERROR(norm::Launch(gemm, stream));
    return norm::FinishDirect({gemm.partial, norm::Partials(gemm)}, params, stream);
  }
  const auto blocks = static_cast<unsigned>((params.out + kPlainRows - 1) / kPlainRows);
  const size_t shared = sizeof(float) * kPlainRows * static_cast<size_t>(params.rank);
  if (shared > 32 << 10) {
    DORAD_CUDA_RETURN_IF_ERROR(cudaFuncSetAttribute(
        PlainSquaresKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  }
  PlainSquaresKernel<<<blocks, kPlainThreads, shared, stream>>>(
      params, static_cast<float>(params.scale), gemm.partial);
  DORAD_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  return norm::FinishDirect({gemm.partial, 1}, params, stream);
}

}  // namespace dorad::kernels
