#include "kernels/common/warp.cuh"
#include "kernels/decoder/attention_simple.h"

namespace dorad::kernels {
namespace {

constexpr int kMaxHeadDim = 256;
constexpr int kWarps = 4;

__device__ int64_t CacheOffset(const StepRows& rows, const AttentionShape& shape, int sequence,
                               int position, int kv_head) {
  const int64_t page = rows.pages[rows.page_begin[sequence] + position / kKvPageTokens];
  return ((page * shape.kv_heads + kv_head) * kKvPageTokens + position % kKvPageTokens) *
         shape.head_dim;
}

// One block for each query head of each row. Warp w takes the positions lo + w, lo + w + kWarps,
// ... with an online softmax; the warps' parts are joined in order. kPairs: pairs of elements of a
// head in one lane.
template <int kPairs>
__global__ void SimplePagedAttentionKernel(const PagedAttentionParams p) {
  const int row = blockIdx.x;
  const int head = blockIdx.y;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int dim = p.shape.head_dim;
  const int kv_head = head / (p.shape.heads / p.shape.kv_heads);
  const int sequence = p.rows.sequences[row];
  const int position = p.rows.positions[row];
  const int lo = p.window > 0 ? max(0, position - p.window + 1) : 0;
  const int hi = p.rows.reach == nullptr ? position : p.rows.reach[row];

  const int64_t q_offset = (int64_t{row} * p.shape.heads + head) * dim;
  float2 q[kPairs], sum[kPairs];
  for (int i = 0; i < kPairs; ++i) {
    const int d = 2 * (lane + 32 * i);
    sum[i] = {0.0f, 0.0f};
    q[i] = {0.0f, 0.0f};
    if (d < dim) {
      q[i] = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p.q + q_offset + d));
    }
  }
  float largest = -INFINITY, total = 0.0f;
  for (int j = lo + warp; j <= hi; j += kWarps) {
    const int64_t offset = CacheOffset(p.rows, p.shape, sequence, j, kv_head);
    float dot = 0.0f;
    for (int i = 0; i < kPairs; ++i) {
      const int d = 2 * (lane + 32 * i);
      if (d >= dim) continue;
      const float2 k =
          __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p.cache.k + offset + d));
      dot += q[i].x * k.x + q[i].y * k.y;
    }
    const float score = WarpSum(dot) * p.softmax_scale;
    const float next = fmaxf(largest, score);
    const float keep = expf(largest - next);
    const float weight = expf(score - next);
    largest = next;
    total = total * keep + weight;
    for (int i = 0; i < kPairs; ++i) {
      const int d = 2 * (lane + 32 * i);
      if (d >= dim) continue;
      const float2 v =
          __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p.cache.v + offset + d));
      sum[i].x = sum[i].x * keep + weight * v.x;
      sum[i].y = sum[i].y * keep + weight * v.y;
    }
  }

  __shared__ float largests[kWarps], totals[kWarps];
  __shared__ float sums[kWarps][kMaxHeadDim];
  if (lane == 0) {
    largests[warp] = largest;
    totals[warp] = total;
  }
  for (int i = 0; i < kPairs; ++i) {
    const int d = 2 * (lane + 32 * i);
    if (d >= dim) continue;
    sums[warp][d] = sum[i].x;
    sums[warp][d + 1] = sum[i].y;
  }
  __syncthreads();
  float most = largests[0];
  for (int w = 1; w < kWarps; ++w) most = fmaxf(most, largests[w]);
  float denominator = 0.0f;
  float factors[kWarps];
  for (int w = 0; w < kWarps; ++w) {
    // A warp without positions has -inf here; a NaN query must stay one.
    factors[w] = totals[w] == 0.0f ? 0.0f : expf(largests[w] - most);
    denominator += totals[w] * factors[w];
  }
  for (int d = threadIdx.x; d < dim; d += 32 * kWarps) {
    float value = 0.0f;
    for (int w = 0; w < kWarps; ++w) value += sums[w][d] * factors[w];
    p.out[q_offset + d] = __float2bfloat16_rn(value / denominator);
  }
}

bool IsValid(const AttentionShape& shape, const StepRows& rows) {
  return rows.rows > 0 && shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0 &&
         shape.head_dim > 0 && shape.head_dim % 2 == 0 && shape.head_dim <= kMaxHeadDim;
}

}  // namespace

cudaError_t SimplePagedAttention(const PagedAttentionParams& params, cudaStream_t stream) {
  if (!IsValid(params.shape, params.rows)) return cudaErrorInvalidValue;
  const dim3 grid(params.rows.rows, params.shape.heads);
  switch ((params.shape.head_dim + 63) / 64) {
    case 1:
      SimplePagedAttentionKernel<1><<<grid, 32 * kWarps, 0, stream>>>(params);
      break;
    case 2:
      SimplePagedAttentionKernel<2><<<grid, 32 * kWarps, 0, stream>>>(params);
      break;
    case 3:
      SimplePagedAttentionKernel<3><<<grid, 32 * kWarps, 0, stream>>>(params);
      break;
    default:
      SimplePagedAttentionKernel<4><<<grid, 32 * kWarps, 0, stream>>>(params);
      break;
  }
  return cudaGetLastError();
}

}  // namespace dorad::kernels
