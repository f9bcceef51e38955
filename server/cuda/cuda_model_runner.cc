#include "server/cuda/cuda_model_runner.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "server/base/error.h"
#include "server/cuda/batch.h"
#include "server/cuda/decoder.h"
#include "server/engine/row_sampling.h"
#include "server/engine/step_batch.h"

namespace dorad::cuda {
namespace {

using engine::StepOutput;
using engine::StepSequence;

constexpr char kStep[] = "the step";

class CudaModelRunner final : public engine::ModelRunner {
 public:
  CudaModelRunner(const CudaModel* model, const RunnerOptions& options, MemoryLedger* ledger,
                  Stream stream, AdapterSlots slots)
      : vocab_size_(model->config().vocab_size),
        options_(options),
        stream_(std::move(stream)),
        batch_(ledger, std::move(slots), engine::kLogitsRows) {}

  absl::Status Allocate(const CudaModel* model, MemoryLedger* ledger) {
    CudaDecoder::Options options;
    options.kv_pages = options_.kv_pages;
    options.max_positions = options_.max_positions;
    options.max_rows = options_.max_rows;
    options.max_logits_rows = engine::kLogitsRows;
    DORAD_ASSIGN_OR_RETURN(decoder_, CudaDecoder::Create(model, options, ledger, &stream_));
    DORAD_ASSIGN_OR_RETURN(logits_, PinnedBuffer::Allocate(engine::kLogitsRows * vocab_size_ * 4));
    return absl::OkStatus();
  }

  int64_t kv_pages() const override { return options_.kv_pages; }

  absl::StatusOr<std::vector<StepOutput>> Run(absl::Span<const StepSequence> sequences) override {
    const engine::StepBatch batch(sequences);
    DORAD_RETURN_IF_ERROR(batch_.Upload(batch, sequences, stream_));
    DORAD_RETURN_IF_ERROR(decoder_->Forward(batch_));
    std::vector<StepOutput> outputs(sequences.size());
    DORAD_RETURN_IF_ERROR(ForEachBlock(batch_.samples(), sequences, engine::SampleRows, &outputs));
    DORAD_RETURN_IF_ERROR(ForEachBlock(batch_.scores(), sequences, engine::ScoreRows, &outputs));
    DORAD_RETURN_IF_ERROR(stream_.Synchronize(kStep));
    return outputs;
  }

 private:
  template <typename Use>
  absl::Status ForEachBlock(const std::vector<LogitsBlock>& blocks,
                            absl::Span<const StepSequence> sequences, Use use,
                            std::vector<StepOutput>* outputs) {
    for (const LogitsBlock& block : blocks) {
      DORAD_ASSIGN_OR_RETURN(const float* logits, decoder_->Logits(block));
      DORAD_RETURN_IF_CUDA_ERROR(
          cudaMemcpyAsync(logits_.as<>(), logits, block.linear.rows * vocab_size_ * sizeof(float),
                          cudaMemcpyDeviceToHost, stream_.get()),
          kStep);
      DORAD_RETURN_IF_ERROR(stream_.Synchronize(kStep));
      use(block.wanted, logits_.as<float>(), vocab_size_, sequences, outputs);
    }
    return absl::OkStatus();
  }

  const int64_t vocab_size_;
  const RunnerOptions options_;
  const Stream stream_;
  DeviceBatch batch_;
  std::unique_ptr<CudaDecoder> decoder_;
  PinnedBuffer logits_;  // [kLogitsRows, vocabulary] fp32
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
  DORAD_RETURN_IF_ERROR(runner->Allocate(model, ledger));
  return runner;
}

}  // namespace dorad::cuda
