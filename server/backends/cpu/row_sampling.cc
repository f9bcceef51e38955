#include "server/backends/cpu/row_sampling.h"

#include <ATen/ops/from_blob.h>

#include <utility>

#include "server/backends/cpu/logit_adjustments.h"
#include "server/backends/cpu/ops/sampling.h"

namespace dorad::engine {
namespace {

ops::LogprobMode ToOps(LogprobMode mode) {
  switch (mode) {
    case LogprobMode::kNone:
      return ops::LogprobMode::kNone;
    case LogprobMode::kRaw:
      return ops::LogprobMode::kRaw;
    case LogprobMode::kProcessed:
      return ops::LogprobMode::kProcessed;
    case LogprobMode::kScaled:
      return ops::LogprobMode::kScaled;
  }
  return ops::LogprobMode::kNone;
}

ops::SampleSpec ToOps(const SampleWant& want) {
  ops::SampleSpec spec;
  spec.temperature = want.sampling.temperature;
  spec.top_k = want.sampling.top_k;
  spec.top_p = want.sampling.top_p;
  spec.min_p = want.sampling.min_p;
  spec.seed = want.sampling.seed;
  spec.sample_index = want.sample_index;
  spec.position = static_cast<uint64_t>(want.position);
  spec.banned = want.banned;
  if (want.logprobs != nullptr && want.logprobs->mode != LogprobMode::kNone) {
    spec.logprob_mode = ToOps(want.logprobs->mode);
    spec.top_logprobs = want.logprobs->top_k;
    spec.chosen_ids = want.logprobs->chosen_ids;
  }
  return spec;
}

void AppendPosition(ops::SampleResult&& result, bool with_logprob, Logprobs* to) {
  if (with_logprob) to->logprobs.push_back(result.logprob);
  to->top_ids.insert(to->top_ids.end(), result.top_ids.begin(), result.top_ids.end());
  to->top_logprobs.insert(to->top_logprobs.end(), result.top_logprobs.begin(),
                          result.top_logprobs.end());
  to->chosen.insert(to->chosen.end(), result.chosen_logprobs.begin(), result.chosen_logprobs.end());
}

at::Tensor Wrap(const float* logits, size_t rows, int64_t vocab_size) {
  return at::from_blob(const_cast<float*>(logits), {static_cast<int64_t>(rows), vocab_size},
                       at::TensorOptions(at::kFloat));
}

}  // namespace

void SampleRows(absl::Span<const WantedRow> rows, const float* logits, int64_t vocab_size,
                absl::Span<const StepSequence> sequences, std::vector<StepOutput>* outputs) {
  std::vector<ops::SampleSpec> specs;
  std::vector<std::vector<float>> adjusted(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const SampleWant& want = sequences[rows[i].sequence].samples[rows[i].want];
    specs.push_back(ToOps(want));
    if (want.logits == nullptr) continue;
    adjusted[i] = AdjustedLogits({logits + i * vocab_size, static_cast<size_t>(vocab_size)}, want);
    specs.back().adjusted = adjusted[i];
  }
  std::vector<ops::SampleResult> results =
      ops::Sample(Wrap(logits, rows.size(), vocab_size), specs);
  for (size_t i = 0; i < rows.size(); ++i) {
    StepOutput& output = (*outputs)[rows[i].sequence];
    output.tokens.push_back(results[i].finite ? results[i].token : StepOutput::kNotFinite);
    AppendPosition(std::move(results[i]), specs[i].logprob_mode != ops::LogprobMode::kNone,
                   &output.logprobs);
  }
}

void ScoreRows(absl::Span<const WantedRow> rows, const float* logits, int64_t vocab_size,
               absl::Span<const StepSequence> sequences, std::vector<StepOutput>* outputs) {
  std::vector<ops::ScoreSpec> specs;
  for (const WantedRow& row : rows) {
    const ScoreWant& want = *sequences[row.sequence].score;
    specs.push_back({want.targets[row.want], want.temperature, want.top_k, want.chosen_ids});
  }
  std::vector<ops::SampleResult> results = ops::Score(Wrap(logits, rows.size(), vocab_size), specs);
  for (size_t i = 0; i < rows.size(); ++i) {
    StepOutput& output = (*outputs)[rows[i].sequence];
    output.finite = output.finite && results[i].finite;
    AppendPosition(std::move(results[i]), /*with_logprob=*/true, &output.logprobs);
  }
}

}  // namespace dorad::engine
