// Computes tokens and log-probabilities from logits. Each row is independent of the others, to the
// last bit. Thread-safe. Shape suffixes: N rows, V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace dorad::ops {

// kScaled: log_softmax(logits / temperature), before adjustments, bans and truncation; greedy rows
// have temperature 1 there.
enum class LogprobMode { kNone, kRaw, kProcessed, kScaled };

// The sampling parameters of one row. Pointers are borrowed for the call.
struct SampleSpec {
  float temperature = 1.0f;  // 0: greedy (ties: smallest id)
  int32_t top_k = 0;         // 0: all
  float top_p = 1.0f;
  float min_p = 0.0f;
  // Of the noise, see noise.h: a draw depends on these and on the candidates' logits only.
  uint64_t seed = 0;
  uint32_t sample_index = 0;
  uint64_t position = 0;
  // Ids whose probability is taken as 0 in this row (stop tokens before min_tokens). Their raw
  // log-probabilities are reported unchanged.
  absl::Span<const int32_t> banned;
  // Not empty: sample from these logits instead of the row's. Raw log-probabilities are of the row.
  absl::Span<const float> adjusted;
  LogprobMode logprob_mode = LogprobMode::kNone;
  int32_t top_logprobs = 0;              // k most likely tokens
  absl::Span<const int32_t> chosen_ids;  // log-probabilities of these
};

struct SampleResult {
  int32_t token = -1;
  float logprob = 0.0f;
  bool finite = true;  // false: the row has a NaN or +inf logit, or no candidate; token is -1
  std::vector<int32_t> top_ids;
  std::vector<float> top_logprobs;
  std::vector<float> chosen_logprobs;
};

// logits_NV: fp32 contiguous. One result for each row. Order of processing, as in transformers and
// vLLM: temperature, then top-k, then top-p over the renormalised top-k set, then min-p relative to
// the largest kept probability; candidates of equal probability are ranked by ascending id.
std::vector<SampleResult> Sample(const at::Tensor& logits_NV, absl::Span<const SampleSpec> specs);

// log_softmax(logits / temperature) at a target, the k largest (ties: smallest id first), and at
// chosen ids. target -1: none wanted (logprob is NaN).
struct ScoreSpec {
  int32_t target = -1;
  float temperature = 1.0f;
  int32_t top_logprobs = 0;
  absl::Span<const int32_t> chosen_ids;
};

// token is the target; same fields as sampling. Raw mode of Sample and Score at temperature 1, and
// scaled mode and Score at the same temperature, give bitwise equal log-probabilities for equal
// logits.
std::vector<SampleResult> Score(const at::Tensor& logits_NV, absl::Span<const ScoreSpec> specs);

}  // namespace dorad::ops
