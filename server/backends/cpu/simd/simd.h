// Vectors of the instruction set a file is compiled for: a handful of wrappers over GCC's vector
// extensions, with intrinsics where those have no word for it.
//
// Only included by variant.h. Everything lives in a namespace of its own for each instruction set,
// and no inline function of the standard library is used: otherwise the linker could pick the
// AVX-512 copy of a shared inline function for the whole program.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512BF16__)
#define DORAD_SIMD avx512bf16
#elif defined(__AVX512F__)
#define DORAD_SIMD avx512
#elif defined(__AVX2__)
#define DORAD_SIMD avx2
#else
#define DORAD_SIMD baseline
#endif

#define DORAD_INLINE static inline __attribute__((always_inline))

namespace dorad::ops::cpu::DORAD_SIMD {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif
inline constexpr int kChunk = 2 * kLanes;  // k of one chunk, see Format

typedef float VF __attribute__((vector_size(kLanes * 4)));
typedef int32_t VI __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VU __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VH __attribute__((vector_size(kLanes * 2)));
typedef double VD __attribute__((vector_size(kLanes * 8)));

DORAD_INLINE VF Splat(float x) { return x - VF{}; }
DORAD_INLINE VU SplatU(uint32_t x) { return x - VU{}; }

template <typename V>
DORAD_INLINE V LoadAs(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}
DORAD_INLINE VF Load(const float* p) { return LoadAs<VF>(p); }
DORAD_INLINE void Store(float* p, VF v) { __builtin_memcpy(p, &v, sizeof(v)); }

// First `count` < kLanes elements, the rest `fill`.
DORAD_INLINE VF LoadPartial(const float* p, int64_t count, float fill = 0.0f) {
#if defined(__AVX512F__)
  return (VF)_mm512_mask_loadu_ps((__m512)Splat(fill), static_cast<__mmask16>((1u << count) - 1),
                                  p);
#else
  VF v = Splat(fill);
  __builtin_memcpy(&v, p, static_cast<size_t>(count) * 4);
  return v;
#endif
}
DORAD_INLINE void StorePartial(float* p, VF v, int64_t count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), (__m512)v);
#else
  __builtin_memcpy(p, &v, static_cast<size_t>(count) * 4);
#endif
}

// a * b + c, rounded once where the instruction set can.
DORAD_INLINE VF Fma(VF a, VF b, VF c) {
#if defined(__AVX512F__)
  return (VF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (VF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

DORAD_INLINE VF Select(VI mask, VF yes, VF no) { return mask ? yes : no; }
// A NaN in a is lost, one in b stays.
DORAD_INLINE VF Max(VF a, VF b) { return a > b ? a : b; }
DORAD_INLINE VF Min(VF a, VF b) { return a < b ? a : b; }

// 2 * kLanes consecutive bf16 as 32-bit words: even elements in the low halves.
DORAD_INLINE VU LoadWords(const uint16_t* p) { return LoadAs<VU>(p); }
DORAD_INLINE VU LoadWordsPartial(const uint16_t* p, int64_t count) {
#if defined(__AVX512F__)
  return (VU)_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << count) - 1), p);
#else
  VU v{};
  __builtin_memcpy(&v, p, static_cast<size_t>(count) * 2);
  return v;
#endif
}
DORAD_INLINE VF EvenOf(VU words) { return (VF)(words << 16); }
DORAD_INLINE VF OddOf(VU words) { return (VF)(words & SplatU(0xffff0000u)); }

// kLanes consecutive bf16 in natural order.
DORAD_INLINE VF WidenBf16(VH h) { return (VF)(__builtin_convertvector(h, VU) << 16); }
DORAD_INLINE VF LoadBf16(const uint16_t* p) { return WidenBf16(LoadAs<VH>(p)); }
DORAD_INLINE VF LoadBf16Partial(const uint16_t* p, int64_t count) {
  VH h{};
  __builtin_memcpy(&h, p, static_cast<size_t>(count) * 2);
  return WidenBf16(h);
}

// Which elements are not NaN.
DORAD_INLINE auto IsNumber(VF x) {
  return x == x;  // NOLINT(misc-redundant-expression)
}

// fp32 whose value is the nearest bf16 (ties to even). NaN stays NaN.
DORAD_INLINE VF RoundBf16(VF x) {
  const VU bits = (VU)x;
  const VU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & SplatU(0xffff0000u);
  return Select(IsNumber(x), (VF)rounded, (VF)((bits | 0x400000u) & SplatU(0xffff0000u)));
}
DORAD_INLINE VH NarrowBf16(VF rounded) { return __builtin_convertvector((VU)rounded >> 16, VH); }

#if defined(__AVX512BF16__)
DORAD_INLINE VF DotBf16(VF sum, VU a, VU b) {
  return (VF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#endif

// Lane 0, 2, 4 ... of (a, b), and lane 1, 3, 5 ...
DORAD_INLINE VF EvenLanes(VF a, VF b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#elif defined(__AVX2__)
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
#else
  return __builtin_shufflevector(a, b, 0, 2, 4, 6);
#endif
}
DORAD_INLINE VF OddLanes(VF a, VF b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX2__)
  return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  return __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

typedef float F4 __attribute__((vector_size(16)));

// The sum of lanes, always as one tree: lanes 8 apart, then 4, 2, 1. Four vectors are reduced at
// once, their sums in lane order; each sum is the same as alone.
DORAD_INLINE F4 Fold(F4 v) { return v; }
#if defined(__AVX2__)
typedef float F8 __attribute__((vector_size(32)));
DORAD_INLINE F4 Fold(F8 v) {
  return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
}
#endif
#if defined(__AVX512F__)
DORAD_INLINE F4 Fold(VF v) {
  return Fold(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
              __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
}
#endif
DORAD_INLINE F4 SumLanes4(F4 a, F4 b, F4 c, F4 d) {
  const F4 ab =
      __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
  const F4 cd =
      __builtin_shufflevector(c, d, 0, 1, 4, 5) + __builtin_shufflevector(c, d, 2, 3, 6, 7);
  return __builtin_shufflevector(ab, cd, 0, 2, 4, 6) + __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
}
#if defined(__AVX512F__)
// Same tree as Fold, with the first two levels shared by the four vectors.
DORAD_INLINE F4 SumLanes4(VF a, VF b, VF c, VF d) {
  const VF ab =
      __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
      __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  const VF cd =
      __builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
      __builtin_shufflevector(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  const VF all =
      __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
      __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  return SumLanes4(__builtin_shufflevector(all, all, 0, 1, 2, 3),
                   __builtin_shufflevector(all, all, 4, 5, 6, 7),
                   __builtin_shufflevector(all, all, 8, 9, 10, 11),
                   __builtin_shufflevector(all, all, 12, 13, 14, 15));
}
#elif defined(__AVX2__)
DORAD_INLINE F4 SumLanes4(F8 a, F8 b, F8 c, F8 d) {
  return SumLanes4(Fold(a), Fold(b), Fold(c), Fold(d));
}
#endif
DORAD_INLINE float SumLanes(VF v) {
  const F4 zero{};
  return SumLanes4(Fold(v), zero, zero, zero)[0];
}
DORAD_INLINE float MaxLanes(VF v) {
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

}  // namespace dorad::ops::cpu::DORAD_SIMD
