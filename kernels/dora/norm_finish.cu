#include <limits>

#include "kernels/common/status.h"
#include "kernels/dora/norm_finish.h"
#include "kernels/dora/norm_gemm.h"
#include "kernels/dora/norm_row.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/launch.h"

namespace dorad::kernels::norm {
namespace {

constexpr int kRows = 32;  // of a block, one a lane: rows are contiguous
constexpr int kParts = 8;  // that sum every eighth partial sum of a row
constexpr int kThreads = kRows * kParts;

struct Totals {
  double value[kParts][kRows];
};

// The total of this thread's row, the same in each of its parts.
__device__ float Total(PartialSums partial, int64_t row, int64_t rows, Totals& shared) {
  const int lane = threadIdx.x % kRows;
  const int part = threadIdx.x / kRows;
  double sum = 0.0;
  if (row < rows) {
#pragma unroll 4
    for (int64_t i = part; i < partial.count; i += kParts) {
      sum += static_cast<double>(partial.sums[i * rows + row]);
    }
  }
  shared.value[part][lane] = sum;
  __syncthreads();
  double total = 0.0;
#pragma unroll
  for (int i = 0; i < kParts; ++i) total += shared.value[i][lane];
  __syncthreads();
  return static_cast<float>(total);
}

// The outputs of a module.
struct Target {
  const float* base_sq;
  Magnitude magnitude;
  float* norm;
  float* g;
  uint32_t* degenerate;
  int64_t rows;
  float eps;
  uint32_t first_block;
};

Target TargetOf(const DoraNormParams& p) {
  return {p.base_sq, p.magnitude, p.norm, p.g, p.degenerate, p.out, p.eps, 0};
}

__device__ void Write(const Target& target, int64_t row, float norm) {
  target.norm[row] = norm;
  if (target.magnitude.values == nullptr) return;
  const float magnitude = MagnitudeAt(target.magnitude, row);
  const float g = ScaleOf(magnitude, norm, target.eps);
  target.g[row] = g;
  if (target.degenerate != nullptr && Degenerate(magnitude, norm, g, target.eps)) {
    *target.degenerate = 1;
  }
}

struct DirectParams {
  PartialSums squares[kMostGemms];
  Target targets[kMostGemms];
  int32_t count;
};

__global__ void __launch_bounds__(kThreads)
    FinishDirectKernel(const __grid_constant__ DirectParams p) {
  __shared__ Totals shared;
  LaunchDependents();
  WaitForPrevious();
  int32_t i = 0;
  while (i + 1 < p.count && blockIdx.x >= p.targets[i + 1].first_block) ++i;
  const Target& target = p.targets[i];
  const int64_t row =
      static_cast<int64_t>(blockIdx.x - target.first_block) * kRows + threadIdx.x % kRows;
  const float squared = Total(p.squares[i], row, target.rows, shared);
  if (threadIdx.x < kRows && row < target.rows) Write(target, row, RootOfSquared(squared));
}

__global__ void __launch_bounds__(kThreads)
    FinishFactoredKernel(PartialSums cross, PartialSums ba_sq, Target target, float two_s,
                         float s2) {
  __shared__ Totals shared;
  LaunchDependents();
  WaitForPrevious();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x % kRows;
  const float c = Total(cross, row, target.rows, shared);
  const float b = Total(ba_sq, row, target.rows, shared);
  if (threadIdx.x < kRows && row < target.rows) {
    Write(target, row, RootOfSquared(AssembledSquare(target.base_sq[row], two_s, c, s2, b)));
  }
}

unsigned BlocksFor(int64_t rows) { return static_cast<unsigned>((rows + kRows - 1) / kRows); }

}  // namespace

cudaError_t FinishDirect(const PartialSums* squares, const DoraNormParams* modules, int count,
                         cudaStream_t stream) {
  if (count < 1 || count > kMostGemms) return cudaErrorInvalidValue;
  DirectParams params;
  params.count = count;
  unsigned blocks = 0;
  for (int i = 0; i < count; ++i) {
    params.squares[i] = squares[i];
    params.targets[i] = TargetOf(modules[i]);
    params.targets[i].first_block = blocks;
    blocks += BlocksFor(modules[i].out);
  }
  return LaunchEarly(FinishDirectKernel, blocks, kThreads, 0, stream, params);
}

cudaError_t FinishFactored(PartialSums cross, PartialSums ba_sq, const DoraNormParams& params,
                           cudaStream_t stream) {
  return LaunchEarly(FinishFactoredKernel, BlocksFor(params.out), kThreads, 0, stream, cross, ba_sq,
                     TargetOf(params), static_cast<float>(2.0 * params.scale),
                     static_cast<float>(params.scale * params.scale));
}

bool Valid(const DoraNormParams& params, size_t workspace_bytes) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  return params.out >= 0 && params.out <= kMost && params.in >= 0 && params.in <= kMost &&
         params.rank >= 0 && params.rank <= kMostRank && params.ldb >= params.rank &&
         (params.magnitude.values == nullptr || params.g != nullptr) &&
         params.workspace_bytes >= workspace_bytes;
}

cudaError_t BaseNorm(const DoraNormParams& params, cudaStream_t stream) {
  NormAssemblyParams assembly;
  assembly.base_sq = params.base_sq;
  assembly.norm = params.norm;
  assembly.size = params.out;
  DORAD_CUDA_RETURN_IF_ERROR(AssembleNorms(assembly, stream));
  if (params.magnitude.values == nullptr) return cudaSuccess;
  return MagnitudeScale(params.magnitude, params.norm, params.eps, params.out, params.g,
                        params.degenerate, stream);
}

}  // namespace dorad::kernels::norm
