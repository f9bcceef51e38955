// Norms of query and key, rotary embedding, and the append to the cache.
#include "kernels/common/barrier.cuh"
#include "kernels/decoder/attention.h"

namespace dorad::kernels {
namespace {

constexpr int kWarps = 4;

__device__ float WarpSum(float value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFF, value, offset);
  }
  return value;
}

// One warp for kHeads heads of a row in succession: first the query heads, then the keys', then
// the values'. A lane holds the pairs (2 i, 2 i + 1) of both halves for i = lane + 32 j.
// kPairs: j at most; the head's half is even.
template <int kPairs, int kHeads>
__global__ void __launch_bounds__(32 * kWarps) RopeAppendKernel(const RopeAppendParams p) {
  const int heads = p.shape.heads + 2 * p.shape.kv_heads;
  const int row = blockIdx.x;
  const int first = (blockIdx.y * kWarps + threadIdx.x / 32) * kHeads;
  const int lane = threadIdx.x % 32;
  const int dim = p.shape.head_dim;
  const int half = dim / 2;
  WaitForPrevious();
  LaunchDependents();
  if (first >= heads) return;
  // All loads that depend on nothing, then those that depend on the position.
  float2 a[kHeads][kPairs], b[kHeads][kPairs];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const float* x = p.qkv + (int64_t{row} * heads + first + h) * dim;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = 2 * (lane + 32 * j);
      a[h][j] = b[h][j] = make_float2(0.0f, 0.0f);
      if (i < half && first + h < heads) {
        a[h][j] = __ldcs(reinterpret_cast<const float2*>(x + i));
        b[h][j] = __ldcs(reinterpret_cast<const float2*>(x + half + i));
      }
    }
  }
  const int position = p.rows.positions[row];
  const int sequence = p.rows.sequences[row];
  const int64_t page = p.rows.pages[p.rows.page_begin[sequence] + position / kKvPageTokens];
  float2 cos[kPairs], sin[kPairs];
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int i = 2 * (lane + 32 * j);
    if (i >= half) continue;
    cos[j] = *reinterpret_cast<const float2*>(p.cos + int64_t{position} * half + i);
    sin[j] = *reinterpret_cast<const float2*>(p.sin + int64_t{position} * half + i);
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const int head = first + h;
    if (head >= heads) return;
    const bool is_query = head < p.shape.heads;
    const bool is_value = head >= p.shape.heads + p.shape.kv_heads;
    __nv_bfloat16* out;
    if (is_query) {
      out = p.q + (int64_t{row} * p.shape.heads + head) * dim;
    } else {
      const int kv_head = head - p.shape.heads - (is_value ? p.shape.kv_heads : 0);
      out = (is_value ? p.cache.v : p.cache.k) +
            ((page * p.shape.kv_heads + kv_head) * kKvPageTokens + position % kKvPageTokens) * dim;
    }
    const float* norm = is_value ? nullptr : is_query ? p.q_norm : p.k_norm;
    float scale = 1.0f;
    if (norm != nullptr) {
      float squares = 0.0f;
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        squares += a[h][j].x * a[h][j].x + a[h][j].y * a[h][j].y;
        squares += b[h][j].x * b[h][j].x + b[h][j].y * b[h][j].y;
      }
      scale = rsqrtf(WarpSum(squares) / static_cast<float>(dim) + p.eps);
    }
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = 2 * (lane + 32 * j);
      if (i >= half) continue;
      float2 x = a[h][j], y = b[h][j];
      if (norm != nullptr) {
        const float2 x_norm = *reinterpret_cast<const float2*>(norm + i);
        const float2 y_norm = *reinterpret_cast<const float2*>(norm + half + i);
        x = {x.x * scale * x_norm.x, x.y * scale * x_norm.y};
        y = {y.x * scale * y_norm.x, y.y * scale * y_norm.y};
      }
      float2 u = x, w = y;
      if (!is_value) {
        u = {x.x * cos[j].x - y.x * sin[j].x, x.y * cos[j].y - y.y * sin[j].y};
        w = {y.x * cos[j].x + x.x * sin[j].x, y.y * cos[j].y + x.y * sin[j].y};
      }
      *reinterpret_cast<__nv_bfloat162*>(out + i) = __floats2bfloat162_rn(u.x, u.y);
      *reinterpret_cast<__nv_bfloat162*>(out + half + i) = __floats2bfloat162_rn(w.x, w.y);
    }
  }
}

// The same for an odd half, one element at a time.
__global__ void __launch_bounds__(32 * kWarps) RopeAppendOddKernel(const RopeAppendParams p) {
  const int heads = p.shape.heads + 2 * p.shape.kv_heads;
  const int row = blockIdx.x;
  const int head = blockIdx.y * kWarps + threadIdx.x / 32;
  WaitForPrevious();
  if (head >= heads) return;
  const int lane = threadIdx.x % 32;
  const int dim = p.shape.head_dim;
  const int half = dim / 2;
  const float* x = p.qkv + (int64_t{row} * heads + head) * dim;
  const int position = p.rows.positions[row];
  const bool is_query = head < p.shape.heads;
  const bool is_value = head >= p.shape.heads + p.shape.kv_heads;
  __nv_bfloat16* out;
  if (is_query) {
    out = p.q + (int64_t{row} * p.shape.heads + head) * dim;
  } else {
    const int64_t page =
        p.rows.pages[p.rows.page_begin[p.rows.sequences[row]] + position / kKvPageTokens];
    const int kv_head = head - p.shape.heads - (is_value ? p.shape.kv_heads : 0);
    out = (is_value ? p.cache.v : p.cache.k) +
          ((page * p.shape.kv_heads + kv_head) * kKvPageTokens + position % kKvPageTokens) * dim;
  }
  const float* norm = is_value ? nullptr : is_query ? p.q_norm : p.k_norm;
  float scale = 1.0f;
  if (norm != nullptr) {
    float squares = 0.0f;
    for (int i = lane; i < dim; i += 32) squares += x[i] * x[i];
    scale = rsqrtf(WarpSum(squares) / static_cast<float>(dim) + p.eps);
  }
  for (int i = lane; i < half; i += 32) {
    const float a = norm == nullptr ? x[i] : x[i] * scale * norm[i];
    const float b = norm == nullptr ? x[i + half] : x[i + half] * scale * norm[i + half];
    const float cos = is_value ? 1.0f : p.cos[int64_t{position} * half + i];
    const float sin = is_value ? 0.0f : p.sin[int64_t{position} * half + i];
    out[i] = __float2bfloat16_rn(a * cos - b * sin);
    out[i + half] = __float2bfloat16_rn(b * cos + a * sin);
  }
}

cudaError_t Launch(void (*kernel)(RopeAppendParams), const RopeAppendParams& params, int heads,
                   cudaStream_t stream) {
  const int all = params.shape.heads + 2 * params.shape.kv_heads;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(params.rows.rows, (all + kWarps * heads - 1) / (kWarps * heads));
  config.blockDim = 32 * kWarps;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace

cudaError_t RopeAppend(const RopeAppendParams& params, cudaStream_t stream) {
  const AttentionShape& shape = params.shape;
  if (params.rows.rows <= 0 || shape.kv_heads <= 0 || shape.heads <= 0 ||
      shape.heads % shape.kv_heads != 0 || shape.head_dim <= 0 || shape.head_dim % 2 != 0 ||
      shape.head_dim > 256) {
    return cudaErrorInvalidValue;
  }
  if (shape.head_dim % 4 != 0) return Launch(RopeAppendOddKernel, params, 1, stream);
  // With many rows, heads share the row's angles and addresses.
  const bool is_narrow = shape.head_dim <= 128;
  if (params.rows.rows < 64) {
    return Launch(is_narrow ? RopeAppendKernel<1, 1> : RopeAppendKernel<2, 1>, params, 1, stream);
  }
  return Launch(is_narrow ? RopeAppendKernel<1, 4> : RopeAppendKernel<2, 4>, params, 4, stream);
}

}  // namespace dorad::kernels
