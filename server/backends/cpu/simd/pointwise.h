// exp, norms, activations and rotation. Only included by variant.h.
//
// A value never depends on where in a row it stands: the last, partial vector goes through the same
// arithmetic as the others.
#pragma once

#include "server/backends/cpu/simd/kernels.h"
#include "server/backends/cpu/simd/simd.h"

namespace dorad::ops::cpu::DORAD_SIMD {

// e^x to 2 ulp; below -87.3 (results that would be subnormal) 0, above 88.7 +inf, NaN stays.
// x = n ln2 + r with |r| <= ln2 / 2; e^r by its Taylor polynomial of degree 7.
DORAD_INLINE VF Exp(VF x) {
  const VF magic = Splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const VF clamped = Min(Max(x, Splat(-88.0f)), Splat(89.0f));
  const VF n = Fma(clamped, Splat(1.44269504f), magic) - magic;
  VF r = Fma(n, Splat(-0.693145752f), clamped);
  r = Fma(n, Splat(-1.42860677e-6f), r);
  VF p = Splat(1.0f / 5040);
  p = Fma(p, r, Splat(1.0f / 720));
  p = Fma(p, r, Splat(1.0f / 120));
  p = Fma(p, r, Splat(1.0f / 24));
  p = Fma(p, r, Splat(1.0f / 6));
  p = Fma(p, r, Splat(0.5f));
  p = Fma(p * r, r, r) + 1.0f;
  // 2^n in two factors: n reaches 128, which has no exponent of its own.
  const VI e = __builtin_convertvector(n, VI);
  const VI half = e >> 1;
  const VF y = p * (VF)((half + 127) << 23) * (VF)((e - half + 127) << 23);
  const VF low = Select(x < Splat(-87.3f), VF{}, y);
  return Select(IsNumber(x), Select(x > Splat(88.72283f), Splat(__builtin_inff()), low), x);
}

// Loads up to kLanes elements; the rest is `fill`.
DORAD_INLINE VF LoadUpTo(const float* p, int64_t left, float fill = 0.0f) {
  return left >= kLanes ? Load(p) : LoadPartial(p, left, fill);
}
DORAD_INLINE void StoreUpTo(float* p, VF v, int64_t left) {
  left >= kLanes ? Store(p, v) : StorePartial(p, v, left);
}

static void RmsNormRow(const float* x, const float* weight, int64_t dim, float eps, float* y) {
  VF sums[4] = {};
  for (int64_t i = 0; i < dim; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      const int64_t left = dim - i - u * kLanes;
      if (left <= 0) break;
      const VF v = LoadUpTo(x + i + u * kLanes, left);
      sums[u] = Fma(v, v, sums[u]);
    }
  }
  const float sum = SumLanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
  const VF scale = Splat(1.0f / __builtin_sqrtf(sum / static_cast<float>(dim) + eps));
  for (int64_t i = 0; i < dim; i += kLanes) {
    StoreUpTo(y + i, LoadUpTo(x + i, dim - i) * scale * LoadUpTo(weight + i, dim - i), dim - i);
  }
}

static void Add(float* x, const float* y, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    StoreUpTo(x + i, LoadUpTo(x + i, count - i) + LoadUpTo(y + i, count - i), count - i);
  }
}

static void SiluMul(float* gate, const float* up, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const VF g = LoadUpTo(gate + i, count - i);
    const VF silu = g / (Exp(-g) + 1.0f);
    StoreUpTo(gate + i, silu * LoadUpTo(up + i, count - i), count - i);
  }
}

// 0.5 x (1 + tanh u) = x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x³).
static void GeluTanhMul(float* gate, const float* up, int64_t count) {
  const VF cubic = Splat(-2.0f * 0.7978845608f * 0.044715f);
  const VF linear = Splat(-2.0f * 0.7978845608f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const VF g = LoadUpTo(gate + i, count - i);
    const VF gelu = g / (Exp(g * Fma(g * g, cubic, linear)) + 1.0f);
    StoreUpTo(gate + i, gelu * LoadUpTo(up + i, count - i), count - i);
  }
}

static void EmbedRow(const void* weight, bool bf16, const float* g, int64_t dim, float* x) {
  for (int64_t i = 0; i < dim; i += kLanes) {
    const int64_t left = dim - i;
    VF w;
    if (bf16) {
      const uint16_t* p = static_cast<const uint16_t*>(weight) + i;
      w = left >= kLanes ? LoadBf16(p) : LoadBf16Partial(p, left);
    } else {
      w = LoadUpTo(static_cast<const float*>(weight) + i, left);
    }
    w = w + LoadUpTo(x + i, left);
    if (g != nullptr) w = w * LoadUpTo(g + i, left);
    StoreUpTo(x + i, w, left);
  }
}

static void Rotate(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const VF c = LoadUpTo(cos + i, left);
    const VF s = LoadUpTo(sin + i, left);
    const VF a = LoadUpTo(x + i, left);
    const VF b = LoadUpTo(x + half + i, left);
    StoreUpTo(x + i, a * c - b * s, left);
    StoreUpTo(x + half + i, b * c + a * s, left);
  }
}

static void ToBf16(const float* src, int64_t count, uint16_t* dst) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t n = count - i < kLanes ? count - i : kLanes;
    const VH h = NarrowBf16(RoundBf16(LoadUpTo(src + i, n)));
    __builtin_memcpy(dst + i, &h, static_cast<size_t>(n) * 2);
  }
}

static void Scale(const float* x, int64_t count, float by, float* y) {
  for (int64_t i = 0; i < count; i += kLanes) {
    StoreUpTo(y + i, LoadUpTo(x + i, count - i) * Splat(by), count - i);
  }
}

static void Divide(const float* x, int64_t count, float minus, float by, float* z) {
  const VF d = Splat(by);
  for (int64_t i = 0; i < count; i += kLanes) {
    StoreUpTo(z + i, (LoadUpTo(x + i, count - i) - minus) / d, count - i);
  }
}

}  // namespace dorad::ops::cpu::DORAD_SIMD
