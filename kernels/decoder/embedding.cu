#include "kernels/common/status.h"
#include "kernels/decoder/embedding.h"

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

// One block a row.
__global__ void EmbedKernel(const EmbedParams p) {
  const int row = blockIdx.x;
  const int token = p.rows.token_ids[row];
  const __nv_bfloat16* weight = p.weight + int64_t{token} * p.size;
  float* out = p.out + int64_t{row} * p.size;
  const int slot = SlotOf(p.segments, row);
  const DoraFactors* factors =
      slot < 0 ? nullptr : &p.adapters.factors[int64_t{slot} * p.adapters.modules + p.module];
  const int rank = factors == nullptr ? 0 : factors->rank;
  const __nv_bfloat16* a = rank == 0 ? nullptr : factors->a + int64_t{token} * rank;
  for (int i = threadIdx.x; i < p.size; i += kThreads) {
    float y = __bfloat162float(weight[i]);
    if (rank > 0) {
      const __nv_bfloat16* b = factors->b + int64_t{i} * factors->ldb;
      float lora = 0.0f;
      for (int r = 0; r < rank; ++r) lora += __bfloat162float(b[r]) * __bfloat162float(a[r]);
      y += factors->scale * lora;
      if (factors->g != nullptr) y *= factors->g[i];
    }
    out[i] = y;
  }
}

}  // namespace

cudaError_t Embed(const EmbedParams& params, cudaStream_t stream) {
  if (params.rows.rows <= 0 || params.size <= 0) return cudaErrorInvalidValue;
  EmbedKernel<<<params.rows.rows, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace dorad::kernels
