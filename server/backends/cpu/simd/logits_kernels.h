// Reductions over logits, and random numbers. Only included by variant.h.
#pragma once

#include "server/backends/cpu/simd/kernels.h"
#include "server/backends/cpu/simd/pointwise.h"
#include "server/backends/cpu/simd/simd.h"

namespace dorad::ops::cpu::DORAD_SIMD {

static LogitStats GroupMax(const float* x, int64_t count, float* maxima) {
  constexpr int kVectors = kLogitColumns / kLanes;
  const float infinity = __builtin_inff();
  VI bad{};
  VF all = Splat(-infinity);
  for (int64_t begin = 0; begin < count; begin += kLogitChunk, maxima += kChunkGroups) {
    const int64_t end = count - begin < kLogitChunk ? count : begin + kLogitChunk;
    VF columns[kVectors];
#pragma GCC unroll 16
    for (VF& column : columns) column = Splat(-infinity);
    for (int64_t i = begin; i < end; i += kLogitColumns) {
#pragma GCC unroll 16
      for (int u = 0; u < kVectors; ++u) {
        const int64_t left = end - i - u * kLanes;
        if (left <= 0) break;
        const VF v = LoadUpTo(x + i + u * kLanes, left, -infinity);
        bad |= ~(v < Splat(infinity));  // NaN or +inf
        columns[u] = Max(v, columns[u]);
      }
    }
#pragma GCC unroll 16
    for (int u = 0; u < kVectors; u += 2) {
      const VF pairs =
          Max(EvenLanes(columns[u], columns[u + 1]), OddLanes(columns[u], columns[u + 1]));
      Store(maxima + u / 2 * kLanes, pairs);
      all = Max(pairs, all);
    }
  }
  LogitStats stats;
  stats.maximum = MaxLanes(all);
  for (int i = 0; i < kLanes; ++i) stats.finite = stats.finite && bad[i] == 0;
  return stats;
}

static double SumExp(const float* x, int64_t count, float maximum, float* e) {
  // Short fp32 sums, added up in double: the error does not grow with the vocabulary.
  constexpr int64_t kBlock = 64 * kLanes;
  const VF m = Splat(maximum);
  double total = 0.0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = count - begin < kBlock ? count : begin + kBlock;
    VF sums[4] = {};
    for (int64_t i = begin; i < end; i += 4 * kLanes) {
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) {
        const int64_t at = i + u * kLanes;
        if (at >= end) break;
        const VF v = Exp(LoadUpTo(x + at, end - at, -__builtin_inff()) - m);
        if (e != nullptr) StoreUpTo(e + at, v, end - at);
        sums[u] = sums[u] + v;
      }
    }
    total += static_cast<double>(SumLanes((sums[0] + sums[1]) + (sums[2] + sums[3])));
  }
  return total;
}

// Two 64-bit lanes for four fp32 ones. Products are of the low halves.
typedef uint64_t VL __attribute__((vector_size(kLanes * 4)));

DORAD_INLINE VL SplatL(uint64_t x) { return x - VL{}; }
DORAD_INLINE VL MultiplyLow(VL a, VL b) {
#if defined(__AVX512F__)
  return (VL)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (VL)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return (VL)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}
// Lanes of a and b in turn.
DORAD_INLINE void StoreInTurn(VL a, VL b, uint32_t* to) {
#if defined(__AVX512F__)
  const VL low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  const VL high = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#elif defined(__AVX2__)
  const VL low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const VL high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#else
  const VL low = __builtin_shufflevector(a, b, 0, 2);
  const VL high = __builtin_shufflevector(a, b, 1, 3);
#endif
  __builtin_memcpy(to, &low, sizeof(low));
  __builtin_memcpy(to + kLanes, &high, sizeof(high));
}

// As ops/philox.h. A lane has one word of a call in its low half; the high half is never read.
static void Philox(const uint32_t* counter, const uint32_t* key, int64_t calls, uint32_t* words) {
  constexpr int kCalls = kLanes / 2;
  constexpr uint64_t kLow = 0xffffffffu;
  VL index = SplatL(counter[3]);
  for (int i = 0; i < kCalls; ++i) index[i] += i;
  for (int64_t call = 0; call < calls; call += kCalls, words += 4 * kCalls) {
    VL c0 = SplatL(counter[0]);
    VL c1 = SplatL(counter[1]);
    VL c2 = SplatL(counter[2]);
    VL c3 = index;
    uint32_t k0 = key[0];
    uint32_t k1 = key[1];
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const VL a = MultiplyLow(c0, SplatL(0xD2511F53));
      const VL b = MultiplyLow(c2, SplatL(0xCD9E8D57));
      c0 = (b >> 32) ^ c1 ^ SplatL(k0);
      c1 = b;
      c2 = (a >> 32) ^ c3 ^ SplatL(k1);
      c3 = a;
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    StoreInTurn((c0 & kLow) | c1 << 32, (c2 & kLow) | c3 << 32, words);
    index += kCalls;
  }
}

static void GroupBounds(const uint32_t* words, const float* maxima, int64_t groups, float maximum,
                        float* bounds) {
  const VF m = Splat(maximum);
  for (int64_t i = 0; i < groups; i += kLanes) {
    const VI number = (VI)(LoadAs<VU>(words + i) >> 5);
    const VF least = __builtin_convertvector(number, VF) * 0x1p-32f;
    // No infinity, which times 0 is none.
    Store(bounds + i, least * Min(Exp(m - Load(maxima + i)), Splat(3e38f)));
  }
}

}  // namespace dorad::ops::cpu::DORAD_SIMD
