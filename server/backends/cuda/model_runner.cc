#include "server/backends/cuda/model_runner.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <utility>
#include <vector>

#include "server/backends/cuda/batch.h"
#include "server/backends/cuda/decode_batch.h"
#include "server/backends/cuda/decode_graphs.h"
#include "server/backends/cuda/decoder.h"
#include "server/backends/cuda/sampler.h"
#include "server/backends/cuda/unaccounted_memory.h"
#include "server/backends/cuda/vision_encoder.h"
#include "server/engine/kv_needs.h"
#include "server/engine/step_batch.h"
#include "server/platform/error.h"
#include "server/platform/log.h"

namespace dorad::cuda {
namespace {

using engine::StepOutput;
using engine::StepSequence;

// Rows of logits on the device at once: a whole decode step's.
constexpr int64_t kDeviceLogitsRows = DecodeBatch::kSizes.back();

const CudaAdapterWeights* WeightsOf(const adapter::LoadedAdapter& adapter) {
  return static_cast<const CudaAdapterWeights*>(&adapter.weights());
}

class CudaModelRunner final : public engine::ModelRunner, private engine::KvChunks {
 public:
  CudaModelRunner(const RunnerOptions& options, MemoryLedger* ledger, Stream stream,
                  AdapterSlots slots, const model::ModelConfig& model)
      : options_(options),
        stream_(std::move(stream)),
        slots_(std::move(slots)),
        kinds_(model),
        batch_(ledger, &slots_, kDeviceLogitsRows, kinds_) {}

  absl::Status Prepare(const CudaModel* model, MemoryLedger* ledger) {
    UnaccountedMemory untold(ledger);
    DORAD_RETURN_IF_ERROR(untold.Look());
    DORAD_RETURN_IF_ERROR(MakeParts(model, ledger, &untold));
    DORAD_RETURN_IF_ERROR(untold.Look());
    if (untold.of_others() != 0) {
      LogInfo("other processes allocated GPU memory during graph capture",
              {{"bytes", untold.of_others()}, {"counted_as_graphs", untold.bytes()}});
    }
    return ledger->Reserve("graphs", untold.bytes(), MemoryLedger::Source::kGranted);
  }

  absl::Status MakeParts(const CudaModel* model, MemoryLedger* ledger, UnaccountedMemory* untold) {
    CudaDecoder::Options options;
    options.kv_pages = options_.kv_pages;
    options.max_positions = options_.max_positions;
    options.max_rows = std::max(options_.max_rows, kDeviceLogitsRows);
    options.max_logits_rows = kDeviceLogitsRows;
    DORAD_ASSIGN_OR_RETURN(decoder_, CudaDecoder::Create(model, options, ledger, &stream_));
    DORAD_ASSIGN_OR_RETURN(Sampler sampler,
                           Sampler::Create(model->config().vocab_size, kDeviceLogitsRows,
                                           model->isa(), ledger, &stream_));
    sampler_.emplace(std::move(sampler));
    if (model->config().vision) {
      DORAD_ASSIGN_OR_RETURN(encoder_, VisionEncoder::Create(model, &slots_, ledger, &stream_));
      first_tower_module_ = model->config().head + 1;
    }
    // Without graphs, decode steps run as ordinary steps.
    if (!decoder_->is_capturable()) return absl::OkStatus();
    const int64_t pages = engine::BlocksOf(options_.max_positions);
    DORAD_ASSIGN_OR_RETURN(DecodeBatch decode, DecodeBatch::Create(&slots_, pages, kinds_, ledger));
    decode_.emplace(std::move(decode));
    DORAD_RETURN_IF_ERROR(untold->Look());
    // Valid input for the captures' first passes.
    DORAD_RETURN_IF_ERROR(decode_->Fill(stream_));
    const auto launch = [this](const DecodeGraphs::Kind& kind) { return LaunchDecode(kind); };
    const bool with_guesses = kinds_.state_pages == 0;  // a recurrence takes none
    DORAD_ASSIGN_OR_RETURN(
        DecodeGraphs graphs,
        DecodeGraphs::Capture(stream_, with_guesses, launch, [untold] { return untold->Look(); }));
    graphs_.emplace(std::move(graphs));
    return absl::OkStatus();
  }

  int64_t kv_pages() const override { return options_.kv_pages; }
  std::vector<int64_t> windows() const override { return kinds_.windows; }
  int64_t state_pages() const override { return kinds_.state_pages; }

  engine::KvChunks* kv_chunks() override { return this; }

  int max_steps_in_flight() const override { return kStepsInFlight; }

  absl::Status Begin(absl::Span<const StepSequence> sequences) override {
    if (options_.gaps != nullptr) options_.gaps->BeginStep(stream_);
    absl::Status status = BeginStep(sequences);
    if (!status.ok()) {
      if (options_.gaps != nullptr) options_.gaps->EndStep();
      AwaitAfterFailure();
    }
    return status;
  }

  absl::StatusOr<std::vector<StepOutput>> Finish() override {
    absl::StatusOr<std::vector<StepOutput>> outputs = sampler_->Finish();
    if (options_.gaps != nullptr) options_.gaps->EndStep();
    if (!outputs.ok()) AwaitAfterFailure();
    return outputs;
  }

  bool ChangesImages(const adapter::LoadedAdapter& adapter) const override {
    const auto& modules = WeightsOf(adapter)->modules();
    return encoder_ != nullptr &&
           std::any_of(modules.begin() + first_tower_module_, modules.end(),
                       [](const kernels::DoraFactors& factors) { return factors.rank > 0; });
  }

  absl::StatusOr<std::vector<std::shared_ptr<const engine::ImageFeatures>>> EncodeImages(
      absl::Span<const engine::Image* const> images, const adapter::LoadedAdapter* adapter,
      bool alone) override {
    const auto features =
        encoder_->Encode(images, adapter == nullptr ? nullptr : WeightsOf(*adapter), alone);
    if (features.ok()) return {{features->begin(), features->end()}};
    AwaitAfterFailure();
    encoder_->Stop();
    return features.status();
  }

  absl::StatusOr<int64_t> ReleaseKv(absl::Span<const int32_t> keep) override {
    DORAD_RETURN_IF_ERROR(stream_.Synchronize("going to sleep"));
    if (encoder_ != nullptr) encoder_->Stop();
    return decoder_->ReleaseKv(keep);
  }

  absl::Status RestoreKv() override { return decoder_->RestoreKv(); }

 private:
  // --- engine::KvChunks.
  int64_t pages() const override { return kinds_.kv.chunk_pages(); }
  int64_t lead() const override { return kSparePages; }
  int64_t bytes() const override { return kinds_.kv.chunk_bytes(); }
  // Kernels of the last finished step may still run after its results.
  void Unmap(int32_t chunk) override {
    if (!stream_.Synchronize("releasing KV pages").ok()) AwaitAfterFailure();
    decoder_->kv_memory().Unmap(chunk);
  }
  absl::Status Map(int32_t chunk) override { return decoder_->kv_memory().Map(chunk); }

  // Waits for all launched work after a failed step. After an illegal access or a similar error
  // every CUDA call fails until the process restarts: ending is better than failing every request.
  static void AwaitAfterFailure() {
    const cudaError_t error = cudaDeviceSynchronize();
    if (error == cudaSuccess) return;
    LogError("the GPU cannot be used any more: ending", {{"error", cudaGetErrorString(error)}});
    std::abort();
  }

  absl::Status BeginStep(absl::Span<const StepSequence> sequences) {
    const engine::StepBatch batch(sequences);
    const SampledTokens& previous = sampler_->sampled();
    DORAD_RETURN_IF_ERROR(CopyPages(sequences));
    DORAD_RETURN_IF_ERROR(sampler_->Begin(batch, sequences));
    StepForm form;
    form.shares = SharesReads(batch, sequences, static_cast<int64_t>(kinds_.windows.size()),
                              decoder_->least_shared_positions());
    // Steps with so much to read that sharing pays hide their launches.
    if (graphs_.has_value() && !form.shares && DecodeBatch::Takes(sequences)) {
      DORAD_RETURN_IF_ERROR(decode_->Upload(batch, sequences, previous, stream_));
      const bool guesses = batch.rows > static_cast<int64_t>(sequences.size());
      DORAD_RETURN_IF_ERROR(graphs_->Launch(
          {DecodeBatch::SizeFor(batch.rows), IsAdapted(batch.adapters), guesses}, stream_));
      DORAD_RETURN_IF_ERROR(sampler_->Sample(batch.rows, decode_logits_));
      return sampler_->End();
    }
    DORAD_RETURN_IF_ERROR(batch_.Upload(batch, sequences, stream_, previous));
    form.single_rows = batch_.images().empty() &&
                       std::all_of(sequences.begin(), sequences.end(),
                                   [](const StepSequence& s) { return s.tokens.size() <= 1; });
    DORAD_RETURN_IF_ERROR(decoder_->Forward(batch_.rows(), batch_.linear(), batch_.images(), form));
    for (const LogitsBlock& block : batch_.samples()) {
      DORAD_ASSIGN_OR_RETURN(const float* logits, decoder_->Logits(block));
      DORAD_RETURN_IF_ERROR(sampler_->Sample(block.linear.rows, logits));
    }
    for (const LogitsBlock& block : batch_.scores()) {
      DORAD_ASSIGN_OR_RETURN(const float* logits, decoder_->Logits(block));
      DORAD_RETURN_IF_ERROR(sampler_->Score(block.linear.rows, logits));
    }
    return sampler_->End();
  }

  absl::Status CopyPages(absl::Span<const StepSequence> sequences) {
    for (const StepSequence& s : sequences) {
      const int32_t* const to =
          s.pages.data() + s.position / engine::kKvPageTokens * kinds_.windows.size();
      for (size_t i = 0; i < s.copy_from.size(); ++i) {
        DORAD_RETURN_IF_ERROR(decoder_->kv_memory().CopyPage(s.copy_from[i] + kSparePages,
                                                             to[i] + kSparePages, stream_));
      }
    }
    return absl::OkStatus();
  }

  // A decode step over the fixed buffers.
  absl::Status LaunchDecode(const DecodeGraphs::Kind& kind) {
    const LinearRows linear = decode_->linear(kind.size, kind.adapted);
    StepForm form;
    form.single_rows = !kind.guesses;
    form.tiles = false;
    DORAD_RETURN_IF_ERROR(decoder_->Forward(decode_->rows(kind.size), linear, /*images=*/{}, form));
    DORAD_ASSIGN_OR_RETURN(decode_logits_, decoder_->Logits({{}, nullptr, linear}));
    return absl::OkStatus();
  }

  const RunnerOptions options_;
  const Stream stream_;
  AdapterSlots slots_;
  const RowKinds kinds_;
  int first_tower_module_ = 0;
  std::unique_ptr<VisionEncoder> encoder_;  // nullptr: no tower
  DeviceBatch batch_;
  std::optional<Sampler> sampler_;
  std::unique_ptr<CudaDecoder> decoder_;
  // For decode steps; none if the decoder cannot be captured.
  std::optional<DecodeBatch> decode_;
  const float* decode_logits_ = nullptr;  // device: of a decode step's rows
  std::optional<DecodeGraphs> graphs_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<engine::ModelRunner>> MakeCudaModelRunner(
    const CudaModel* model, const RunnerOptions& options, MemoryLedger* ledger) {
  DORAD_ASSIGN_OR_RETURN(Stream stream, Stream::Create(options.priority));
  DORAD_ASSIGN_OR_RETURN(AdapterSlots slots,
                         AdapterSlots::Create(static_cast<int>(options.max_sequences),
                                              model->modules().size(), ledger));
  auto runner = std::make_unique<CudaModelRunner>(options, ledger, std::move(stream),
                                                  std::move(slots), model->config());
  DORAD_RETURN_IF_ERROR(runner->Prepare(model, ledger));
  return runner;
}

}  // namespace dorad::cuda
