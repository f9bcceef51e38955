#include "server/engine/cpu_model_runner.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>
#include <utility>

#include "server/model/decoder.h"
#include "server/ops/sampling.h"
#include "server/ops/torch_error.h"

namespace dorad::engine {
namespace {

static_assert(kKvPageTokens == ops::kPageTokens);

// Rows of logits that exist at once: bounds the memory of scoring a long prompt.
constexpr int64_t kLogitsRows = 64;

ops::LogprobMode ToOps(LogprobMode mode) {
  switch (mode) {
    case LogprobMode::kNone:
      return ops::LogprobMode::kNone;
    case LogprobMode::kRaw:
      return ops::LogprobMode::kRaw;
    case LogprobMode::kProcessed:
      return ops::LogprobMode::kProcessed;
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

// A row of the step whose logits are wanted.
struct WantedRow {
  int64_t row;        // in the batch
  size_t output;      // index of its sequence in the caller's order
  int64_t chunk_row;  // in its sequence's chunk
};

void AppendPosition(ops::SampleResult&& result, bool with_logprob, Logprobs* to) {
  if (with_logprob) to->logprobs.push_back(result.logprob);
  to->top_ids.insert(to->top_ids.end(), result.top_ids.begin(), result.top_ids.end());
  to->top_logprobs.insert(to->top_logprobs.end(), result.top_logprobs.begin(),
                          result.top_logprobs.end());
  to->chosen.insert(to->chosen.end(), result.chosen_logprobs.begin(), result.chosen_logprobs.end());
}

class CpuModelRunner final : public ModelRunner {
 public:
  CpuModelRunner(const model::LoadedModel& model, int64_t kv_pages, int64_t max_positions)
      : decoder_(model, max_positions), kv_(decoder_.AllocateKv(kv_pages)), kv_pages_(kv_pages) {}

  int64_t kv_pages() const override { return kv_pages_; }

  absl::StatusOr<std::vector<StepOutput>> Run(absl::Span<const StepSequence> sequences) override {
    // The one place where exceptions of libtorch end.
    try {
      return RunUnchecked(sequences);
    } catch (...) {
      return ops::FromTorchException("the step", "STEP_FAILED");
    }
  }

 private:
  // The step's rows, those of one adapter next to each other so that a segment is one range.
  struct Batch {
    std::vector<size_t> order;  // sequence indices in row order
    at::Tensor token_ids;
    std::vector<ops::SequenceRows> sequences;
    std::vector<model::AdapterRows> adapters;
  };

  static Batch MakeBatch(absl::Span<const StepSequence> sequences) {
    Batch batch;
    batch.order.resize(sequences.size());
    std::iota(batch.order.begin(), batch.order.end(), size_t{0});
    std::stable_sort(batch.order.begin(), batch.order.end(), [&](size_t a, size_t b) {
      return std::less<>()(sequences[a].adapter, sequences[b].adapter);
    });
    int64_t rows = 0;
    for (const StepSequence& s : sequences) rows += static_cast<int64_t>(s.tokens.size());
    batch.token_ids = at::empty({rows}, at::kInt);
    int32_t* ids = batch.token_ids.data_ptr<int32_t>();
    int64_t row = 0;
    for (size_t index : batch.order) {
      const StepSequence& s = sequences[index];
      const int64_t count = static_cast<int64_t>(s.tokens.size());
      std::copy(s.tokens.begin(), s.tokens.end(), ids + row);
      batch.sequences.push_back({row, count, s.position, s.pages});
      AppendAdapterRows(s.adapter, row, row + count, &batch.adapters);
      row += count;
    }
    return batch;
  }

  static void AppendAdapterRows(const adapter::LoadedAdapter* adapter, int64_t begin, int64_t end,
                                std::vector<model::AdapterRows>* to) {
    const adapter::AdapterWeights* weights = adapter == nullptr ? nullptr : &adapter->weights();
    if (!to->empty() && to->back().weights == weights) {
      to->back().end = end;
    } else {
      to->push_back({weights, begin, end});
    }
  }

  std::vector<StepOutput> RunUnchecked(absl::Span<const StepSequence> sequences) {
    const Batch batch = MakeBatch(sequences);
    const at::Tensor hidden =
        decoder_.Forward({batch.token_ids, batch.sequences, batch.adapters}, kv_);
    std::vector<WantedRow> samples;
    std::vector<WantedRow> scores;
    for (size_t i = 0; i < batch.order.size(); ++i) {
      const StepSequence& s = sequences[batch.order[i]];
      const ops::SequenceRows& rows = batch.sequences[i];
      if (s.sample != nullptr) {
        samples.push_back({rows.row_begin + rows.count - 1, batch.order[i], rows.count - 1});
      } else if (s.score != nullptr) {
        for (int64_t r = 0; r < rows.count; ++r) {
          scores.push_back({rows.row_begin + r, batch.order[i], r});
        }
      }
    }
    std::vector<StepOutput> outputs(sequences.size());
    ForEachBlock(samples, hidden, sequences, [&](auto rows, const at::Tensor& logits) {
      std::vector<ops::SampleSpec> specs;
      for (const WantedRow& row : rows) specs.push_back(ToOps(*sequences[row.output].sample));
      std::vector<ops::SampleResult> results = ops::Sample(logits, specs);
      for (size_t i = 0; i < rows.size(); ++i) {
        StepOutput& output = outputs[rows[i].output];
        output.token = results[i].token;
        output.finite = results[i].finite;
        AppendPosition(std::move(results[i]), specs[i].logprob_mode != ops::LogprobMode::kNone,
                       &output.logprobs);
      }
    });
    ForEachBlock(scores, hidden, sequences, [&](auto rows, const at::Tensor& logits) {
      std::vector<ops::ScoreSpec> specs;
      for (const WantedRow& row : rows) {
        const ScoreWant& want = *sequences[row.output].score;
        specs.push_back(
            {want.targets[row.chunk_row], want.temperature, want.top_k, want.chosen_ids});
      }
      std::vector<ops::SampleResult> results = ops::Score(logits, specs);
      for (size_t i = 0; i < rows.size(); ++i) {
        StepOutput& output = outputs[rows[i].output];
        output.finite = output.finite && results[i].finite;
        AppendPosition(std::move(results[i]), /*with_logprob=*/true, &output.logprobs);
      }
    });
    return outputs;
  }

  template <typename Use>
  void ForEachBlock(absl::Span<const WantedRow> rows, const at::Tensor& hidden,
                    absl::Span<const StepSequence> sequences, Use use) const {
    for (size_t begin = 0; begin < rows.size(); begin += kLogitsRows) {
      const absl::Span<const WantedRow> block = rows.subspan(begin, kLogitsRows);
      at::Tensor index = at::empty({static_cast<int64_t>(block.size())}, at::kLong);
      std::vector<model::AdapterRows> adapters;
      for (size_t i = 0; i < block.size(); ++i) {
        index.data_ptr<int64_t>()[i] = block[i].row;
        AppendAdapterRows(sequences[block[i].output].adapter, static_cast<int64_t>(i),
                          static_cast<int64_t>(i) + 1, &adapters);
      }
      use(block, decoder_.Logits(hidden.index_select(0, index), adapters));
    }
  }

  const model::Decoder decoder_;
  std::vector<ops::PagedKv> kv_;
  const int64_t kv_pages_;
};

}  // namespace

int64_t CpuKvPageBytes(const model::LoadedModel& model) {
  const model::ModelConfig& config = model.config();
  const int64_t element = model.compute() == ops::ComputeDType::kBF16 ? 2 : 4;
  return 2 * config.num_layers * config.num_kv_heads * config.head_dim * kKvPageTokens * element;
}

std::unique_ptr<ModelRunner> MakeCpuModelRunner(const model::LoadedModel& model, int64_t kv_pages,
                                                int64_t max_positions) {
  return std::make_unique<CpuModelRunner>(model, kv_pages, max_positions);
}

}  // namespace dorad::engine
