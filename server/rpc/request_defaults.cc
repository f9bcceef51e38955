#include "server/rpc/request_defaults.h"

#include <atomic>
#include <random>

#include "absl/strings/str_cat.h"

namespace dorad::rpc {
namespace {

// SplitMix64: a bijection of 64-bit numbers, so distinct counters give distinct results.
uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

uint64_t RandomStart() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

}  // namespace

std::string ChooseRequestId() {
  static std::atomic<uint64_t> next{RandomStart()};
  return absl::StrCat("r-", absl::Hex(Mix(next++), absl::kZeroPad16));
}

uint64_t ChooseSeed() {
  static std::atomic<uint64_t> next{RandomStart()};
  return Mix(next++);
}

}  // namespace dorad::rpc
