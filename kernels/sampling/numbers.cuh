// The arithmetic of sampling, with the same results as on the CPU. Internal to kernels/sampling.
#pragma once

#include <cstdint>

namespace dorad::kernels {

__device__ inline float Infinity() { return __int_as_float(0x7F800000); }
__device__ inline float NotANumber() { return __int_as_float(0x7FC00000); }

// e^x for x <= 0, the steps of the CPU's Exp (server/backends/cpu/simd/pointwise.h) with fused
// multiply-adds: x = n ln2 + r, a polynomial of degree 7 in r, 2^n. Below -87.3 (and at -inf) 0.
__device__ inline float Exp(float x) {
  const float magic = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer
  const float shifted = __fmaf_rn(x, 1.44269504f, magic);
  const float n = __fsub_rn(shifted, magic);
  float r = __fmaf_rn(n, -0.693145752f, x);
  r = __fmaf_rn(n, -1.42860677e-6f, r);
  float p = 1.0f / 5040;
  p = __fmaf_rn(p, r, 1.0f / 720);
  p = __fmaf_rn(p, r, 1.0f / 120);
  p = __fmaf_rn(p, r, 1.0f / 24);
  p = __fmaf_rn(p, r, 1.0f / 6);
  p = __fmaf_rn(p, r, 0.5f);
  p = __fadd_rn(__fmaf_rn(__fmul_rn(p, r), r, r), 1.0f);
  // Results are normal numbers, so 2^n is an addition to the exponent; the sum with magic has n in
  // its lowest bits.
  const float y = __int_as_float(__float_as_int(p) + (__float_as_int(shifted) << 23));
  return x < -87.3f ? 0.0f : y;
}

// z = (x - maximum) / temperature, rounded as IEEE 754 says, or x at temperature 1.
struct Tempered {
  float maximum = 0.0f;  // of the row's logits
  float temperature = 1.0f;
  float inverse = 1.0f;
  bool identity = true;
  bool quick = false;

  __device__ Tempered(float row_maximum, float row_temperature)
      : maximum(row_maximum),
        temperature(row_temperature),
        inverse(1.0f / row_temperature),
        identity(row_temperature == 1.0f),
        // Within these bounds no step of Divide under- or overflows: a maximum this large has
        // neighbours at distances of 2^-95 and more.
        quick(row_temperature >= 0x1p-40f && row_temperature <= 0x1p40f &&
              fabsf(row_maximum) >= 0x1p-70f) {}

  // The quotient of the rounded reciprocal, corrected twice: after the first correction it is
  // within an ulp, and the second then rounds correctly (Markstein).
  __device__ float Divide(float a) const {
    return quick && a >= -0x1p80f ? QuickQuotient(a) : __fdiv_rn(a, temperature);
  }
  __device__ float QuickQuotient(float a) const {
    float q = __fmul_rn(a, inverse);
    q = __fmaf_rn(__fmaf_rn(-q, temperature, a), inverse, q);
    return __fmaf_rn(__fmaf_rn(-q, temperature, a), inverse, q);
  }
  // z less the largest of the row's.
  __device__ float Distance(float x) const {
    const float distance = __fsub_rn(x, maximum);
    return identity ? distance : Divide(distance);
  }
  __device__ float operator()(float x) const { return identity ? x : Distance(x); }
  // The largest of the row's results.
  __device__ float Maximum() const { return identity ? maximum : 0.0f; }
};

// Not inlined: seldom needed, and long.
__device__ __noinline__ inline float SlowQuotient(float a, float b) { return __fdiv_rn(a, b); }

// Ordered like the numbers; -0 as +0. Not for NaN.
__device__ inline uint32_t OrderedBits(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits ^ ((bits >> 31) != 0 ? 0xFFFFFFFFu : 0x80000000u);
}
__device__ inline float FromOrderedBits(uint32_t bits) {
  return __uint_as_float(bits ^ ((bits >> 31) != 0 ? 0x80000000u : 0xFFFFFFFFu));
}

// A candidate as one number: the larger, the earlier in the ranking. Never 0.
using Ranked = unsigned long long;
__device__ inline Ranked Rank(float z, int32_t id) {
  return static_cast<Ranked>(OrderedBits(z)) << 32 | ~static_cast<uint32_t>(id);
}
__device__ inline int32_t IdOf(Ranked ranked) {
  return static_cast<int32_t>(~static_cast<uint32_t>(ranked));
}
__device__ inline float ValueOf(Ranked ranked) {
  return FromOrderedBits(static_cast<uint32_t>(ranked >> 32));
}

// Bins of the distance to the maximum: 256 an octave of 1 + distance, so that likely candidates are
// in fine bins. The last bin is from 255 to infinity.
constexpr int kBins = 2048;
constexpr uint32_t kOne = 0x3F800000u;
__device__ inline int BinOf(float distance) {
  const uint32_t bin = (__float_as_uint(distance + 1.0f) - kOne) >> 15;
  return static_cast<int>(min(bin, static_cast<uint32_t>(kBins - 1)));
}
// A little less than the weight of any candidate in the bin.
__device__ inline float LeastWeight(int bin) {
  const float end = __uint_as_float(kOne + (static_cast<uint32_t>(bin + 1) << 15));
  return bin == kBins - 1 ? 0.0f : expf(1.0f - end) * (1.0f - 1e-4f);
}

// A weight in (0, 1] as an integer: sums of these do not depend on their order.
constexpr double kUnits = 0x1p45;
__device__ inline Ranked Units(float weight) {
  return __float2ull_rn(weight * static_cast<float>(kUnits));
}

}  // namespace dorad::kernels
