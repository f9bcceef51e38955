#include "server/cuda/cuda_model_runner.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "server/base/error.h"
#include "server/cuda/batch.h"
#include "server/cuda/decode_batch.h"
#include "server/cuda/decode_graphs.h"
#include "server/cuda/decoder.h"
#include "server/engine/row_sampling.h"
#include "server/engine/step_batch.h"

namespace dorad::cuda {
namespace {

using engine::StepOutput;
using engine::StepSequence;
using engine::WantedRow;

constexpr char kStep[] = "the step";

// Rows of logits on the device at once: a whole decode step's.
constexpr int64_t kDeviceLogitsRows = DecodeBatch::kSizes.back();

class CudaModelRunner final : public engine::ModelRunner {
 public:
  CudaModelRunner(const CudaModel* model, const RunnerOptions& options, MemoryLedger* ledger,
                  Stream stream, AdapterSlots slots)
      : vocab_size_(model->config().vocab_size),
        options_(options),
        stream_(std::move(stream)),
        slots_(std::move(slots)),
        batch_(ledger, &slots_, kDeviceLogitsRows) {}

  absl::Status Prepare(const CudaModel* model, MemoryLedger* ledger) {
    CudaDecoder::Options options;
    options.kv_pages = options_.kv_pages;
    options.max_positions = options_.max_positions;
    options.max_rows = std::max(options_.max_rows, kDeviceLogitsRows);
    options.max_logits_rows = kDeviceLogitsRows;
    DORAD_ASSIGN_OR_RETURN(decoder_, CudaDecoder::Create(model, options, ledger, &stream_));
    DORAD_ASSIGN_OR_RETURN(logits_, PinnedBuffer::Allocate(engine::kLogitsRows * vocab_size_ * 4));
    const int64_t pages =
        (options_.max_positions + engine::kKvPageTokens - 1) / engine::kKvPageTokens;
    DORAD_ASSIGN_OR_RETURN(DecodeBatch decode,
                           DecodeBatch::Create(&slots_, pages, decoder_->spare_page(), ledger));
    decode_.emplace(std::move(decode));
    // Harmless contents for the passes that captures begin with.
    DORAD_RETURN_IF_ERROR(decode_->Fill(stream_));
    DORAD_ASSIGN_OR_RETURN(DecodeGraphs graphs, DecodeGraphs::Capture(stream_, [this](int size) {
                             return LaunchDecode(size);
                           }));
    graphs_.emplace(std::move(graphs));
    return absl::OkStatus();
  }

  int64_t kv_pages() const override { return options_.kv_pages; }

  absl::StatusOr<std::vector<StepOutput>> Run(absl::Span<const StepSequence> sequences) override {
    const engine::StepBatch batch(sequences);
    std::vector<StepOutput> outputs(sequences.size());
    if (DecodeBatch::Takes(sequences)) {
      DORAD_RETURN_IF_ERROR(decode_->Upload(batch, sequences, stream_));
      DORAD_RETURN_IF_ERROR(graphs_->Launch(DecodeBatch::SizeFor(batch.rows), stream_));
      DORAD_RETURN_IF_ERROR(
          OnHost(batch.samples, decode_logits_, sequences, engine::SampleRows, &outputs));
    } else {
      DORAD_RETURN_IF_ERROR(batch_.Upload(batch, sequences, stream_));
      DORAD_RETURN_IF_ERROR(decoder_->Forward(batch_.rows(), batch_.linear()));
      DORAD_RETURN_IF_ERROR(
          ForEachBlock(batch_.samples(), sequences, engine::SampleRows, &outputs));
      DORAD_RETURN_IF_ERROR(ForEachBlock(batch_.scores(), sequences, engine::ScoreRows, &outputs));
    }
    DORAD_RETURN_IF_ERROR(stream_.Synchronize(kStep));
    return outputs;
  }

 private:
  // A decode step of `size` rows over the fixed buffers.
  absl::Status LaunchDecode(int size) {
    const LinearRows linear = decode_->linear(size);
    DORAD_RETURN_IF_ERROR(decoder_->Forward(decode_->rows(size), linear));
    DORAD_ASSIGN_OR_RETURN(decode_logits_, decoder_->Logits({{}, nullptr, linear}));
    return absl::OkStatus();
  }

  template <typename Use>
  absl::Status ForEachBlock(const std::vector<LogitsBlock>& blocks,
                            absl::Span<const StepSequence> sequences, Use use,
                            std::vector<StepOutput>* outputs) {
    for (const LogitsBlock& block : blocks) {
      DORAD_ASSIGN_OR_RETURN(const float* logits, decoder_->Logits(block));
      DORAD_RETURN_IF_ERROR(OnHost(block.wanted, logits, sequences, use, outputs));
    }
    return absl::OkStatus();
  }

  // Brings rows of logits to the host, some at a time, and uses them there.
  template <typename Use>
  absl::Status OnHost(absl::Span<const WantedRow> wanted, const float* logits,
                      absl::Span<const StepSequence> sequences, Use use,
                      std::vector<StepOutput>* outputs) {
    for (size_t begin = 0; begin < wanted.size(); begin += engine::kLogitsRows) {
      const absl::Span<const WantedRow> rows = wanted.subspan(begin, engine::kLogitsRows);
      DORAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(logits_.as<>(), logits + begin * vocab_size_,
                                                 rows.size() * vocab_size_ * sizeof(float),
                                                 cudaMemcpyDeviceToHost, stream_.get()),
                                 kStep);
      DORAD_RETURN_IF_ERROR(stream_.Synchronize(kStep));
      use(rows, logits_.as<float>(), vocab_size_, sequences, outputs);
    }
    return absl::OkStatus();
  }

  const int64_t vocab_size_;
  const RunnerOptions options_;
  const Stream stream_;
  AdapterSlots slots_;
  DeviceBatch batch_;
  std::unique_ptr<CudaDecoder> decoder_;
  PinnedBuffer logits_;  // [kLogitsRows, vocabulary] fp32
  std::optional<DecodeBatch> decode_;
  const float* decode_logits_ = nullptr;  // device: of a decode step's rows
  std::optional<DecodeGraphs> graphs_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<engine::ModelRunner>> MakeCudaModelRunner(
    const CudaModel* model, const RunnerOptions& options, MemoryLedger* ledger) {
  DORAD_ASSIGN_OR_RETURN(Stream stream, Stream::Create());
  // Every sequence of a step may have an adapter of its own.
  DORAD_ASSIGN_OR_RETURN(
      AdapterSlots slots,
      AdapterSlots::Create(static_cast<int>(options.max_rows), model->modules().size(), ledger));
  auto runner = std::make_unique<CudaModelRunner>(model, options, ledger, std::move(stream),
                                                  std::move(slots));
  DORAD_RETURN_IF_ERROR(runner->Prepare(model, ledger));
  return runner;
}

}  // namespace dorad::cuda
