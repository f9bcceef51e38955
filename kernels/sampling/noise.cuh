// The noise of draws, number by number that of the CPU: server/backends/cpu/ops/noise.h explains
// it. Internal to kernels/sampling.
#pragma once

#include <cstdint>

#include "kernels/sampling/numbers.cuh"

namespace dorad::kernels {

// A position of a sample.
struct Noise {
  uint64_t seed = 0;
  uint64_t position = 0;
  uint32_t sample_index = 0;
};

constexpr int kGroupSize = 32;
constexpr uint32_t kGroups = 0;  // kinds of numbers
constexpr uint32_t kMembers = 1u << 30;
constexpr uint32_t kLowGroups = 2u << 30;
constexpr uint32_t kLowMembers = 3u << 30;

__device__ inline int GroupOf(int32_t id) { return id / 1024 * 32 + id % 64 / 2; }
__device__ inline int MemberOf(int32_t id) { return id % 1024 / 64 * 2 + id % 2; }
__device__ inline int32_t IdOfMember(int group, int member) {
  return group / 32 * 1024 + member / 2 * 64 + group % 32 * 2 + member % 2;
}

// Philox4x32-10 (Salmon et al., SC 2011).
__device__ inline uint4 NoiseWords(const Noise& noise, uint32_t index) {
  uint32_t c0 = static_cast<uint32_t>(noise.position);
  uint32_t c1 = static_cast<uint32_t>(noise.position >> 32);
  uint32_t c2 = noise.sample_index;
  uint32_t c3 = index;
  uint32_t k0 = static_cast<uint32_t>(noise.seed);
  uint32_t k1 = static_cast<uint32_t>(noise.seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c0;
    const uint64_t b = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {c0, c1, c2, c3};
}
__device__ inline uint32_t WordAt(const uint4& words, int i) {
  const uint32_t low = i % 2 == 0 ? words.x : words.y;
  const uint32_t high = i % 2 == 0 ? words.z : words.w;
  return i < 2 ? low : high;
}
__device__ inline uint32_t NoiseWord(const Noise& noise, uint32_t kind, int at) {
  return WordAt(NoiseWords(noise, kind | static_cast<uint32_t>(at / 4)), at % 4);
}

// Lower bounds of E, up to rounding.
__device__ inline float LeastOfGroup(uint32_t word) {
  return static_cast<float>(word >> 5) * 0x1p-32f;
}
__device__ inline float LeastOfMember(uint32_t group_word, uint32_t word, int member) {
  return static_cast<int>(group_word % kGroupSize) == member ? 0.0f
                                                             : static_cast<float>(word) * 0x1p-32f;
}

// The CPU's logarithms: each step is rounded, none fused.
__device__ inline double LogRatio(double s) {
  const double q = __dmul_rn(s, s);
  double p = 1.0 / 19;
  p = __dadd_rn(__dmul_rn(p, q), 1.0 / 17);
  p = __dadd_rn(__dmul_rn(p, q), 1.0 / 15);
  p = __dadd_rn(__dmul_rn(p, q), 1.0 / 13);
  p = __dadd_rn(__dmul_rn(p, q), 1.0 / 11);
  p = __dadd_rn(__dmul_rn(p, q), 1.0 / 9);
  p = __dadd_rn(__dmul_rn(p, q), 1.0 / 7);
  p = __dadd_rn(__dmul_rn(p, q), 1.0 / 5);
  p = __dadd_rn(__dmul_rn(p, q), 1.0 / 3);
  return __dmul_rn(2.0, __dadd_rn(s, __dmul_rn(s, __dmul_rn(q, p))));
}
__device__ inline double Log(double x) {
  const int64_t bits = __double_as_longlong(x);
  const int64_t n = (bits - 0x3FE6A09E00000000) >> 52;
  const double f = __longlong_as_double(bits - n * (int64_t{1} << 52));
  const double ratio = LogRatio(__ddiv_rn(__dsub_rn(f, 1.0), __dadd_rn(f, 1.0)));
  return __dadd_rn(__dmul_rn(__ll2double_rn(n), 0x1.62E42FEFA39EFp-1), ratio);
}
__device__ inline double ExponentialOf(uint64_t n) {
  const auto odd = static_cast<int64_t>(2 * n + 1);
  const double v = __dmul_rn(__ll2double_rn(odd), 0x1p-60);
  if (v < 0.25) return LogRatio(__ddiv_rn(v, __dsub_rn(2.0, v)));
  return -Log(__dmul_rn(__ll2double_rn((int64_t{1} << 60) - odd), 0x1p-60));
}

// A candidate of a draw as one number: its key, then the smaller id. The largest wins; 0: none.
constexpr int kDrawnIdBits = 20;
__device__ inline int32_t DrawnId(Ranked drawn) {
  constexpr uint32_t kMask = (1u << kDrawnIdBits) - 1;
  return static_cast<int32_t>(~static_cast<uint32_t>(drawn) & kMask);
}
// distance + g.
__device__ inline double DrawnValue(Ranked drawn) {
  return static_cast<double>(drawn >> kDrawnIdBits) * 0x1p-37 - 64.0;
}
// distance: the logit less the largest. Of the high words of the id's group and of itself.
__device__ __noinline__ inline Ranked Drawn(const Noise noise, int32_t id, double distance,
                                            uint32_t group_word, uint32_t word) {
  const int group = GroupOf(id);
  const int member = MemberOf(id);
  const uint64_t high = group_word >> 5;
  double number = ExponentialOf(high << 32 | NoiseWord(noise, kLowGroups, group)) * 0x1p-5;
  if (static_cast<int>(group_word % kGroupSize) != member) {
    const uint32_t low = NoiseWord(noise, kLowMembers, kGroupSize * group + member);
    number = __dadd_rn(number, ExponentialOf((static_cast<uint64_t>(word) << 32 | low) >> 5));
  }
  const double key = __dmul_rn(__dadd_rn(__dsub_rn(distance, Log(number)), 64.0), 0x1p37);
  const Ranked units = __double2ull_rz(fmax(key, 0.0));
  return units << kDrawnIdBits | ((1u << kDrawnIdBits) - 1 - static_cast<uint32_t>(id));
}

}  // namespace dorad::kernels
