// Norms of query and key, rotary embedding, and the append to the cache.
#include "kernels/decoder/attention.h"
#include "kernels/decoder/attention_device.cuh"
#include "kernels/decoder/attention_fp8.cuh"
#include "kernels/decoder/attention_layout.h"
#include "kernels/decoder/attention_rotary.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/launch.h"

namespace dorad::kernels {
namespace {

constexpr int kWarps = 4;

// One warp for kHeads heads of a row in succession: query heads, then key heads, then value heads.
// The head's half is even and at most 64 · kPairs.
template <int kPairs, int kHeads, bool kByAxes>
__global__ void __launch_bounds__(32 * kWarps) RopeAppendKernel(const RopeAppendParams p) {
  using Head = HeadPairs<kPairs>;
  const int heads = p.shape.heads + 2 * p.shape.kv_heads;
  const int row = blockIdx.x;
  const int first = (blockIdx.y * kWarps + threadIdx.x / 32) * kHeads;
  const int dim = p.shape.head_dim;
  const int half = dim / 2;
  LaunchDependents();
  const int position = p.rows.positions[row];
  const int sequence = p.rows.sequences[row];
  const int64_t page = p.rows.pages[p.rows.page_begin[sequence] + position / kKvPageTokens];
  const Head angles = IsPartial(p) ? LoadPartAngles<kPairs, kByAxes>(p, row, position)
                                   : LoadAngles<kPairs, kByAxes>(p, row, position, half);
  WaitForPrevious();
  Head x[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (first + h < heads) {
      x[h] = LoadHead<kPairs>(HeadAt(p, row, first + h), half);
    }
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const int head = first + h;
    if (head >= heads) return;
    const bool is_query = head < p.shape.heads;
    const bool is_value = head >= p.shape.heads + p.shape.kv_heads;
    const float* const norm = is_value ? nullptr : is_query ? p.q_norm : p.k_norm;
    if (norm != nullptr) {
      NormHead<kPairs>(x[h], LoadHead<kPairs>(norm, norm + half, half), half, p.eps);
    }
    if (!is_value && IsPartial(p)) {
      RotatePart<kPairs>(x[h], angles, p.width);
    } else if (!is_value) {
      RotateHead<kPairs>(x[h], angles);
    }
    if (is_query) {
      __nv_bfloat16* const q = p.q + (int64_t{row} * p.shape.heads + head) * dim;
      StoreHead<kPairs>(x[h], half, [q](int i) { return q + i; });
      continue;
    }
    const int kv_head = head - p.shape.heads - (is_value ? p.shape.kv_heads : 0);
    const int64_t at =
        ((page * p.shape.kv_heads + kv_head) * kKvPageTokens + position % kKvPageTokens) * dim;
    __nv_bfloat16* const cache = is_value ? p.cache.v : p.cache.k;
    if (p.cache.factors == nullptr) {
      StoreHead<kPairs>(x[h], half, [to = cache + at](int i) { return to + i; });
      continue;
    }
    const int scale = HeadScale<kPairs>(x[h]);
    StoreCodes<kPairs>(x[h], scale, half, [to = cache + at / 2](int i) { return to + i / 2; });
    if (threadIdx.x % 32 == 0) {
      p.cache.factors[FactorsAt(page, p.shape.kv_heads, kv_head, is_value ? 1 : 0, dim) +
                      position % kKvPageTokens] = ScaleFactor(scale);
    }
  }
}

// The same for any half and part, one element at a time.
__global__ void __launch_bounds__(32 * kWarps) RopeAppendAnyKernel(const RopeAppendParams p) {
  const int heads = p.shape.heads + 2 * p.shape.kv_heads;
  const int row = blockIdx.x;
  const int head = blockIdx.y * kWarps + threadIdx.x / 32;
  LaunchDependents();
  WaitForPrevious();
  if (head >= heads) return;
  const int lane = threadIdx.x % 32;
  const int dim = p.shape.head_dim;
  const int width = p.width == 0 ? dim : p.width;
  const int half = width / 2;
  const __nv_bfloat16* const x = HeadAt(p, row, head);
  const auto at = [x](int i) { return __bfloat162float(x[i]); };
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
    for (int i = lane; i < dim; i += 32) squares += at(i) * at(i);
    for (int offset = 16; offset > 0; offset /= 2) {
      squares += __shfl_xor_sync(0xFFFFFFFF, squares, offset);
    }
    scale = rsqrtf(squares / static_cast<float>(dim) + p.eps);
  }
  const auto normed = [&](int i) { return norm == nullptr ? at(i) : at(i) * scale * norm[i]; };
  for (int i = lane; i < dim; i += 32) {
    float y = normed(i);
    if (!is_value && i < width) {
      const int angle = i < half ? i : i - half;
      int turned = position;
      if (p.rows.rotary != nullptr) {
        turned = p.rows.rotary[3 * row + (p.axes == nullptr ? 0 : p.axes[angle])];
      }
      const float cos = p.cos[int64_t{turned} * half + angle];
      const float sin = p.sin[int64_t{turned} * half + angle];
      y = i < half ? y * cos - normed(i + half) * sin : y * cos + normed(i - half) * sin;
    }
    out[i] = __float2bfloat16_rn(y);
  }
}

cudaError_t Launch(void (*kernel)(RopeAppendParams), const RopeAppendParams& params, int heads,
                   cudaStream_t stream) {
  const int all = params.shape.heads + 2 * params.shape.kv_heads;
  const dim3 grid(params.rows.rows, (all + kWarps * heads - 1) / (kWarps * heads));
  return LaunchEarly(kernel, grid, 32 * kWarps, 0, stream, params);
}

template <int kPairs, bool kByAxes>
cudaError_t LaunchEven(const RopeAppendParams& params, cudaStream_t stream) {
  // With many rows, heads share the row's angles and addresses.
  if (params.rows.rows < 64) {
    return Launch(RopeAppendKernel<kPairs, 1, kByAxes>, params, 1, stream);
  }
  return Launch(RopeAppendKernel<kPairs, 4, kByAxes>, params, 4, stream);
}

}  // namespace

cudaError_t RopeAppend(const RopeAppendParams& params, cudaStream_t stream) {
  const AttentionShape& shape = params.shape;
  if (params.rows.rows <= 0 || shape.kv_heads <= 0 || shape.heads <= 0 ||
      shape.heads % shape.kv_heads != 0 || shape.head_dim <= 0 || shape.head_dim % 2 != 0 ||
      shape.head_dim > 256) {
    return cudaErrorInvalidValue;
  }
  if (params.width % 2 != 0 || params.width < 0 || params.width > shape.head_dim) {
    return cudaErrorInvalidValue;
  }
  const bool is_any = shape.head_dim % 4 != 0 || (IsPartial(params) && !TurnsByPairs(params));
  if (params.cache.factors != nullptr && (is_any || !HasTileAttention(shape.head_dim))) {
    return cudaErrorInvalidValue;
  }
  if (is_any) {
    return Launch(RopeAppendAnyKernel, params, 1, stream);
  }
  const bool by_axes = params.rows.rotary != nullptr && params.axes != nullptr;
  if (shape.head_dim <= 128) {
    return by_axes ? LaunchEven<1, true>(params, stream) : LaunchEven<1, false>(params, stream);
  }
  return by_axes ? LaunchEven<2, true>(params, stream) : LaunchEven<2, false>(params, stream);
}

}  // namespace dorad::kernels
