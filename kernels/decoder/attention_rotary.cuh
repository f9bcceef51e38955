// One head's norm and rotary embedding by one warp, with the same arithmetic in every kernel: every
// operation is written out, so that the compiler cannot change results between kernels.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/decoder/attention.h"

namespace dorad::kernels {

// Of a head of 2 · half elements, half even and at most 64 · kPairs, a lane has the pairs
// (i, i + 1) of both halves for i = 2 (lane + 32 j).
template <int kPairs>
struct HeadPairs {
  float2 low[kPairs];   // at i
  float2 high[kPairs];  // at half + i
};

// Fills with zeros where the head ends. `head`: 4-byte aligned.
template <int kPairs>
__device__ inline HeadPairs<kPairs> LoadHead(const __nv_bfloat16* head, int half) {
  HeadPairs<kPairs> x;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int i = 2 * (threadIdx.x % 32 + 32 * j);
    x.low[j] = x.high[j] = make_float2(0.0f, 0.0f);
    if (i >= half) continue;
    x.low[j] = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(head + i));
    x.high[j] = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(head + half + i));
  }
  return x;
}

// The same of fp32; `values`: 8-byte aligned.
template <int kPairs>
__device__ inline HeadPairs<kPairs> LoadHead(const float* low, const float* high, int half) {
  HeadPairs<kPairs> x;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int i = 2 * (threadIdx.x % 32 + 32 * j);
    x.low[j] = x.high[j] = make_float2(0.0f, 0.0f);
    if (i >= half) continue;
    x.low[j] = *reinterpret_cast<const float2*>(low + i);
    x.high[j] = *reinterpret_cast<const float2*>(high + i);
  }
  return x;
}

// Where a head of a row begins in qkv: query heads, then key heads, then value heads.
__device__ inline const __nv_bfloat16* HeadAt(const RopeAppendParams& p, int row, int head) {
  const int queries = p.shape.heads;
  const int gates = p.has_gates ? queries : 0;
  const int at = head + (head < queries && p.has_gates ? head : gates);
  return p.qkv + (int64_t{row} * (queries + gates + 2 * p.shape.kv_heads) + at) * p.shape.head_dim;
}

// Cosines (low) and sines (high) of a row whose position in its sequence is `position`. kByAxes:
// RopeAppendParams::axes is there.
template <int kPairs, bool kByAxes = false>
__device__ inline HeadPairs<kPairs> LoadAngles(const RopeAppendParams& p, int row, int position,
                                               int half) {
  const int32_t* const rotary = p.rows.rotary == nullptr ? nullptr : p.rows.rotary + 3 * row;
  if constexpr (kByAxes) {
    HeadPairs<kPairs> x;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = 2 * (threadIdx.x % 32 + 32 * j);
      x.low[j] = x.high[j] = make_float2(0.0f, 0.0f);
      if (i >= half) continue;
      const int64_t first = int64_t{rotary[p.axes[i]]} * half + i;
      const int64_t second = int64_t{rotary[p.axes[i + 1]]} * half + i + 1;
      x.low[j] = {p.cos[first], p.cos[second]};
      x.high[j] = {p.sin[first], p.sin[second]};
    }
    return x;
  }
  const int64_t at = int64_t{rotary == nullptr ? position : *rotary} * half;
  return LoadHead<kPairs>(p.cos + at, p.sin + at, half);
}

// The same for a part of the head: for each element its cosine (low) and its sine with the sign of
// its partner (high).
template <int kPairs, bool kByAxes>
__device__ inline HeadPairs<kPairs> LoadPartAngles(const RopeAppendParams& p, int row,
                                                   int position) {
  const int32_t* const rotary = p.rows.rotary == nullptr ? nullptr : p.rows.rotary + 3 * row;
  const int half = p.width / 2;
  HeadPairs<kPairs> x;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int i = 2 * (threadIdx.x % 32 + 32 * j);
    x.low[j] = x.high[j] = make_float2(0.0f, 0.0f);
    if (i >= p.width) continue;
    const int angle = i < half ? i : i - half;
    const float sign = i < half ? -1.0f : 1.0f;
    int64_t first = rotary == nullptr ? position : *rotary, second = first;
    if constexpr (kByAxes) {
      first = rotary[p.axes[angle]];
      second = rotary[p.axes[angle + 1]];
    }
    first = first * half + angle;
    second = second * half + angle + 1;
    x.low[j] = {p.cos[first], p.cos[second]};
    x.high[j] = {sign * p.sin[first], sign * p.sin[second]};
  }
  return x;
}

// x / sqrt(mean(x²) + eps) · weight.
template <int kPairs>
__device__ inline void NormHead(HeadPairs<kPairs>& x, const HeadPairs<kPairs>& weight, int half,
                                float eps) {
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    squares = __fmaf_rn(x.low[j].x, x.low[j].x, squares);
    squares = __fmaf_rn(x.low[j].y, x.low[j].y, squares);
    squares = __fmaf_rn(x.high[j].x, x.high[j].x, squares);
    squares = __fmaf_rn(x.high[j].y, x.high[j].y, squares);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    squares = __fadd_rn(squares, __shfl_xor_sync(0xFFFFFFFF, squares, offset));
  }
  const float mean = __fdiv_rn(squares, static_cast<float>(2 * half));
  const float scale = rsqrtf(__fadd_rn(mean, eps));
  const auto apply = [scale](float value, float by) {
    return __fmul_rn(__fmul_rn(value, scale), by);
  };
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    x.low[j] = {apply(x.low[j].x, weight.low[j].x), apply(x.low[j].y, weight.low[j].y)};
    x.high[j] = {apply(x.high[j].x, weight.high[j].x), apply(x.high[j].y, weight.high[j].y)};
  }
}

// Turns the pairs (low, high) by the angles of the row's position: cosines low, sines high.
template <int kPairs>
__device__ inline void RotateHead(HeadPairs<kPairs>& x, const HeadPairs<kPairs>& angles) {
  const auto first = [](float a, float b, float cos, float sin) {
    return __fmaf_rn(a, cos, -__fmul_rn(b, sin));
  };
  const auto second = [](float a, float b, float cos, float sin) {
    return __fmaf_rn(b, cos, __fmul_rn(a, sin));
  };
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const float2 a = x.low[j], b = x.high[j], cos = angles.low[j], sin = angles.high[j];
    x.low[j] = {first(a.x, b.x, cos.x, sin.x), first(a.y, b.y, cos.y, sin.y)};
    x.high[j] = {second(a.x, b.x, cos.x, sin.x), second(a.y, b.y, cos.y, sin.y)};
  }
}

// The same for the part of LoadPartAngles; `width`: its elements, a multiple of 4 and at most half
// of the head. All lanes take part.
template <int kPairs>
__device__ inline void RotatePart(HeadPairs<kPairs>& x, const HeadPairs<kPairs>& angles,
                                  int width) {
  const HeadPairs<kPairs> from = x;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int pair = threadIdx.x % 32 + 32 * j;
    const int partner = pair < width / 4 ? pair + width / 4 : pair - width / 4;
    float2 other = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const float a = __shfl_sync(0xFFFFFFFF, from.low[n].x, partner % 32);
      const float b = __shfl_sync(0xFFFFFFFF, from.low[n].y, partner % 32);
      if (partner / 32 == n) other = make_float2(a, b);
    }
    if (pair >= width / 2) continue;
    x.low[j].x = __fmaf_rn(x.low[j].x, angles.low[j].x, __fmul_rn(other.x, angles.high[j].x));
    x.low[j].y = __fmaf_rn(x.low[j].y, angles.low[j].y, __fmul_rn(other.y, angles.high[j].y));
  }
}

// Rounds to bf16. `at` returns the address of element i, i even; 4-byte aligned.
template <int kPairs, typename At>
__device__ inline void StoreHead(const HeadPairs<kPairs>& x, int half, At at) {
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int i = 2 * (threadIdx.x % 32 + 32 * j);
    if (i >= half) continue;
    *reinterpret_cast<__nv_bfloat162*>(at(i)) = __floats2bfloat162_rn(x.low[j].x, x.low[j].y);
    *reinterpret_cast<__nv_bfloat162*>(at(half + i)) =
        __floats2bfloat162_rn(x.high[j].x, x.high[j].y);
  }
}

}  // namespace dorad::kernels
