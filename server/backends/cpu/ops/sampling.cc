#include "server/backends/cpu/ops/sampling.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "server/backends/cpu/ops/draw.h"
#include "server/backends/cpu/ops/noise.h"
#include "server/backends/cpu/ops/thread_team.h"
#include "server/backends/cpu/simd/kernels.h"
#include "server/backends/cpu/simd/logits.h"
#include "server/platform/check.h"

namespace dorad::ops {
namespace {

using cpu::Candidate;
using cpu::LogitRow;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void CheckIds(absl::Span<const int32_t> ids, int64_t vocabulary) {
  for (int32_t id : ids) DORAD_CHECK(id >= 0 && id < vocabulary);
}

// Log-probabilities on request beside the token's own, for any distribution. Lists keep the
// requested length: missing candidates are id -1 with -inf.
void FillTop(const std::vector<Candidate>& top, int32_t wanted, const LogitRow& row,
             SampleResult* result) {
  for (int32_t i = 0; i < wanted; ++i) {
    const bool present = i < static_cast<int32_t>(top.size());
    result->top_ids.push_back(present ? top[i].id : -1);
    result->top_logprobs.push_back(present ? row.LogProb(top[i].logit) : -kInfinity);
  }
}

// All fields from the row's full softmax.
void FillFull(const LogitRow& row, int32_t token, int32_t top, absl::Span<const int32_t> chosen,
              SampleResult* result) {
  result->logprob = token >= 0 ? row.LogProb(row[token]) : kNan;
  if (top > 0) FillTop(row.Top(top), top, row, result);
  for (int32_t id : chosen) result->chosen_logprobs.push_back(row.LogProb(row[id]));
}

SampleResult Unusable(int32_t token, bool logprobs, int32_t top, size_t chosen) {
  SampleResult result;
  result.token = token;
  result.finite = false;
  result.logprob = kNan;
  if (!logprobs) return result;
  result.top_ids.assign(top, -1);
  result.top_logprobs.assign(top, kNan);
  result.chosen_logprobs.assign(chosen, kNan);
  return result;
}

// The distribution after truncation: candidates in order with their weights exp(logit - maximum).
struct Kept {
  std::vector<Candidate> candidates;
  std::vector<float> weights;
  double total = 0.0;

  float LogProb(const Candidate& c, float maximum) const {
    return static_cast<float>(static_cast<double>(c.logit) - static_cast<double>(maximum) -
                              std::log(total));
  }
};

void WeightsOf(const LogitRow& row, absl::Span<const Candidate> candidates,
               std::vector<float>* weights) {
  std::vector<float> logits;
  logits.reserve(candidates.size());
  for (const Candidate& c : candidates) logits.push_back(c.logit);
  weights->resize(candidates.size());
  cpu::ActiveKernels().sum_exp(logits.data(), static_cast<int64_t>(logits.size()), row.maximum(),
                               weights->data());
}

// Sorts the shortest prefix of `candidates` that reaches `mass` of the weights, and drops the rest.
// The sorted part grows geometrically: most distributions need few.
void KeepMass(const LogitRow& row, double mass, std::vector<Candidate>* candidates) {
  double sum = 0.0;
  std::vector<float> weights;
  size_t begin = 0;
  for (size_t size = 64; begin < candidates->size(); size *= 4) {
    const size_t end = std::min(begin + size, candidates->size());
    if (end < candidates->size()) {
      std::nth_element(candidates->begin() + begin, candidates->begin() + end, candidates->end(),
                       cpu::Before);
    }
    std::sort(candidates->begin() + begin, candidates->begin() + end, cpu::Before);
    WeightsOf(row, absl::MakeConstSpan(*candidates).subspan(begin, end - begin), &weights);
    for (size_t i = 0; i < weights.size(); ++i) {
      sum += weights[i];
      if (sum >= mass) {
        candidates->resize(begin + i + 1);
        return;
      }
    }
    begin = end;
  }
}

// Temperature has been applied; then top-k, top-p over the top-k set, min-p.
Kept Truncate(LogitRow& row, const SampleSpec& spec) {
  Kept kept;
  const bool by_mass = spec.top_p < 1.0f;
  if (spec.top_k > 0 && spec.top_k < row.size()) {
    kept.candidates = row.Top(spec.top_k);
    if (by_mass) {
      WeightsOf(row, kept.candidates, &kept.weights);
      double sum = 0.0;
      for (float w : kept.weights) sum += w;
      KeepMass(row, static_cast<double>(spec.top_p) * sum, &kept.candidates);
    }
  } else if (by_mass) {
    row.SumExp();
    // The candidates below this bound weigh less than 1 - top_p together, even if they were the
    // whole vocabulary (halved against rounding): the others reach the mass.
    const double bound =
        std::log(0.5 * (1.0 - spec.top_p) * row.total() / static_cast<double>(row.size()));
    kept.candidates = row.AtLeast(static_cast<float>(row.maximum() + std::min(bound, 0.0)));
    KeepMass(row, static_cast<double>(spec.top_p) * row.total(), &kept.candidates);
  } else {
    // Half of the bound against rounding; exact below.
    kept.candidates = row.AtLeast(row.maximum() + std::log(0.5f * spec.min_p));
    std::sort(kept.candidates.begin(), kept.candidates.end(), cpu::Before);
  }
  WeightsOf(row, kept.candidates, &kept.weights);
  size_t size = kept.weights.size();
  while (size > 1 && kept.weights[size - 1] < spec.min_p) --size;
  while (size > 1 && !(kept.weights[size - 1] > 0.0f)) --size;
  kept.candidates.resize(size);
  kept.weights.resize(size);
  for (float w : kept.weights) kept.total += w;
  return kept;
}

void FillKept(const LogitRow& row, Kept kept, const SampleSpec& spec, SampleResult* result) {
  result->logprob = kept.LogProb({row[result->token], result->token}, row.maximum());
  for (int32_t i = 0; i < spec.top_logprobs; ++i) {
    const bool present = i < static_cast<int32_t>(kept.candidates.size());
    result->top_ids.push_back(present ? kept.candidates[i].id : -1);
    result->top_logprobs.push_back(present ? kept.LogProb(kept.candidates[i], row.maximum())
                                           : -kInfinity);
  }
  if (spec.chosen_ids.empty()) return;
  const auto by_id = [](const Candidate& a, const Candidate& b) { return a.id < b.id; };
  std::sort(kept.candidates.begin(), kept.candidates.end(), by_id);
  for (int32_t id : spec.chosen_ids) {
    const auto found = std::lower_bound(kept.candidates.begin(), kept.candidates.end(),
                                        Candidate{0.0f, id}, by_id);
    const bool present = found != kept.candidates.end() && found->id == id;
    result->chosen_logprobs.push_back(present ? kept.LogProb(*found, row.maximum()) : -kInfinity);
  }
}

// All probability on one token.
void FillPoint(int32_t token, const SampleSpec& spec, SampleResult* result) {
  result->logprob = 0.0f;
  for (int32_t i = 0; i < spec.top_logprobs; ++i) {
    result->top_ids.push_back(i == 0 ? token : -1);
    result->top_logprobs.push_back(i == 0 ? 0.0f : -kInfinity);
  }
  for (int32_t id : spec.chosen_ids) {
    result->chosen_logprobs.push_back(id == token ? 0.0f : -kInfinity);
  }
}

SampleResult SampleRow(absl::Span<const float> logits, const SampleSpec& spec) {
  const int64_t vocabulary = static_cast<int64_t>(logits.size());
  DORAD_CHECK(spec.temperature >= 0.0f && spec.top_logprobs >= 0);
  DORAD_CHECK(spec.adjusted.empty() || spec.adjusted.size() == logits.size());
  CheckIds(spec.chosen_ids, vocabulary);
  const bool greedy = spec.temperature == 0.0f;
  const bool processed = spec.logprob_mode == LogprobMode::kProcessed;
  const bool adjusted = !spec.adjusted.empty();
  LogitRow row(adjusted ? spec.adjusted : logits, greedy ? 1.0f : spec.temperature, spec.banned);
  // An adjustment may hide a logit that is not finite.
  if (!row.usable() || (adjusted && !LogitRow(logits, 1.0f, {}).usable())) {
    return Unusable(-1, spec.logprob_mode != LogprobMode::kNone, spec.top_logprobs,
                    spec.chosen_ids.size());
  }
  SampleResult result;
  const Noise noise(spec.seed, spec.sample_index, spec.position);
  if (greedy) {
    result.token = row.ArgMax();
    if (processed) FillPoint(result.token, spec, &result);
  } else if ((spec.top_k <= 0 || spec.top_k >= vocabulary) && spec.top_p >= 1.0f &&
             spec.min_p <= 0.0f) {
    result.token = Draw(row, noise);
    if (processed) {
      row.SumExp();
      FillFull(row, result.token, spec.top_logprobs, spec.chosen_ids, &result);
      // A banned token is no candidate.
      for (size_t i = 0; i < result.top_ids.size(); ++i) {
        if (result.top_logprobs[i] == -kInfinity) result.top_ids[i] = -1;
      }
    }
  } else {
    Kept kept = Truncate(row, spec);
    result.token = Draw(row, kept.candidates, noise);
    if (processed) FillKept(row, std::move(kept), spec, &result);
  }
  const bool scaled = spec.logprob_mode == LogprobMode::kScaled;
  if (scaled || spec.logprob_mode == LogprobMode::kRaw) {
    LogitRow raw(logits, scaled && !greedy ? spec.temperature : 1.0f, {});
    raw.SumExp();
    FillFull(raw, result.token, spec.top_logprobs, spec.chosen_ids, &result);
  }
  return result;
}

SampleResult ScoreRow(absl::Span<const float> logits, const ScoreSpec& spec) {
  const int64_t vocabulary = static_cast<int64_t>(logits.size());
  DORAD_CHECK(spec.temperature > 0.0f && spec.top_logprobs >= 0);
  DORAD_CHECK(spec.target >= -1 && spec.target < vocabulary);
  CheckIds(spec.chosen_ids, vocabulary);
  LogitRow row(logits, spec.temperature, {});
  if (!row.usable()) {
    return Unusable(spec.target, /*logprobs=*/true, spec.top_logprobs, spec.chosen_ids.size());
  }
  row.SumExp();
  SampleResult result;
  result.token = spec.target;
  FillFull(row, spec.target, spec.top_logprobs, spec.chosen_ids, &result);
  return result;
}

template <typename Spec>
std::vector<SampleResult> ForEachRow(const at::Tensor& logits_NV, absl::Span<const Spec> specs,
                                     SampleResult (*run)(absl::Span<const float>, const Spec&)) {
  DORAD_CHECK(logits_NV.scalar_type() == at::kFloat && logits_NV.dim() == 2);
  DORAD_CHECK(logits_NV.is_contiguous() && logits_NV.size(1) > 0);
  DORAD_CHECK(logits_NV.size(0) == static_cast<int64_t>(specs.size()));
  const size_t vocabulary = static_cast<size_t>(logits_NV.size(1));
  const float* logits = logits_NV.const_data_ptr<float>();
  std::vector<SampleResult> results(specs.size());
  Team().Run(static_cast<int64_t>(specs.size()), [&](int64_t i) {
    results[i] = run({logits + static_cast<size_t>(i) * vocabulary, vocabulary}, specs[i]);
  });
  return results;
}

}  // namespace

std::vector<SampleResult> Sample(const at::Tensor& logits_NV, absl::Span<const SampleSpec> specs) {
  return ForEachRow<SampleSpec>(logits_NV, specs, SampleRow);
}

std::vector<SampleResult> Score(const at::Tensor& logits_NV, absl::Span<const ScoreSpec> specs) {
  return ForEachRow<ScoreSpec>(logits_NV, specs, ScoreRow);
}

}  // namespace dorad::ops
