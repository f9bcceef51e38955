// Times the sampling of one row on one thread of the CPU, in microseconds, of rows that are in the
// second-level cache or not far from it.
//
//   sampling_bench [vocabulary, default 151936]
#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "server/backends/cpu/ops/sampling.h"
#include "server/backends/cpu/simd/kernels.h"

namespace {

using dorad::ops::LogprobMode;
using dorad::ops::SampleSpec;

struct Setting {
  const char* name;
  float temperature, top_p, min_p;
  int top_k;
  LogprobMode mode;
};

const Setting kSettings[] = {
    {"greedy", 0.0f, 1.0f, 0.0f, 0, LogprobMode::kNone},
    {"plain", 1.0f, 1.0f, 0.0f, 0, LogprobMode::kNone},
    {"plain, raw", 1.0f, 1.0f, 0.0f, 0, LogprobMode::kRaw},
    {"t 0.7, raw", 0.7f, 1.0f, 0.0f, 0, LogprobMode::kRaw},
    {"t 0.7, processed", 0.7f, 1.0f, 0.0f, 0, LogprobMode::kProcessed},
    {"k 50 p .95", 1.0f, 0.95f, 0.0f, 50, LogprobMode::kNone},
    {"p .95", 1.0f, 0.95f, 0.0f, 0, LogprobMode::kNone},
    {"min_p .05", 1.0f, 1.0f, 0.05f, 0, LogprobMode::kNone},
};

// The best of many draws: other work on the machine only ever adds time.
double Microseconds(const at::Tensor& rows, const Setting& s) {
  using Clock = std::chrono::steady_clock;
  double best = 1e30;
  const auto begin = Clock::now();
  for (uint64_t i = 0; Clock::now() - begin < std::chrono::milliseconds(500); ++i) {
    SampleSpec spec;
    spec.temperature = s.temperature;
    spec.top_k = s.top_k;
    spec.top_p = s.top_p;
    spec.min_p = s.min_p;
    spec.logprob_mode = s.mode;
    const at::Tensor row = rows.slice(0, static_cast<int64_t>(i) % rows.size(0),
                                      static_cast<int64_t>(i) % rows.size(0) + 1);
    double sum = 0.0;
    constexpr int kDraws = 4;  // of different noise: some need more work than others
    for (int draw = 0; draw < kDraws; ++draw) {
      spec.position = i * kDraws + static_cast<uint64_t>(draw);
      const auto start = Clock::now();
      if (dorad::ops::Sample(row, {&spec, 1})[0].token < 0) std::abort();
      sum += std::chrono::duration<double, std::micro>(Clock::now() - start).count();
    }
    best = std::min(best, sum / kDraws);
  }
  return best;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t vocabulary = argc > 1 ? std::atoll(argv[1]) : 151936;
  at::manual_seed(1);
  // As in kernels_sampling_bench: a few dozen likely tokens, or hardly any opinion.
  const at::Tensor flat = at::randn({4, vocabulary});
  at::Tensor peaked = flat * 1.5;
  for (int64_t row = 0; row < 4; ++row) {
    for (int64_t i = 0; i < 40; ++i) peaked[row][(i * 7919 + row) % vocabulary] = 18.0 - 0.3 * i;
  }
  std::printf("%-20s", "us");
  for (const auto* kernels : dorad::ops::cpu::SupportedKernels()) {
    std::printf("%12s        flat", kernels->name);
  }
  std::printf("\n");
  for (const Setting& s : kSettings) {
    std::printf("%-20s", s.name);
    for (const auto* kernels : dorad::ops::cpu::SupportedKernels()) {
      dorad::ops::cpu::SetActiveKernels(*kernels);
      std::printf("%12.1f%12.1f", Microseconds(peaked, s), Microseconds(flat, s));
    }
    std::printf("\n");
  }
  return 0;
}
