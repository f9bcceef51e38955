// Sampling and scoring on the GPU: microseconds a call in graph replays and the ratio to one read
// of the logits at the copy bandwidth of the same run. Rows walk through memory beyond the L2.
//
//   kernels_sampling_bench [vocabulary, default 151936] [sm90 | mma]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <vector>

#include "kernels/sampling/sampling.h"
#include "tests/bench/kernels_timing.h"

namespace {

using dorad::bench::Check;
using dorad::bench::CopyBandwidth;
using dorad::bench::MicrosecondsEach;
using dorad::kernels::LogitAdjustments;
using dorad::kernels::LogitBias;
using dorad::kernels::LogprobMode;
using dorad::kernels::SampleParams;
using dorad::kernels::SampleRowSpec;
using dorad::kernels::TokenUse;

constexpr int kPoolRows = 1024;
constexpr int kRows[] = {1, 32, 128, 256, 1024};
constexpr int kMaxTop = 20;

template <typename T>
T* Allocate(size_t count) {
  void* memory;
  Check(cudaMalloc(&memory, count * sizeof(T)));
  return static_cast<T*>(memory);
}

struct Setting {
  const char* name;
  float temperature, top_p, min_p;
  int top_k;
  LogprobMode mode;
  int top;
  int uses = 0;  // tokens that penalties count; the time includes sending them
  int biases = 0;
  int allowed = 0;
};

constexpr auto kNone = LogprobMode::kNone;
constexpr auto kRaw = LogprobMode::kRaw;
constexpr auto kProcessed = LogprobMode::kProcessed;
const Setting kSettings[] = {
    {"greedy", 0.0f, 1.0f, 0.0f, 0, kNone, 0},
    {"greedy, raw", 0.0f, 1.0f, 0.0f, 0, kRaw, 0},
    {"plain, raw", 1.0f, 1.0f, 0.0f, 0, kRaw, 0},
    {"t 0.7, raw", 0.7f, 1.0f, 0.0f, 0, kRaw, 0},
    {"t 0.7, processed", 0.7f, 1.0f, 0.0f, 0, kProcessed, 0},
    {"k 50 p .95", 1.0f, 0.95f, 0.0f, 50, kNone, 0},
    {"k 50 p .95, raw", 1.0f, 0.95f, 0.0f, 50, kRaw, 0},
    {"t 0.7 k 50 p .95, raw", 0.7f, 0.95f, 0.0f, 50, kRaw, 0},
    {"p .95", 1.0f, 0.95f, 0.0f, 0, kNone, 0},
    {"min_p .05", 1.0f, 1.0f, 0.05f, 0, kNone, 0},
    {"plain, raw, top 20", 1.0f, 1.0f, 0.0f, 0, kRaw, 20},
    {"raw, penalties of 100", 1.0f, 1.0f, 0.0f, 0, kRaw, 0, 100},
    {"raw, penalties of 1000", 1.0f, 1.0f, 0.0f, 0, kRaw, 0, 1000},
    {"raw, penalties of 4000", 1.0f, 1.0f, 0.0f, 0, kRaw, 0, 4000},
    {"raw, 300 biases", 1.0f, 1.0f, 0.0f, 0, kRaw, 0, 0, 300},
    {"raw, 100 allowed", 1.0f, 1.0f, 0.0f, 0, kRaw, 0, 0, 0, 100},
};

}  // namespace

int main(int argc, char** argv) {
  const int vocabulary = argc > 1 ? std::atoi(argv[1]) : 151936;
  cudaStream_t stream;
  Check(cudaStreamCreate(&stream));
  const size_t size = static_cast<size_t>(kPoolRows) * vocabulary;
  float* const logits = Allocate<float>(size);
  const auto specs = Allocate<SampleRowSpec>(kPoolRows);
  SampleParams p;
  p.logits = logits;
  p.specs = specs;
  p.out = {Allocate<int32_t>(kPoolRows),         Allocate<float>(kPoolRows),
           Allocate<uint8_t>(kPoolRows),         Allocate<int32_t>(kPoolRows * kMaxTop),
           Allocate<float>(kPoolRows * kMaxTop), nullptr};
  p.logits_ld = p.vocabulary = vocabulary;
  p.max_top = kMaxTop;
  p.isa = dorad::bench::IsaOf(argc > 2 ? argv[2] : "");
  Check(dorad::kernels::SampleWorkspaceBytes(p.isa, kPoolRows, vocabulary, &p.workspace_bytes));
  p.workspace = Allocate<uint8_t>(p.workspace_bytes);
  Check(cudaMemset(p.workspace, 0, p.workspace_bytes));
  // One list for all rows, except that a step sends the uses of each row.
  constexpr int kMostUses = 4096;
  constexpr int kMostRows = kPoolRows;
  const auto adjustments = Allocate<LogitAdjustments>(1);
  const auto uses = Allocate<TokenUse>(kMostRows * kMostUses);
  const auto biases = Allocate<LogitBias>(kMostUses);
  const auto allowed = Allocate<int32_t>(kMostUses);
  void* pinned;
  Check(cudaMallocHost(&pinned, kMostRows * kMostUses * sizeof(TokenUse)));
  for (int i = 0; i < kMostRows * kMostUses; ++i) {
    const int id = i % kMostUses * 7919 % vocabulary;
    static_cast<TokenUse*>(pinned)[i] = {id, 2 * TokenUse::kGenerated};
  }
  std::vector<LogitBias> some_biases;
  std::vector<int32_t> some_allowed;
  for (int i = 0; i < kMostUses; ++i) {
    some_biases.push_back({i * 7919 % vocabulary, -1.0f});
    some_allowed.push_back(std::min(i * 37, vocabulary - 1));
  }
  Check(cudaMemcpy(biases, some_biases.data(), sizeof(LogitBias) * kMostUses,
                   cudaMemcpyHostToDevice));
  Check(cudaMemcpy(allowed, some_allowed.data(), sizeof(int32_t) * kMostUses,
                   cudaMemcpyHostToDevice));
  p.adjustments = adjustments;
  p.uses = uses;
  p.biases = biases;
  p.allowed_ids = allowed;

  double copy = 0.0;
  // Two distributions: a model that has a few dozen likely tokens, and one that hardly has any
  // opinion (95 % of the probability on about half of the vocabulary).
  for (const bool flat : {false, true}) {
    constexpr int kDistinct = 16;
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0.0f, flat ? 1.0f : 1.5f);
    std::vector<float> rows(static_cast<size_t>(kDistinct) * vocabulary);
    for (float& x : rows) x = normal(random);
    for (int r = 0; r < kDistinct && !flat; ++r) {
      for (int i = 0; i < 40; ++i) {
        rows[static_cast<size_t>(r) * vocabulary + random() % vocabulary] =
            18.0f - 0.3f * static_cast<float>(i);
      }
    }
    for (size_t at = 0; at < size; at += rows.size()) {
      Check(cudaMemcpy(logits + at, rows.data(), rows.size() * sizeof(float),
                       cudaMemcpyHostToDevice));
    }
    if (!flat) {
      copy = CopyBandwidth(stream, logits, logits + size / 2, size / 2 * sizeof(float));
      std::printf("copy %.2f TB/s, vocabulary %d; us (times one read)\n", copy, vocabulary);
      std::printf("%-30s", "");
      for (int rows_of_call : kRows) std::printf("%10d rows   ", rows_of_call);
      std::printf("\n");
    }
    for (const Setting& s : kSettings) {
      if (flat && (s.top_p == 1.0f || s.top_k > 0) && s.top == 0 && s.mode != kRaw) continue;
      std::vector<SampleRowSpec> host(kPoolRows);
      for (int r = 0; r < kPoolRows; ++r) {
        host[r].seed = 5;
        host[r].position = r;
        host[r].temperature = s.temperature;
        host[r].top_p = s.top_p;
        host[r].min_p = s.min_p;
        host[r].top_k = s.top_k;
        host[r].logprob_mode = s.mode;
        host[r].top_logprobs = s.top;
        if (s.uses + s.biases + s.allowed > 0) host[r].adjustments = 0;
      }
      LogitAdjustments how;
      how.penalised = s.uses > 0;
      how.frequency_penalty = 0.1f;
      how.uses_count = s.uses;
      how.bias_count = s.biases;
      how.allowed_count = s.allowed;
      Check(cudaMemcpy(adjustments, &how, sizeof(how), cudaMemcpyHostToDevice));
      Check(cudaMemcpy(specs, host.data(), sizeof(SampleRowSpec) * kPoolRows,
                       cudaMemcpyHostToDevice));
      std::printf("%-5s %-24s", flat ? "flat" : "", s.name);
      for (const int rows_of_call : kRows) {
        const int sets = kPoolRows / rows_of_call;
        const double us = MicrosecondsEach(stream, std::clamp(sets, 16, 400), [&](int i) {
          SampleParams call = p;
          call.rows = rows_of_call;
          using dorad::kernels::SampleRows;
          call.rows_are = !IsPlain(host[0])                ? SampleRows::kOther
                          : NeedsList(host[0], vocabulary) ? SampleRows::kMixed
                                                           : SampleRows::kPlain;
          if (s.uses + s.biases + s.allowed == 0) call.adjustments = nullptr;
          if (s.uses > 0) {
            Check(cudaMemcpyAsync(uses, pinned, sizeof(TokenUse) * rows_of_call * s.uses,
                                  cudaMemcpyHostToDevice, stream));
          }
          call.logits = logits + static_cast<size_t>(i % sets) * rows_of_call * vocabulary;
          Check(dorad::kernels::Sample(call, stream));
        });
        const double bytes = 4.0 * rows_of_call * vocabulary;
        std::printf("%9.2f (%5.2f)", us, us * copy * 1e6 / bytes);
      }
      std::printf("\n");
    }
  }
  return 0;
}
