#include "server/backends/cuda/sampler.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "absl/algorithm/container.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

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
    case engine::LogprobMode::kScaled:
      return kernels::LogprobMode::kScaled;
  }
  return kernels::LogprobMode::kNone;
}

// The kernels' form of an engine type, which has the same members.
template <typename To, typename From>
absl::Span<const To> InKernelsForm(absl::Span<const From> items) {
  static_assert(sizeof(To) == sizeof(From) && std::is_trivially_copyable_v<From>);
  return {reinterpret_cast<const To*>(items.data()), items.size()};
}

// Appends to a list for the device and returns the range's begin.
template <typename To, typename From>
int32_t AppendTo(std::vector<To>* list, absl::Span<const From> items) {
  const auto begin = static_cast<int32_t>(list->size());
  const absl::Span<const To> to = InKernelsForm<To>(items);
  list->insert(list->end(), to.begin(), to.end());
  return begin;
}

}  // namespace

// The parameters of a step's rows for the device.
struct Sampler::Specs {
  std::vector<kernels::SampleRowSpec> samples;
  std::vector<kernels::ScoreRowSpec> scores;
  std::vector<TokenId> chosen;
  std::vector<TokenId> banned;
  std::vector<kernels::ConditionalBan> conditional_bans;
  std::vector<kernels::LogitAdjustments> adjustments;
  std::vector<TokenId> allowed;
  std::vector<kernels::LogitBias> biases;
  // Of each row with adjustments. They may be megabytes: copied once.
  std::vector<absl::Span<const engine::TokenUse>> uses;
  int64_t num_uses = 0;

  // newest: the place of the sequence's last token in the last step, which has not finished; -1:
  // the engine knows it.
  Row Add(const engine::SampleWant& want, int32_t newest) {
    Row row;
    row.token = true;
    kernels::SampleRowSpec& spec = samples.emplace_back();
    spec.seed = want.sampling.seed;
    spec.position = static_cast<uint64_t>(want.position);
    spec.sample_index = want.sample_index;
    spec.temperature = want.sampling.temperature;
    spec.top_p = want.sampling.top_p;
    spec.min_p = want.sampling.min_p;
    spec.top_k = want.sampling.top_k;
    spec.banned_begin = AppendTo(&banned, want.banned);
    spec.banned_count = static_cast<int32_t>(want.banned.size());
    spec.conditional_begin = AppendTo(&conditional_bans, want.conditional_bans);
    spec.conditional_count = static_cast<int32_t>(want.conditional_bans.size());
    spec.newest = newest;
    if (want.logits != nullptr) {
      spec.adjustments = static_cast<int32_t>(adjustments.size());
      AddAdjustments(*want.logits, want.uses);
    }
    if (want.logprobs != nullptr && want.logprobs->mode != engine::LogprobMode::kNone) {
      spec.logprob_mode = ToKernels(want.logprobs->mode);
      AddLogprobs(want.logprobs->top_k, want.logprobs->chosen_ids, &spec, &row);
    }
    return row;
  }

  Row Add(const engine::ScoreWant& want, int64_t index) {
    Row row;
    kernels::ScoreRowSpec& spec = scores.emplace_back();
    spec.target = want.targets[index];
    spec.temperature = want.temperature;
    AddLogprobs(want.top_k, want.chosen_ids, &spec, &row);
    return row;
  }

 private:
  template <typename Spec>
  void AddLogprobs(int32_t top, absl::Span<const TokenId> chosen_ids, Spec* spec, Row* row) {
    row->logprob = true;
    row->top = spec->top_logprobs = top;
    row->chosen_begin = spec->chosen_begin = AppendTo(&chosen, chosen_ids);
    row->chosen_count = spec->chosen_count = static_cast<int32_t>(chosen_ids.size());
  }

  void AddAdjustments(const engine::LogitParams& logits, absl::Span<const engine::TokenUse> used) {
    kernels::LogitAdjustments& to = adjustments.emplace_back();
    to.penalised = logits.has_penalties();
    to.presence_penalty = logits.presence_penalty;
    to.frequency_penalty = logits.frequency_penalty;
    to.repetition_penalty = logits.repetition_penalty;
    to.allowed_begin = AppendTo(&allowed, absl::MakeConstSpan(logits.allowed_ids));
    to.allowed_count = static_cast<int32_t>(logits.allowed_ids.size());
    to.bias_begin = static_cast<int32_t>(biases.size());
    to.bias_count = static_cast<int32_t>(logits.bias_ids.size());
    for (size_t i = 0; i < logits.bias_ids.size(); ++i) {
      biases.push_back({logits.bias_ids[i], logits.biases[i]});
    }
    to.uses_begin = static_cast<int32_t>(num_uses);
    to.uses_count = static_cast<int32_t>(used.size());
    uses.push_back(used);
    num_uses += static_cast<int64_t>(used.size());
  }
};

absl::StatusOr<Sampler::Step> Sampler::Step::Create() {
  DORAD_ASSIGN_OR_RETURN(Event sent, Event::Create());
  DORAD_ASSIGN_OR_RETURN(Event done, Event::Create());
  return Step(std::move(sent), std::move(done));
}

absl::StatusOr<Sampler> Sampler::Create(int64_t vocab_size, int64_t max_rows,
                                        kernels::KernelIsa isa, MemoryLedger* ledger,
                                        const Stream* stream) {
  static_assert(kStepsInFlight == 2);
  DORAD_ASSIGN_OR_RETURN(Stream inputs, Stream::Create());
  DORAD_ASSIGN_OR_RETURN(Step first, Step::Create());
  DORAD_ASSIGN_OR_RETURN(Step second, Step::Create());
  size_t bytes = 0;
  DORAD_RETURN_IF_CUDA_ERROR(kernels::SampleWorkspaceBytes(isa, static_cast<int>(max_rows),
                                                           static_cast<int>(vocab_size), &bytes),
                             kStep);
  DeviceBuffer workspace;
  DORAD_ASSIGN_OR_RETURN(workspace, DeviceBuffer::Allocate(ledger, MemoryLedger::kWorkspace,
                                                           static_cast<int64_t>(bytes)));
  DORAD_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(workspace.as<>(), 0, bytes, stream->get()), kStep);
  return Sampler(vocab_size, isa, std::move(workspace), ledger, stream, std::move(inputs),
                 std::move(first), std::move(second));
}

absl::Status Sampler::Resize(Buffers* buffers, int64_t bytes) const {
  buffers->bytes = bytes;
  const int64_t old = buffers->host.bytes();
  if (bytes <= old) return absl::OkStatus();
  DORAD_RETURN_IF_ERROR(stream_.Synchronize(kStep));
  const int64_t more = std::max(2 * old, bytes);
  DORAD_ASSIGN_OR_RETURN(buffers->device,
                         DeviceBuffer::Allocate(ledger_, MemoryLedger::kWorkspace, more));
  DORAD_ASSIGN_OR_RETURN(buffers->host, PinnedBuffer::Allocate(more));
  return absl::OkStatus();
}

absl::Status Sampler::Begin(const engine::StepBatch& batch,
                            absl::Span<const StepSequence> sequences) {
  DORAD_CHECK(ended_ - finished_ < kStepsInFlight);
  Step& step = begun();
  step.sequences = sequences.size();
  step.samples = static_cast<int64_t>(batch.samples.size());
  step.launched = 0;
  step.max_top = 0;
  step.rows.clear();
  step.sampled.index.assign(sequences.size(), -1);
  Specs specs;
  for (const WantedRow& wanted : batch.samples) {
    if (wanted.want == 0) {
      step.sampled.index[wanted.sequence] = static_cast<int32_t>(step.rows.size());
    }
    const StepSequence& sequence = sequences[wanted.sequence];
    const int32_t newest = sequence.follows < 0 ? -1 : sampled().index[sequence.follows];
    step.rows.push_back(specs.Add(sequence.samples[wanted.want], newest));
    step.rows.back().sequence = wanted.sequence;
  }
  for (const WantedRow& wanted : batch.scores) {
    step.rows.push_back(specs.Add(*sequences[wanted.sequence].score, wanted.want));
    step.rows.back().sequence = wanted.sequence;
  }
  for (const Row& row : step.rows) step.max_top = std::max(step.max_top, row.top);

  const auto rows = static_cast<int64_t>(step.rows.size());
  const auto chosen = static_cast<int64_t>(specs.chosen.size());
  Layout inputs;
  const auto add = [&inputs](const auto& list) {
    return inputs.Add(static_cast<int64_t>(list.size() * sizeof(list[0])));
  };
  Places& at = step.at;
  at.samples = add(specs.samples);
  at.scores = add(specs.scores);
  at.chosen = add(specs.chosen);
  at.banned = add(specs.banned);
  step.adjusts = !specs.conditional_bans.empty() || !specs.adjustments.empty();
  const auto vocabulary = static_cast<int32_t>(vocab_size_);
  const auto is_simple = [vocabulary](const kernels::SampleRowSpec& spec) {
    return kernels::IsPlain(spec) && !kernels::NeedsList(spec, vocabulary);
  };
  if (absl::c_all_of(specs.samples, is_simple)) {
    step.samples_are = kernels::SampleRows::kPlain;
  } else if (absl::c_none_of(specs.samples, [](const auto& spec) { return IsPlain(spec); })) {
    step.samples_are = kernels::SampleRows::kOther;
  } else {
    step.samples_are = kernels::SampleRows::kMixed;
  }
  const bool lists = absl::c_any_of(specs.scores, [](const auto& spec) { return NeedsList(spec); });
  step.scores_are = lists ? kernels::SampleRows::kMixed : kernels::SampleRows::kPlain;
  at.conditional_bans = add(specs.conditional_bans);
  at.adjustments = add(specs.adjustments);
  at.allowed = add(specs.allowed);
  at.biases = add(specs.biases);
  at.uses = inputs.Add(specs.num_uses * static_cast<int64_t>(sizeof(kernels::TokenUse)));
  Layout results;
  at.tokens = results.Add(rows * 4);
  at.logprobs = results.Add(rows * 4);
  at.finite = results.Add(rows);
  at.top_ids = results.Add(rows * step.max_top * 4);
  at.top_logprobs = results.Add(rows * step.max_top * 4);
  at.chosen_logprobs = results.Add(chosen * 4);
  DORAD_RETURN_IF_ERROR(Resize(&step.inputs, inputs.bytes()));
  DORAD_RETURN_IF_ERROR(Resize(&step.results, results.bytes()));
  step.sampled.tokens = step.results.device.as<int32_t>(at.tokens);
  const auto copy = [&step](const auto& list, int64_t to) {
    std::copy(list.begin(), list.end(),
              step.inputs.host.as<typename std::decay_t<decltype(list)>::value_type>(to));
  };
  copy(specs.samples, at.samples);
  copy(specs.scores, at.scores);
  copy(specs.chosen, at.chosen);
  copy(specs.banned, at.banned);
  copy(specs.conditional_bans, at.conditional_bans);
  copy(specs.adjustments, at.adjustments);
  copy(specs.allowed, at.allowed);
  copy(specs.biases, at.biases);
  auto* to = step.inputs.host.as<kernels::TokenUse>(at.uses);
  for (const auto& uses : specs.uses) to = absl::c_copy(InKernelsForm<kernels::TokenUse>(uses), to);
  if (step.inputs.bytes > 0) {
    DORAD_RETURN_IF_CUDA_ERROR(
        cudaMemcpyAsync(step.inputs.device.as<>(), step.inputs.host.as<>(), step.inputs.bytes,
                        cudaMemcpyHostToDevice, inputs_.get()),
        kStep);
  }
  DORAD_RETURN_IF_ERROR(step.sent.Record(inputs_, kStep));
  return absl::OkStatus();
}

// Parameters of the next rows for both kernels.
template <typename Params>
absl::StatusOr<Params> Sampler::NextRows(int64_t rows, const float* logits) {
  Step& step = begun();
  if (step.launched == 0) DORAD_RETURN_IF_ERROR(step.sent.Hold(stream_, kStep));
  const DeviceBuffer& results = step.results.device;
  const Places& at = step.at;
  const int64_t first = step.launched;
  Params params;
  params.logits = logits;
  params.chosen_ids = step.inputs.device.as<int32_t>(at.chosen);
  params.out.tokens = results.as<int32_t>(at.tokens) + first;
  params.out.logprobs = results.as<float>(at.logprobs) + first;
  params.out.finite = results.as<uint8_t>(at.finite) + first;
  params.out.top_ids = results.as<int32_t>(at.top_ids) + first * step.max_top;
  params.out.top_logprobs = results.as<float>(at.top_logprobs) + first * step.max_top;
  params.out.chosen_logprobs = results.as<float>(at.chosen_logprobs);
  params.logits_ld = vocab_size_;
  params.rows = static_cast<int32_t>(rows);
  params.vocabulary = static_cast<int32_t>(vocab_size_);
  params.max_top = step.max_top;
  params.isa = isa_;
  params.workspace = workspace_.as<>();
  params.workspace_bytes = static_cast<size_t>(workspace_.bytes());
  step.launched += rows;
  return params;
}

absl::Status Sampler::Sample(int64_t rows, const float* logits) {
  const Step& step = begun();
  const int64_t first = step.launched;
  DORAD_ASSIGN_OR_RETURN(auto params, NextRows<kernels::SampleParams>(rows, logits));
  params.specs = step.inputs.device.as<kernels::SampleRowSpec>(step.at.samples) + first;
  params.banned = step.inputs.device.as<int32_t>(step.at.banned);
  if (step.adjusts) {
    params.conditional_bans =
        step.inputs.device.as<kernels::ConditionalBan>(step.at.conditional_bans);
    params.adjustments = step.inputs.device.as<kernels::LogitAdjustments>(step.at.adjustments);
  }
  params.allowed_ids = step.inputs.device.as<int32_t>(step.at.allowed);
  params.biases = step.inputs.device.as<kernels::LogitBias>(step.at.biases);
  params.uses = step.inputs.device.as<kernels::TokenUse>(step.at.uses);
  params.newest = sampled().tokens;
  params.rows_are = step.samples_are;
  return ToStatus(kernels::Sample(params, stream_.get()), kStep);
}

absl::Status Sampler::Score(int64_t rows, const float* logits) {
  const Step& step = begun();
  const int64_t first = step.launched - step.samples;
  DORAD_ASSIGN_OR_RETURN(auto params, NextRows<kernels::ScoreParams>(rows, logits));
  params.specs = step.inputs.device.as<kernels::ScoreRowSpec>(step.at.scores) + first;
  params.rows_are = step.scores_are;
  return ToStatus(kernels::Score(params, stream_.get()), kStep);
}

absl::Status Sampler::End() {
  const Step& step = begun();
  DORAD_CHECK(step.launched == static_cast<int64_t>(step.rows.size()));
  if (step.results.bytes > 0) {
    DORAD_RETURN_IF_CUDA_ERROR(
        cudaMemcpyAsync(step.results.host.as<>(), step.results.device.as<>(), step.results.bytes,
                        cudaMemcpyDeviceToHost, stream_.get()),
        kStep);
  }
  DORAD_RETURN_IF_ERROR(step.done.Record(stream_, kStep));
  ++ended_;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<StepOutput>> Sampler::Finish() {
  DORAD_CHECK(finished_ < ended_);
  const Step& step = steps_[finished_++ % kStepsInFlight];
  DORAD_RETURN_IF_ERROR(step.done.Synchronize(kStep));
  const PinnedBuffer& host = step.results.host;
  const Places& at = step.at;
  std::vector<StepOutput> outputs(step.sequences);
  for (size_t i = 0; i < step.rows.size(); ++i) {
    const Row& row = step.rows[i];
    StepOutput& output = outputs[row.sequence];
    const bool finite = host.as<uint8_t>(at.finite)[i] != 0;
    if (row.token) {
      output.tokens.push_back(finite ? host.as<int32_t>(at.tokens)[i] : StepOutput::kNotFinite);
    } else {
      output.finite = output.finite && finite;
    }
    engine::Logprobs& to = output.logprobs;
    if (row.logprob) to.logprobs.push_back(host.as<float>(at.logprobs)[i]);
    const int32_t* top_ids = host.as<int32_t>(at.top_ids) + i * step.max_top;
    const float* top_logprobs = host.as<float>(at.top_logprobs) + i * step.max_top;
    to.top_ids.insert(to.top_ids.end(), top_ids, top_ids + row.top);
    to.top_logprobs.insert(to.top_logprobs.end(), top_logprobs, top_logprobs + row.top);
    const float* chosen = host.as<float>(at.chosen_logprobs) + row.chosen_begin;
    to.chosen.insert(to.chosen.end(), chosen, chosen + row.chosen_count);
  }
  return outputs;
}

}  // namespace dorad::cuda
