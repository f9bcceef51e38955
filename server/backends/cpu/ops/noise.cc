// Compiled without contraction: no multiply-add is fused.
#include "server/backends/cpu/ops/noise.h"

#include <algorithm>
#include <bit>

namespace dorad::ops {
namespace {

// log((1 + s) / (1 - s)) for |s| < 0.172, to 2 ulp.
double LogRatio(double s) {
  const double q = s * s;
  double p = 1.0 / 19;
  p = p * q + 1.0 / 17;
  p = p * q + 1.0 / 15;
  p = p * q + 1.0 / 13;
  p = p * q + 1.0 / 11;
  p = p * q + 1.0 / 9;
  p = p * q + 1.0 / 7;
  p = p * q + 1.0 / 5;
  p = p * q + 1.0 / 3;
  return 2.0 * (s + s * (q * p));
}

// Of a normal number above 0.
double Log(double x) {
  const auto bits = std::bit_cast<uint64_t>(x);
  // x = f 2^n with f from the root of 1/2 to that of 2.
  const int64_t n = static_cast<int64_t>(bits - 0x3FE6A09E00000000u) >> 52;
  const auto f = std::bit_cast<double>(bits - (static_cast<uint64_t>(n) << 52));
  return static_cast<double>(n) * 0x1.62E42FEFA39EFp-1 + LogRatio((f - 1.0) / (f + 1.0));
}

// -log(1 - v), v = (2 n + 1) 2^-60.
double ExponentialOf(uint64_t n) {
  const uint64_t odd = 2 * n + 1;
  const double v = static_cast<double>(static_cast<int64_t>(odd)) * 0x1p-60;
  if (v < 0.25) return LogRatio(v / (2.0 - v));
  return -Log(static_cast<double>(static_cast<int64_t>((uint64_t{1} << 60) - odd)) * 0x1p-60);
}

}  // namespace

double Noise::Exponential(int32_t id) const {
  const int64_t group = GroupOf(id);
  const int64_t member = MemberOf(id);
  const uint64_t word = GroupWord(group);
  const double least = ExponentialOf(word >> 5 << 32 | Word(kLowGroups, group)) * 0x1p-5;
  if (Champion(static_cast<uint32_t>(word)) == member) return least;
  const int64_t at = kGroupSize * group + member;
  const uint64_t number = uint64_t{Word(kMembers, at)} << 32 | Word(kLowMembers, at);
  return least + ExponentialOf(number >> 5);
}

int64_t Noise::Key(int32_t id, double distance) const {
  const double key = (distance - Log(Exponential(id)) + 64.0) * 0x1p37;
  return static_cast<int64_t>(std::max(key, 0.0));
}

}  // namespace dorad::ops
