// The random numbers of sampling. Thread-safe.
//
// At each (seed, sample, position) every token id has a number E of its own, whatever the logits:
// independent numbers, exponential with mean 1. Drawn is the candidate with the smallest E /
// weight, in other words with the largest log weight + g, where g = -log E is Gumbel noise. A
// candidate wins with its probability, and where two distributions are close, the same one mostly
// wins in both: at a total variation of d with probability (1 - d) / (1 + d) or more.
//
// E comes in two levels, so that most ids need no random number. Ids are in *groups* of 32. The
// smallest E of a group is that of its *champion*, and is an exponential number over 32; each other
// member has that plus an exponential number of its own, which is the law of 32 independent ones. A
// group whose smallest E over its largest weight is not the smallest so far holds no winner.
//
//   chunk id / 1024; group 32 chunk + id % 64 / 2; member id % 1024 / 64 * 2 + id % 2
//
// So a group's ids are pairs 64 apart. All comes from Philox4x32-10 with the seed as key and the
// counter (position, sample, kind | index), four words of 32 bits for each index:
//
//   kGroups     index group / 4, word group % 4: bits 5 and up are the high bits of the group's
//               number, the low 5 the champion
//   kMembers    index 8 group + member / 4, word member % 4: the high bits of the member's number
//   kLow...     the same, 32 low bits
//
// Numbers have 59 bits, n, and stand for -log(1 - (n + 1/2) 2^-59): 59 bits because the smallest
// number of a large vocabulary matters most. Logarithms are computed in double, each step rounded
// as written; keys are compared as integers, ties by id. So every backend draws the same token from
// equal logits. Bias: a candidate of a probability below 2^-60 is drawn too seldom, all of them
// together in less than one of 10^12 draws; the units of keys move a probability by less than one
// part in 10^10.
#pragma once

#include <cstdint>

#include "server/backends/cpu/ops/philox.h"

namespace dorad::ops {

inline constexpr int64_t kGroupSize = 32;

constexpr int64_t GroupOf(int64_t id) { return id / 1024 * 32 + id % 64 / 2; }
constexpr int64_t MemberOf(int64_t id) { return id % 1024 / 64 * 2 + id % 2; }
constexpr int64_t IdOf(int64_t group, int64_t member) {
  return group / 32 * 1024 + member / 2 * 64 + group % 32 * 2 + member % 2;
}

class Noise {
 public:
  enum Kind : uint32_t {
    kGroups = 0,
    kMembers = 1u << 30,
    kLowGroups = 2u << 30,
    kLowMembers = 3u << 30
  };

  Noise(uint64_t seed, uint32_t sample_index, uint64_t position)
      : key_{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
        counter_{static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                 sample_index, 0} {}

  const PhiloxKey& key() const { return key_; }
  const PhiloxWords& counter() const { return counter_; }  // of kGroups, index 0

  uint32_t GroupWord(int64_t group) const { return Word(kGroups, group); }
  uint32_t MemberWord(int64_t group, int64_t member) const {
    return Word(kMembers, kGroupSize * group + member);
  }

  // The exponential number of an id.
  double Exponential(int32_t id) const;
  // What the largest of decides a draw: distance + g in units of 2^-37, from -64 on, where it is 0.
  // distance: the logit less the row's largest.
  int64_t Key(int32_t id, double distance) const;
  // distance + g of a key, rounded down.
  static double ValueOf(int64_t key) { return static_cast<double>(key) * 0x1p-37 - 64.0; }

  // Lower bounds, from a group's word and a member's: of the group's smallest number, and of the
  // difference to a member's.
  static float LeastOfGroup(uint32_t word) { return static_cast<float>(word >> 5) * 0x1p-32f; }
  static float LeastOfMember(uint32_t group_word, uint32_t word, int64_t member) {
    return Champion(group_word) == member ? 0.0f : static_cast<float>(word) * 0x1p-32f;
  }
  static int64_t Champion(uint32_t group_word) { return group_word % kGroupSize; }

 private:
  uint32_t Word(Kind kind, int64_t at) const {
    PhiloxWords counter = counter_;
    counter[3] = kind | static_cast<uint32_t>(at / 4);
    return Philox4x32(counter, key_)[at % 4];
  }

  PhiloxKey key_;
  PhiloxWords counter_;
};

}  // namespace dorad::ops
