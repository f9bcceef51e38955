// The CPU's semantics of sampling, by sorting everything, and the kernel's results beside them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "kernels/sampling/sampling.h"
#include "server/backends/cpu/ops/noise.h"

namespace dorad::kernels {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One row and what is wanted of it.
struct Request {
  std::vector<float> logits;
  SampleRowSpec spec;  // ranges are filled in by Batch
  std::vector<int32_t> banned;
  std::vector<int32_t> chosen;
  bool adjusted = false;
  LogitAdjustments how;
  std::vector<int32_t> allowed;
  std::vector<LogitBias> biases;
  std::vector<TokenUse> uses;
  std::vector<ConditionalBan> conditional;
  int32_t newest = -1;  // a token; -1: none
};

struct Result {
  int32_t token = -1;
  float logprob = 0.0f;
  bool finite = true;
  std::vector<int32_t> top_ids;
  std::vector<float> top_logprobs;
  std::vector<float> chosen_logprobs;
  // Of the reference: a running sum came so close to top_p that rounding may decide.
  bool close = false;
};

// --- The CPU's semantics (server/backends/cpu/ops/sampling.cc), by sorting everything. ---

// Its exponential, and its sums of 1024 terms in the AVX-512 order.
inline float ReferenceExp(float x) {
  if (x < -87.3f) return 0.0f;
  const float magic = 12582912.0f;
  const volatile float shifted = std::fma(x, 1.44269504f, magic);
  const float n = shifted - magic;
  float r = std::fma(n, -0.693145752f, x);
  r = std::fma(n, -1.42860677e-6f, r);
  float p = 1.0f / 5040;
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f}) p = std::fma(p, r, c);
  const volatile float pr = p * r;
  const volatile float y = std::fma(pr, r, r) + 1.0f;
  return std::ldexp(y, static_cast<int>(n));
}

inline double BlockSum(const std::vector<float>& z, size_t begin, float maximum) {
  float columns[64] = {};
  for (size_t i = begin; i < std::min(begin + 1024, z.size()); ++i) {
    columns[i % 64] += ReferenceExp(z[i] - maximum);
  }
  float lanes[16];
  for (int i = 0; i < 16; ++i) {
    lanes[i] = (columns[i] + columns[i + 16]) + (columns[i + 32] + columns[i + 48]);
  }
  for (int apart : {8, 4, 2, 1}) {
    for (int i = 0; i < apart; ++i) lanes[i] += lanes[i + apart];
  }
  return lanes[0];
}

struct ReferenceRow {
  std::vector<float> z;
  std::vector<int32_t> order;
  float maximum = -kInfinity;
  double total = 0.0;
  bool usable = true;

  ReferenceRow(const std::vector<float>& logits, float temperature,
               const std::vector<int32_t>& banned)
      : z(logits) {
    float largest = -kInfinity;
    for (float x : logits) {
      if (!(x < kInfinity)) usable = false;
      largest = std::max(largest, x);
    }
    if (!(largest > -kInfinity)) usable = false;
    if (!usable) return;
    if (temperature != 1.0f) {
      for (float& x : z) {
        const volatile float distance = x - largest;
        x = distance / temperature;
      }
    }
    for (int32_t id : banned) z[id] = -kInfinity;
    maximum = *std::max_element(z.begin(), z.end());
    usable = maximum > -kInfinity;
    if (!usable) return;
    for (size_t i = 0; i < z.size(); i += 1024) {
      const auto end = z.begin() + static_cast<int64_t>(std::min(i + 1024, z.size()));
      const float chunk_max = *std::max_element(z.begin() + static_cast<int64_t>(i), end);
      if (chunk_max == -kInfinity) continue;
      total += static_cast<float>(BlockSum(z, i, chunk_max) *
                                  std::exp(static_cast<double>(chunk_max) - maximum));
    }
    order.resize(z.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return z[a] > z[b]; });
  }
  float LogProb(float value, double sum) const {
    return static_cast<float>(static_cast<double>(value) - maximum - std::log(sum));
  }
};

bool Close(double a, double b, double total) { return std::abs(a - b) < 1e-8 * total; }

inline void ReferenceFull(const ReferenceRow& row, int32_t token, const Request& request,
                          bool candidates, Result* result) {
  result->logprob = token < 0 ? kNan : row.LogProb(row.z[token], row.total);
  for (int i = 0; i < request.spec.top_logprobs; ++i) {
    const bool present =
        i < static_cast<int>(row.z.size()) && (!candidates || row.z[row.order[i]] > -kInfinity);
    result->top_ids.push_back(present ? row.order[i] : -1);
    result->top_logprobs.push_back(present ? row.LogProb(row.z[row.order[i]], row.total)
                                           : -kInfinity);
  }
  for (int32_t id : request.chosen) {
    result->chosen_logprobs.push_back(row.LogProb(row.z[id], row.total));
  }
}

// The candidate with the largest key of the noise.
inline int32_t ReferenceDraw(const ReferenceRow& row, const SampleRowSpec& spec,
                             size_t candidates) {
  const ops::Noise noise(spec.seed, spec.sample_index, spec.position);
  int64_t best = -1;
  int32_t token = -1;
  for (size_t i = 0; i < candidates; ++i) {
    const int32_t id = row.order[i];
    const int64_t key = noise.Key(id, static_cast<double>(row.z[id]) - row.maximum);
    if (key > best || (key == best && id < token)) {
      best = key;
      token = id;
    }
  }
  return token;
}

inline Result ReferenceUnusable(const Request& request, bool lists) {
  Result result;
  result.finite = false;
  result.logprob = kNan;
  if (lists) {
    result.top_ids.assign(request.spec.top_logprobs, -1);
    result.top_logprobs.assign(request.spec.top_logprobs, kNan);
    result.chosen_logprobs.assign(request.chosen.size(), kNan);
  }
  return result;
}

// The steps of server/backends/cpu/logit_adjustments.cc, each one rounded.
inline std::vector<float> AdjustedLogits(const Request& request) {
  std::vector<float> x = request.logits;
  if (!request.adjusted) return x;
  if (!request.allowed.empty()) {
    std::fill(x.begin(), x.end(), -kInfinity);
    for (const int32_t id : request.allowed) x[id] = request.logits[id];
  }
  for (const LogitBias& bias : request.biases) x[bias.id] += bias.bias;
  if (!request.how.penalised) return x;
  std::vector<uint32_t> counts(x.size());
  for (const TokenUse& use : request.uses) counts[use.id] = use.count;
  if (request.newest >= 0) counts[request.newest] += TokenUse::kGenerated;
  for (size_t id = 0; id < x.size(); ++id) {
    if (counts[id] == 0) continue;
    volatile float y = x[id];
    const float repetition = request.how.repetition_penalty;
    if (repetition != 1.0f) y = y > 0.0f ? y / repetition : y * repetition;
    if (counts[id] >= TokenUse::kGenerated) {
      const auto generated = static_cast<float>(counts[id] / TokenUse::kGenerated);
      const volatile float frequency = request.how.frequency_penalty * generated;
      y = y - frequency;
      y = y - request.how.presence_penalty;
    }
    x[id] = y;
  }
  return x;
}

inline bool AllFinite(const std::vector<float>& logits) {
  const auto is_usable = [](float x) { return x < kInfinity; };
  return std::all_of(logits.begin(), logits.end(), is_usable);
}

inline Result Reference(const Request& request) {
  const SampleRowSpec& spec = request.spec;
  const int vocabulary = static_cast<int>(request.logits.size());
  const bool greedy = spec.temperature == 0.0f;
  const bool processed = spec.logprob_mode == LogprobMode::kProcessed;
  std::vector<int32_t> banned = request.banned;
  for (const ConditionalBan& ban : request.conditional) {
    if (ban.after == request.newest) banned.push_back(ban.token);
  }
  const ReferenceRow row(AdjustedLogits(request), greedy ? 1.0f : spec.temperature, banned);
  if (!row.usable || !AllFinite(request.logits)) {
    return ReferenceUnusable(request, spec.logprob_mode != LogprobMode::kNone);
  }
  Result result;
  if (greedy) {
    result.token = row.order[0];
    if (processed) {
      for (int i = 0; i < spec.top_logprobs; ++i) {
        result.top_ids.push_back(i == 0 ? result.token : -1);
        result.top_logprobs.push_back(i == 0 ? 0.0f : -kInfinity);
      }
      for (int32_t id : request.chosen) {
        result.chosen_logprobs.push_back(id == result.token ? 0.0f : -kInfinity);
      }
    }
  } else if ((spec.top_k <= 0 || spec.top_k >= vocabulary) && spec.top_p >= 1.0f &&
             spec.min_p <= 0.0f) {
    result.token = ReferenceDraw(row, spec, row.order.size());
    if (processed) ReferenceFull(row, result.token, request, true, &result);
  } else {
    std::vector<float> weights;
    for (int32_t id : row.order) weights.push_back(ReferenceExp(row.z[id] - row.maximum));
    const bool by_count = spec.top_k > 0 && spec.top_k < vocabulary;
    size_t kept = by_count ? spec.top_k : vocabulary;
    if (spec.top_p < 1.0f) {
      double all = by_count ? 0.0 : row.total;
      if (by_count) {
        for (size_t i = 0; i < kept; ++i) all += weights[i];
      }
      const double mass = static_cast<double>(spec.top_p) * all;
      double running = 0.0;
      size_t size = 0;
      bool reached = false;
      while (size < kept && !reached) {
        running += weights[size++];
        reached = running >= mass;
        result.close = result.close || Close(running, mass, all);
      }
      kept = size;
      // Units of 2^-45 leave the last of many to rounding.
      if (kept > static_cast<size_t>(kMostListed) / 2) {
        result.close = result.close || Close(running - weights[kept - 1], mass, all);
      }
    }
    while (kept > 1 && (weights[kept - 1] < spec.min_p || weights[kept - 1] == 0.0f)) --kept;
    double total = 0.0;
    for (size_t i = 0; i < kept; ++i) total += weights[i];
    result.token = ReferenceDraw(row, spec, kept);
    if (processed) {
      result.logprob = row.LogProb(row.z[result.token], total);
      std::vector<float> logprobs(vocabulary, -kInfinity);
      for (size_t i = 0; i < kept; ++i) {
        logprobs[row.order[i]] = row.LogProb(row.z[row.order[i]], total);
      }
      for (size_t i = 0; i < static_cast<size_t>(spec.top_logprobs); ++i) {
        result.top_ids.push_back(i < kept ? row.order[i] : -1);
        result.top_logprobs.push_back(i < kept ? logprobs[row.order[i]] : -kInfinity);
      }
      for (int32_t id : request.chosen) result.chosen_logprobs.push_back(logprobs[id]);
    }
  }
  const bool scaled = spec.logprob_mode == LogprobMode::kScaled;
  if (scaled || spec.logprob_mode == LogprobMode::kRaw) {
    const float temperature = scaled && !greedy ? spec.temperature : 1.0f;
    ReferenceFull(ReferenceRow(request.logits, temperature, {}), result.token, request, false,
                  &result);
  }
  return result;
}

}  // namespace dorad::kernels
