// Philox4x32-10, the counter-based random generator of Salmon et al. (SC 2011): a pure function, so
// a draw depends on its key and counter only. Thread-safe.
#pragma once

#include <array>
#include <cstdint>

namespace dorad::ops {

using PhiloxWords = std::array<uint32_t, 4>;

constexpr PhiloxWords Philox4x32(PhiloxWords counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key = {key[0] + 0x9E3779B9, key[1] + 0xBB67AE85};
  }
  return counter;
}

// Uniform in [0, 1), a multiple of 2^-53. The counter is (position, sample_index, 0).
constexpr double UniformDraw(uint64_t seed, uint32_t sample_index, uint64_t position) {
  const PhiloxWords words = Philox4x32(
      {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), sample_index, 0},
      {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t bits = uint64_t{words[0]} << 32 | words[1];
  return static_cast<double>(bits >> 11) * 0x1.0p-53;
}

}  // namespace dorad::ops
