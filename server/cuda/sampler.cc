#include "server/cuda/sampler.h"

#include <algorithm>
#include <utility>

#include "kernels/sampling/sampling.h"
#include "server/base/error.h"

namespace dorad::cuda {

using engine::StepOutput;
using engine::StepSequence;
using engine::TokenId;
using engine::WantedRow;

namespace {

constexpr char kStep[] = "the step";

kernels::LogprobMode ToKernels(engine::LogprobMode mode) {
  switch (mode) {
    case engine::LogprobMode::kNone:
      return kernels::LogprobMode::kNone;
    case engine::LogprobMode::kRaw:
      return kernels::LogprobMode::kRaw;
    case engine::LogprobMode::kProcessed:
      return kernels::LogprobMode::kProcessed;
  }
  return kernels::LogprobMode::kNone;
}

}  // namespace

struct Sampler::Wanted {
  bool token = false;  // else a score
  bool logprob = false;
  int32_t top = 0;
  absl::Span<const TokenId> chosen;
  absl::Span<const TokenId> banned;
};

// Offsets of a call's arrays: what goes to the device, then what comes back.
struct Sampler::Places {
  int64_t specs, chosen, banned;
  int64_t in_bytes;
  int64_t tokens, logprobs, finite, top_ids, top_logprobs, chosen_logprobs;
  int64_t bytes;
};

template <typename Spec, typename Launch>
absl::Status Sampler::Run(absl::Span<const WantedRow> rows, const std::vector<Wanted>& wanted,
                          std::vector<Spec>& specs, Launch launch,
                          std::vector<StepOutput>* outputs) {
  const auto count = static_cast<int64_t>(rows.size());
  int64_t chosen = 0, banned = 0;
  int32_t max_top = 0;
  for (const Wanted& want : wanted) {
    chosen += static_cast<int64_t>(want.chosen.size());
    banned += static_cast<int64_t>(want.banned.size());
    max_top = std::max(max_top, want.top);
  }
  Layout layout;
  Places at;
  at.specs = layout.Add(count * static_cast<int64_t>(sizeof(Spec)));
  at.chosen = layout.Add(chosen * 4);
  at.banned = layout.Add(banned * 4);
  at.in_bytes = layout.bytes();
  at.tokens = layout.Add(count * 4);
  at.logprobs = layout.Add(count * 4);
  at.finite = layout.Add(count);
  at.top_ids = layout.Add(count * max_top * 4);
  at.top_logprobs = layout.Add(count * max_top * 4);
  at.chosen_logprobs = layout.Add(chosen * 4);
  at.bytes = layout.bytes();
  if (at.bytes > host_.bytes()) {
    const int64_t bytes = std::max(2 * host_.bytes(), at.bytes);
    DORAD_ASSIGN_OR_RETURN(host_, PinnedBuffer::Allocate(bytes));
    DORAD_ASSIGN_OR_RETURN(device_, DeviceBuffer::Allocate(ledger_, "workspace", bytes));
  }

  int32_t next_chosen = 0, next_banned = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Wanted& want = wanted[i];
    specs[i].top_logprobs = want.top;
    specs[i].chosen_begin = next_chosen;
    specs[i].chosen_count = static_cast<int32_t>(want.chosen.size());
    std::copy(want.chosen.begin(), want.chosen.end(), host_.as<int32_t>(at.chosen) + next_chosen);
    next_chosen += specs[i].chosen_count;
    if constexpr (std::is_same_v<Spec, kernels::SampleRowSpec>) {
      specs[i].banned_begin = next_banned;
      specs[i].banned_count = static_cast<int32_t>(want.banned.size());
      std::copy(want.banned.begin(), want.banned.end(), host_.as<int32_t>(at.banned) + next_banned);
      next_banned += specs[i].banned_count;
    }
  }
  std::copy(specs.begin(), specs.end(), host_.as<Spec>(at.specs));
  DORAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(device_.as<>(), host_.as<>(), at.in_bytes,
                                             cudaMemcpyHostToDevice, stream_.get()),
                             kStep);
  kernels::SampleOutputs out;
  out.tokens = device_.as<int32_t>(at.tokens);
  out.logprobs = device_.as<float>(at.logprobs);
  out.finite = device_.as<uint8_t>(at.finite);
  out.top_ids = device_.as<int32_t>(at.top_ids);
  out.top_logprobs = device_.as<float>(at.top_logprobs);
  out.chosen_logprobs = device_.as<float>(at.chosen_logprobs);
  DORAD_RETURN_IF_CUDA_ERROR(launch(at, out, max_top), kStep);
  DORAD_RETURN_IF_CUDA_ERROR(
      cudaMemcpyAsync(host_.as<>(at.tokens), device_.as<>(at.tokens), at.bytes - at.tokens,
                      cudaMemcpyDeviceToHost, stream_.get()),
      kStep);
  DORAD_RETURN_IF_ERROR(stream_.Synchronize(kStep));

  for (int64_t i = 0; i < count; ++i) {
    const Wanted& want = wanted[i];
    StepOutput& output = (*outputs)[rows[i].sequence];
    if (want.token) output.token = host_.as<int32_t>(at.tokens)[i];
    output.finite = output.finite && host_.as<uint8_t>(at.finite)[i] != 0;
    engine::Logprobs& to = output.logprobs;
    if (want.logprob) to.logprobs.push_back(host_.as<float>(at.logprobs)[i]);
    const int32_t* top_ids = host_.as<int32_t>(at.top_ids) + i * max_top;
    const float* top_logprobs = host_.as<float>(at.top_logprobs) + i * max_top;
    to.top_ids.insert(to.top_ids.end(), top_ids, top_ids + want.top);
    to.top_logprobs.insert(to.top_logprobs.end(), top_logprobs, top_logprobs + want.top);
    const float* chosen_logprobs = host_.as<float>(at.chosen_logprobs) + specs[i].chosen_begin;
    to.chosen.insert(to.chosen.end(), chosen_logprobs, chosen_logprobs + specs[i].chosen_count);
  }
  return absl::OkStatus();
}

absl::Status Sampler::Sample(absl::Span<const WantedRow> rows, const float* logits,
                             absl::Span<const StepSequence> sequences,
                             std::vector<StepOutput>* outputs) {
  std::vector<Wanted> wanted;
  std::vector<kernels::SampleRowSpec> specs;
  for (const WantedRow& row : rows) {
    const engine::SampleWant& want = *sequences[row.sequence].sample;
    kernels::SampleRowSpec spec;
    spec.seed = want.sampling.seed;
    spec.position = static_cast<uint64_t>(want.position);
    spec.sample_index = want.sample_index;
    spec.temperature = want.sampling.temperature;
    spec.top_p = want.sampling.top_p;
    spec.min_p = want.sampling.min_p;
    spec.top_k = want.sampling.top_k;
    Wanted asked;
    asked.token = true;
    asked.banned = want.banned;
    if (want.logprobs != nullptr && want.logprobs->mode != engine::LogprobMode::kNone) {
      spec.logprob_mode = ToKernels(want.logprobs->mode);
      asked.logprob = true;
      asked.top = want.logprobs->top_k;
      asked.chosen = want.logprobs->chosen_ids;
    }
    specs.push_back(spec);
    wanted.push_back(asked);
  }
  const auto launch = [&](const Places& at, const kernels::SampleOutputs& out, int32_t max_top) {
    kernels::SampleParams params;
    params.logits = logits;
    params.specs = device_.as<kernels::SampleRowSpec>(at.specs);
    params.banned = device_.as<int32_t>(at.banned);
    params.chosen_ids = device_.as<int32_t>(at.chosen);
    params.out = out;
    params.logits_ld = vocab_size_;
    params.rows = static_cast<int32_t>(rows.size());
    params.vocabulary = static_cast<int32_t>(vocab_size_);
    params.max_top = max_top;
    return kernels::Sample(params, stream_.get());
  };
  return Run(rows, wanted, specs, launch, outputs);
}

absl::Status Sampler::Score(absl::Span<const WantedRow> rows, const float* logits,
                            absl::Span<const StepSequence> sequences,
                            std::vector<StepOutput>* outputs) {
  std::vector<Wanted> wanted;
  std::vector<kernels::ScoreRowSpec> specs;
  for (const WantedRow& row : rows) {
    const engine::ScoreWant& want = *sequences[row.sequence].score;
    kernels::ScoreRowSpec spec;
    spec.target = want.targets[row.chunk_row];
    spec.temperature = want.temperature;
    specs.push_back(spec);
    Wanted asked;
    asked.logprob = true;
    asked.top = want.top_k;
    asked.chosen = want.chosen_ids;
    wanted.push_back(asked);
  }
  const auto launch = [&](const Places& at, const kernels::SampleOutputs& out, int32_t max_top) {
    kernels::ScoreParams params;
    params.logits = logits;
    params.specs = device_.as<kernels::ScoreRowSpec>(at.specs);
    params.chosen_ids = device_.as<int32_t>(at.chosen);
    params.out = out;
    params.logits_ld = vocab_size_;
    params.rows = static_cast<int32_t>(rows.size());
    params.vocabulary = static_cast<int32_t>(vocab_size_);
    params.max_top = max_top;
    return kernels::Score(params, stream_.get());
  };
  return Run(rows, wanted, specs, launch, outputs);
}

}  // namespace dorad::cuda
