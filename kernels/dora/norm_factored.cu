#include <algorithm>

#include "kernels/common/status.h"
#include "kernels/dora/norm.h"
#include "kernels/dora/norm_finish.h"
#include "kernels/dora/norm_gemm.h"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/launch.h"

namespace dorad::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kStep = 64;                     // of the tensor-core kernel over K
constexpr int64_t kGramBytes = int64_t{8} << 20;  // of partial Gram matrices, if more than one
constexpr int64_t kMostSplits = 16;

int64_t RoundUp(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// G = Σ partial in double and ascending order, then as bf16 terms: row n is [hi | lo], each `half`
// long with zeros beyond R.
__global__ void __launch_bounds__(kThreads)
    GramTermsKernel(const float* __restrict__ partial, int64_t splits, int64_t rank, int64_t half,
                    __nv_bfloat16* __restrict__ terms) {
  LaunchDependents();
  WaitForPrevious();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= rank * half) return;
  const int64_t row = i / half;
  const int64_t column = i % half;
  double sum = 0.0;
  if (column < rank) {
#pragma unroll 8
    for (int64_t s = 0; s < splits; ++s) {
      sum += static_cast<double>(partial[(s * rank + row) * rank + column]);
    }
  }
  const float g = static_cast<float>(sum);
  const __nv_bfloat16 high = __float2bfloat16_rn(g);
  terms[row * 2 * half + column] = high;
  terms[row * 2 * half + half + column] = __float2bfloat16_rn(g - __bfloat162float(high));
}

// The products of one module and the places of their results in the workspace.
struct Plan {
  norm::RowGemm gram;   // A Aᵀ, in parts of I
  norm::RowGemm cross;  // Σ_l B∘(W Aᵀ), in parts of I and of R
  norm::RowGemm ba_sq;  // Σ_l B∘(B [hi | lo]ᵀ), in parts of R
  __nv_bfloat16* terms = nullptr;
  int64_t half = 0;
  size_t bytes = 0;
};

// workspace may be nullptr: for the sizes only.
Plan PlanOf(const DoraNormParams& p) {
  Plan plan;
  plan.half = RoundUp(p.rank, kStep);
  const norm::Matrix a = {p.a, p.rank, p.in, p.in};
  const norm::Matrix b = {p.b, p.out, p.rank, p.ldb};

  plan.gram.reduction = norm::Reduction::kStore;
  plan.gram.x = a;
  plan.gram.y = a;
  plan.gram.k = p.in;
  const int64_t square = 4 * p.rank * p.rank;
  plan.gram.splits =
      norm::SplitsFor(plan.gram, std::max<int64_t>(1, kGramBytes / std::max<int64_t>(1, square)));

  plan.cross.reduction = norm::Reduction::kDot;
  plan.cross.x = {p.w, p.out, p.in, p.in};
  plan.cross.y = a;
  plan.cross.z = b;
  plan.cross.k = p.in;
  plan.cross.splits = norm::SplitsFor(plan.cross, kMostSplits);

  plan.ba_sq.reduction = norm::Reduction::kDot;
  plan.ba_sq.x = b;
  plan.ba_sq.y = {nullptr, p.rank, 2 * plan.half, 2 * plan.half};
  plan.ba_sq.z = b;
  plan.ba_sq.k = 2 * plan.half;
  plan.ba_sq.x_period = plan.half;
  plan.ba_sq.splits = norm::SplitsFor(plan.ba_sq, kMostSplits);

  plan.gram.isa = plan.cross.isa = plan.ba_sq.isa = p.isa;

  const auto take = [&](int64_t bytes) {
    char* const at =
        p.workspace == nullptr ? nullptr : static_cast<char*>(p.workspace) + plan.bytes;
    plan.bytes += static_cast<size_t>(RoundUp(bytes, 256));
    return at;
  };
  plan.gram.partial = reinterpret_cast<float*>(take(plan.gram.splits * square));
  plan.terms = reinterpret_cast<__nv_bfloat16*>(take(4 * p.rank * plan.half));
  plan.ba_sq.y.data = plan.terms;
  plan.cross.partial = reinterpret_cast<float*>(take(4 * norm::Partials(plan.cross) * p.out));
  plan.ba_sq.partial = reinterpret_cast<float*>(take(4 * norm::Partials(plan.ba_sq) * p.out));
  return plan;
}

cudaError_t LaunchGramTerms(const Plan& plan, int64_t rank, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((rank * plan.half + kThreads - 1) / kThreads);
  return LaunchEarly(GramTermsKernel, blocks, kThreads, 0, stream,
                     static_cast<const float*>(plan.gram.partial), plan.gram.splits, rank,
                     plan.half, plan.terms);
}

}  // namespace

size_t FactoredNormWorkspace(int64_t out, int64_t in, int64_t rank) {
  DoraNormParams p;
  p.out = out;
  p.in = in;
  p.rank = rank;
  return rank == 0 ? 0 : PlanOf(p).bytes;
}

cudaError_t FactoredNorm(const DoraNormParams& params, cudaStream_t stream) {
  if (params.out < 0 || params.in < 0 || params.rank < 0 || params.w_by_in) {
    return cudaErrorInvalidValue;
  }
  if (!norm::Valid(params, FactoredNormWorkspace(params.out, params.in, params.rank))) {
    return cudaErrorInvalidValue;
  }
  if (params.out == 0) return cudaSuccess;
  if (params.scale == 0.0 || params.rank == 0) return norm::BaseNorm(params, stream);
  const Plan plan = PlanOf(params);
  if (params.in == 0 || !norm::FitsTensorCores(plan.cross.x) ||
      !norm::FitsTensorCores(plan.cross.y) || !norm::FitsTensorCores(plan.cross.z)) {
    return cudaErrorInvalidValue;
  }
  DORAD_CUDA_RETURN_IF_ERROR(norm::Launch(&plan.gram, 1, stream));
  DORAD_CUDA_RETURN_IF_ERROR(LaunchGramTerms(plan, params.rank, stream));
  DORAD_CUDA_RETURN_IF_ERROR(norm::Launch(&plan.ba_sq, 1, stream));
  DORAD_CUDA_RETURN_IF_ERROR(norm::Launch(&plan.cross, 1, stream));
  return norm::FinishFactored({plan.cross.partial, norm::Partials(plan.cross)},
                              {plan.ba_sq.partial, norm::Partials(plan.ba_sq)}, params, stream);
}

}  // namespace dorad::kernels
