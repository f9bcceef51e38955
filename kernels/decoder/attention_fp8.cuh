// Keys and values in eight bits: a head of a position is e4m3 codes and a scale, a power of two.
// Code times scale is a bf16 number, exactly, so that attention over such a cache has the bits of
// attention over the bf16 numbers that it stands for.
//
// Of each 16 elements the codes lie in pairs (i, i + 8): so a word of four positions or of four
// codes, as ldmatrix has it, gives the operands of mma.m16n8k16 by its even and its odd bytes.
//
// A scale is kept as the bf16 factor scale · 2^120, which also moves the exponent of a code, whose
// bits are put in place of a bf16's, from e4m3's bias to that of bf16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <climits>
#include <cstdint>

#include "kernels/decoder/attention_rotary.cuh"

namespace dorad::kernels {

// Exponents of scales. Elements beyond 448 · 2^7 become that.
inline constexpr int kLeastScale = -100, kMostScale = 7;

// The exponent of a head's scale: the least whose codes, at most 448, reach its elements. The whole
// warp; NaN and infinity give INT_MAX.
template <int kPairs>
__device__ inline int HeadScale(const HeadPairs<kPairs>& x) {
  // The bits of absolute values are in their order, those of NaN last.
  int most = 0;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    for (const float value : {x.low[j].x, x.low[j].y, x.high[j].x, x.high[j].y}) {
      most = max(most, static_cast<int>(__float_as_uint(value) & 0x7FFFFFFF));
    }
  }
  most = __reduce_max_sync(0xFFFFFFFF, most);
  if (most >= 0x7F800000) return INT_MAX;
  // 448 = 1.75 · 2^8.
  const int exponent = (most >> 23) - 127 - 8 + ((most & 0x7FFFFF) > 0x600000 ? 1 : 0);
  return min(max(exponent, kLeastScale), kMostScale);
}

__device__ inline __nv_bfloat16 ScaleFactor(int scale) {
  return scale == INT_MAX ? __ushort_as_bfloat16(0x7FC0)
                          : __ushort_as_bfloat16(static_cast<uint16_t>((127 + 120 + scale) << 7));
}

// Stores a head's codes. `at` returns the address of the 16 of the elements from i on, i a multiple
// of 16; half a multiple of 16. The whole warp.
template <int kPairs, typename At>
__device__ inline void StoreCodes(const HeadPairs<kPairs>& x, int scale, int half, At at) {
  const float inverse =
      scale == INT_MAX ? 0.0f : __uint_as_float(static_cast<uint32_t>(127 - scale) << 23);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool is_upper = (lane & 4) != 0;  // of 16: its elements are 8 further than its partner's
  const auto store = [&](float2 pair, int i, bool is_in) {
    const float2 scaled = {__fmul_rn(pair.x, inverse), __fmul_rn(pair.y, inverse)};
    const uint32_t own = __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, own, 4);
    if (!is_in) return;
    const uint32_t codes =
        is_upper ? (other >> 8 & 0xFF) | (own & 0xFF00) : (own & 0xFF) | (other & 0xFF) << 8;
    auto* const to = reinterpret_cast<uint16_t*>(at(i / 16 * 16));
    to[lane % 4 * 2 + (is_upper ? 1 : 0)] = static_cast<uint16_t>(codes);
  };
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int i = 2 * (lane + 32 * j);
    store(x.low[j], i, i < half);
    store(x.high[j], half + i, i < half);
  }
}

// Pairs of bf16 from the even and from the odd bytes of four codes, times a pair of factors.
__device__ inline uint32_t TimesFactors(uint32_t pair, uint32_t factors) {
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair),
                                         *reinterpret_cast<const __nv_bfloat162*>(&factors));
  return *reinterpret_cast<const uint32_t*>(&product);
}
__device__ inline uint32_t EvenElements(uint32_t codes, uint32_t factors) {
  return TimesFactors((codes << 8 & 0x80008000) | (codes << 4 & 0x07F007F0), factors);
}
__device__ inline uint32_t OddElements(uint32_t codes, uint32_t factors) {
  return TimesFactors((codes & 0x80008000) | (codes >> 4 & 0x07F007F0), factors);
}

}  // namespace dorad::kernels
