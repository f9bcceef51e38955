// A row's request in a call, and the addresses of its results. Internal to kernels/sampling.
#pragma once

#include <cstdint>

#include "kernels/sampling/launch.h"
#include "kernels/sampling/noise.cuh"
#include "kernels/sampling/row.cuh"

namespace dorad::kernels {

// A row's request, for sampling and scoring.
struct Wanted {
  Noise noise;
  int32_t target = -1;
  float temperature, top_p = 1.0f, min_p = 0.0f;
  float raw_temperature = 1.0f;
  int32_t top_k = 0, top_logprobs;
  const int32_t* banned = nullptr;
  const int32_t* chosen;
  float* chosen_logprobs;
  int32_t num_banned = 0, num_chosen;
  bool score, greedy = false, truncated = false;
  // Log-probabilities of the row's own logits at raw_temperature, or of what was sampled from.
  bool raw = false, processed = false;
  bool logprobs;
  bool plain;
  bool needs_list;

  __device__ bool Draws() const { return !score && !greedy; }
  // Top-p of all candidates, for which their sum of weights must be known.
  __device__ bool MassOfAll() const { return truncated && top_p < 1.0f && top_k == 0; }
  // A list of the first candidates of the distribution that is sampled from.
  __device__ bool ListsProcessed() const { return top_logprobs > 0 && !greedy && !raw; }

  __device__ Wanted(const Launch& p, int index) {
    int32_t chosen_begin;
    if (p.samples != nullptr) {
      // All of it at once: loads that depend on each other's values take a microsecond each.
      const SampleRowSpec spec = p.samples[index];
      plain = IsPlain(spec);
      needs_list = NeedsList(spec, p.vocabulary);
      score = false;
      noise = {spec.seed, spec.position, spec.sample_index};
      greedy = spec.temperature == 0.0f;
      temperature = greedy ? 1.0f : spec.temperature;
      top_p = spec.top_p;
      min_p = fminf(spec.min_p, 1.0f);
      top_k = spec.top_k > 0 && spec.top_k < p.vocabulary ? spec.top_k : 0;
      truncated = IsTruncated(spec, p.vocabulary);
      const bool scaled = spec.logprob_mode == LogprobMode::kScaled;
      if (scaled) raw_temperature = temperature;
      raw = scaled || spec.logprob_mode == LogprobMode::kRaw;
      processed = spec.logprob_mode == LogprobMode::kProcessed;
      logprobs = raw || processed;
      top_logprobs = logprobs ? spec.top_logprobs : 0;
      banned = p.banned + spec.banned_begin;
      num_banned = spec.banned_count;
      chosen_begin = spec.chosen_begin;
      num_chosen = logprobs ? spec.chosen_count : 0;
    } else {
      const ScoreRowSpec spec = p.scores[index];
      plain = true;
      needs_list = NeedsList(spec);
      score = logprobs = true;
      target = spec.target < p.vocabulary ? spec.target : -1;
      temperature = spec.temperature;
      top_logprobs = spec.top_logprobs;
      chosen_begin = spec.chosen_begin;
      num_chosen = spec.chosen_count;
    }
    top_logprobs = min(top_logprobs, p.max_top);
    chosen = p.chosen_ids + chosen_begin;
    chosen_logprobs = p.out.chosen_logprobs + chosen_begin;
  }
};

// The addresses of a row's results.
struct Target {
  int32_t* token;
  float* logprob;
  uint8_t* finite;
  int32_t* top_ids;
  float* top_logprobs;

  __device__ Target(const SampleOutputs& out, int index, int max_top)
      : token(out.tokens + index),
        logprob(out.logprobs + index),
        finite(out.finite + index),
        top_ids(out.top_ids + static_cast<int64_t>(index) * max_top),
        top_logprobs(out.top_logprobs + static_cast<int64_t>(index) * max_top) {}
};

// For the first block.
__device__ inline void WriteUnusable(const Wanted& wanted, const Target& to) {
  if (threadIdx.x == 0) {
    *to.token = wanted.score ? wanted.target : -1;
    *to.logprob = NotANumber();
    *to.finite = 0;
  }
  for (int i = threadIdx.x; i < wanted.top_logprobs; i += blockDim.x) {
    to.top_ids[i] = -1;
    to.top_logprobs[i] = NotANumber();
  }
  for (int i = threadIdx.x; i < wanted.num_chosen; i += blockDim.x) {
    wanted.chosen_logprobs[i] = NotANumber();
  }
}

__device__ inline float LogProb(float z, float maximum, double log_total) {
  return static_cast<float>(static_cast<double>(z) - static_cast<double>(maximum) - log_total);
}

// Top entries from the sorted list. Missing entries, and logits of -inf that are no candidates,
// have id -1 and -inf. For the first block.
template <typename Place>
__device__ inline void WriteTop(const Row<Place>& row, const Wanted& wanted, const Target& to,
                                int present, float maximum, double log_total,
                                bool keep_impossible) {
  for (int i = threadIdx.x; i < wanted.top_logprobs; i += blockDim.x) {
    const float z = i < present ? ValueOf(Shared<Place>()->list[i]) : -Infinity();
    const bool written = i < present && (keep_impossible || z > -Infinity());
    to.top_ids[i] = written ? IdOf(Shared<Place>()->list[i]) : -1;
    to.top_logprobs[i] = LogProb(z, maximum, log_total);
  }
}

}  // namespace dorad::kernels
