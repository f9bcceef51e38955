#include <cstdint>

#include "kernels/common/host.h"
#include "kernels/decoder/embedding.h"
#include "kernels/isa/dependent_launch.cuh"

namespace dorad::kernels {
namespace {

constexpr int kThreads = 256;

__device__ int SlotOf(const RowSegments& segments, int row) {
  const int block = row / kSegmentBlockRows;
  const RowSegment* list = segments.blocks + block * kSegmentBlockRows;
  for (int i = 0; i < segments.counts[block]; ++i) {
    if (row % kSegmentBlockRows < list[i].end) return list[i].slot;
  }
  return -1;
}

// kWidth neighbouring elements.
template <int kWidth>
struct Group {
  alignas(2 * kWidth) __nv_bfloat16 values[kWidth];
};
template <int kWidth>
struct WideGroup {
  alignas(kWidth == 1 ? 4 : 16) float values[kWidth];
};

__device__ float Adapted(const DoraFactors& factors, const __nv_bfloat16* a, int i, float base) {
  const __nv_bfloat16* b = factors.b + int64_t{i} * factors.ldb;
  float lora = 0.0f;
  for (int r = 0; r < factors.rank; ++r) lora += __bfloat162float(b[r]) * __bfloat162float(a[r]);
  const float y = base + factors.scale * lora;
  return factors.g == nullptr ? y : y * factors.g[i];
}

// One block a row.
template <int kWidth>
__global__ void __launch_bounds__(kThreads) EmbedKernel(const EmbedParams p) {
  LaunchDependents();
  const int row = blockIdx.x;
  const int token = p.rows.token_ids[row];
  const __nv_bfloat16* weight = p.weight + int64_t{token} * p.size;
  float* out = p.out + int64_t{row} * p.size;
  const int slot = SlotOf(p.segments, row);
  DoraFactors factors;
  if (slot >= 0) factors = p.adapters.factors[int64_t{slot} * p.adapters.modules + p.module];
  const __nv_bfloat16* a = factors.rank == 0 ? nullptr : factors.a + int64_t{token} * factors.rank;
  for (int i = threadIdx.x * kWidth; i < p.size; i += kThreads * kWidth) {
    const auto base = *reinterpret_cast<const Group<kWidth>*>(weight + i);
    WideGroup<kWidth> y;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      y.values[j] = __bfloat162float(base.values[j]);
      if (a != nullptr) y.values[j] = Adapted(factors, a, i + j, y.values[j]);
      y.values[j] *= p.factor;
    }
    *reinterpret_cast<WideGroup<kWidth>*>(out + i) = y;
  }
}

}  // namespace

cudaError_t Embed(const EmbedParams& params, cudaStream_t stream) {
  if (params.rows.rows <= 0 || params.size <= 0 || !IsAligned(params.weight) ||
      !IsAligned(params.out)) {
    return cudaErrorInvalidValue;
  }
  // Not launched early: earlier kernels may still use its output.
  if (params.size % 8 == 0) {
    EmbedKernel<8><<<params.rows.rows, kThreads, 0, stream>>>(params);
  } else {
    EmbedKernel<1><<<params.rows.rows, kThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace dorad::kernels
