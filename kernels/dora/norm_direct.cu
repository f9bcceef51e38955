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
      const float w = __bfloat162float(p.w_by_in ? p.w[column * p.out + first + i]
                                                 : p.w[(first + i) * p.in + column]);
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
  gemm.z = p.w_by_in ? norm::Matrix{p.w, p.in, p.out, p.out} : norm::Matrix{p.w, p.out, p.in, p.in};
  gemm.z_by_n = p.w_by_in;
  gemm.k = p.rank;
  gemm.scale = static_cast<float>(p.scale);
  gemm.partial = static_cast<float*>(p.workspace);
  gemm.isa = p.isa;
  return gemm;
}

bool Fast(const DoraNormParams& p) {
  const norm::RowGemm gemm = GemmOf(p);
  return p.in > 0 && norm::FitsTensorCores(gemm.x) && norm::FitsTensorCores(gemm.y) &&
         norm::FitsTensorCores(gemm.z);
}

cudaError_t PlainNorm(const DoraNormParams& p, cudaStream_t stream) {
  auto* const squares = static_cast<float*>(p.workspace);
  const auto blocks = static_cast<unsigned>((p.out + kPlainRows - 1) / kPlainRows);
  const size_t shared = sizeof(float) * kPlainRows * static_cast<size_t>(p.rank);
  if (shared > 32 << 10) {
    DORAD_CUDA_RETURN_IF_ERROR(cudaFuncSetAttribute(
        PlainSquaresKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  }
  PlainSquaresKernel<<<blocks, kPlainThreads, shared, stream>>>(p, static_cast<float>(p.scale),
                                                                squares);
  DORAD_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  const norm::PartialSums sums = {squares, 1};
  return norm::FinishDirect(&sums, &p, 1, stream);
}

DoraNormParams WithoutUpdate(DoraNormParams p) {
  p.rank = 0;
  return p;
}

// Modules that share one launch.
class Group {
 public:
  void Add(const DoraNormParams& p) {
    modules_[count_] = p;
    gemms_[count_] = GemmOf(p);
    sums_[count_] = {gemms_[count_].partial, norm::Partials(gemms_[count_])};
    ++count_;
  }
  // One launch, one layout of W, one instruction set.
  bool Takes(const DoraNormParams& p) const {
    return count_ == 0 || (modules_[0].w_by_in == p.w_by_in && modules_[0].isa == p.isa);
  }
  bool full() const { return count_ == norm::kMostGemms; }
  // Launches the group and empties it.
  cudaError_t Launch(cudaStream_t stream) {
    const int count = count_;
    count_ = 0;
    if (count == 0) return cudaSuccess;
    DORAD_CUDA_RETURN_IF_ERROR(norm::Launch(gemms_, count, stream));
    return norm::FinishDirect(sums_, modules_, count, stream);
  }

 private:
  DoraNormParams modules_[norm::kMostGemms];
  norm::RowGemm gemms_[norm::kMostGemms];
  norm::PartialSums sums_[norm::kMostGemms];
  int count_ = 0;
};

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
  return DirectNorms(&params, 1, stream);
}

cudaError_t DirectNorms(const DoraNormParams* modules, int count, cudaStream_t stream) {
  for (int i = 0; i < count; ++i) {
    const DoraNormParams& p = modules[i];
    if (p.out < 0 || p.in < 0 || p.rank < 0 ||
        !norm::Valid(p, DirectNormWorkspace(p.out, p.in, p.rank))) {
      return cudaErrorInvalidValue;
    }
  }
  Group group;
  for (int i = 0; i < count; ++i) {
    const DoraNormParams& p = modules[i];
    if (p.out == 0) continue;
    if (p.scale == 0.0 || p.rank == 0) {
      DORAD_CUDA_RETURN_IF_ERROR(p.w_by_in ? PlainNorm(WithoutUpdate(p), stream)
                                           : norm::BaseNorm(p, stream));
    } else if (!Fast(p)) {
      DORAD_CUDA_RETURN_IF_ERROR(PlainNorm(p, stream));
    } else {
      if (!group.Takes(p)) DORAD_CUDA_RETURN_IF_ERROR(group.Launch(stream));
      group.Add(p);
      if (group.full()) DORAD_CUDA_RETURN_IF_ERROR(group.Launch(stream));
    }
  }
  return group.Launch(stream);
}

}  // namespace dorad::kernels
