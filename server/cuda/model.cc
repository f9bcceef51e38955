#include "server/cuda/model.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/random/fill.h"
#include "server/base/check.h"
#include "server/base/error.h"
#include "server/cuda/elements.h"
#include "server/cuda/staging.h"
#include "server/model/weight_import.h"

namespace dorad::cuda {

using model::WeightKind;
using model::WeightSlot;

// Converts blocks on their way to where they belong.
class CudaModel::Sink final : public model::WeightSink {
 public:
  static absl::StatusOr<Sink> Create(CudaModel* model, MemoryLedger* ledger) {
    DORAD_ASSIGN_OR_RETURN(Stream stream, Stream::Create());
    DORAD_ASSIGN_OR_RETURN(StagingRing ring, StagingRing::Create(kPieceBytes));
    return Sink(model, ledger, std::move(stream), std::move(ring));
  }

  absl::Status Allocate(const model::WeightSlots& slots) override {
    Layout layout;
    Place(layout, 0);
    DORAD_ASSIGN_OR_RETURN(model_.memory_,
                           DeviceBuffer::Allocate(ledger_, "weights", layout.bytes()));
    Layout again;
    Place(again, reinterpret_cast<uintptr_t>(model_.memory_.as<>()));
    DORAD_CHECK(again.bytes() == layout.bytes());
    for (const auto& [name, slot] : slots) DORAD_CHECK(places_.count(KeyOf(slot)) == 1);
    return absl::OkStatus();
  }

  absl::StatusOr<bool> Write(const WeightSlot& slot, int64_t first_element,
                             absl::Span<const std::byte> block) override {
    const bool matrix = slot.kind == WeightKind::kMatrix;
    const size_t from_size = SizeOf(slot.dtype);
    const int64_t to_size = matrix ? sizeof(__nv_bfloat16) : sizeof(float);
    bool finite = true;
    const auto fill = [&](int64_t first, int64_t count, std::byte* out) {
      const auto part = block.subspan(first * from_size, count * from_size);
      if (!matrix) {
        ToFloat(slot.dtype, part, reinterpret_cast<float*>(out));
        return;
      }
      ToBf16(slot.dtype, part, reinterpret_cast<__nv_bfloat16*>(out));
      // A finite fp32 value near the limit becomes infinite in bf16.
      if (slot.dtype == DType::kF32) {
        const absl::Span<const std::byte> rounded(out, static_cast<size_t>(count * to_size));
        finite = finite && !model::HasNonFinite(rounded, DType::kBF16);
      }
    };
    DORAD_RETURN_IF_ERROR(ring_.Upload(places_.at(KeyOf(slot)) + first_element * to_size,
                                       static_cast<int64_t>(block.size() / from_size), to_size,
                                       fill, stream_));
    return finite;
  }

  absl::Status Randomise(uint32_t seed) {
    for (const auto& [key, place] : places_) {
      const auto [kind, index] = key;
      const adapter::BaseModule& module =
          model_.modules_
              .all()[kind == WeightKind::kMatrix || kind == WeightKind::kBias ? index : 0];
      cudaError_t error = cudaSuccess;
      switch (kind) {
        case WeightKind::kMatrix:
          error = kernels::FillRandom(reinterpret_cast<__nv_bfloat16*>(place),
                                      module.rows * module.cols, 0.035f, seed++, stream_.get());
          break;
        case WeightKind::kBias:
          error = kernels::FillConstant(reinterpret_cast<float*>(place), module.rows, 0.0f,
                                        stream_.get());
          break;
        case WeightKind::kQueryNorm:
        case WeightKind::kKeyNorm:
          error = kernels::FillConstant(reinterpret_cast<float*>(place), config_.head_dim, 1.0f,
                                        stream_.get());
          break;
        default:
          error = kernels::FillConstant(reinterpret_cast<float*>(place), config_.hidden_size, 1.0f,
                                        stream_.get());
          break;
      }
      DORAD_RETURN_IF_CUDA_ERROR(error, "making random weights");
    }
    return absl::OkStatus();
  }

  absl::Status Finish() { return stream_.Synchronize("loading weights"); }

 private:
  static constexpr int64_t kPieceBytes = 4 << 20;

  Sink(CudaModel* model, MemoryLedger* ledger, Stream stream, StagingRing ring)
      : model_(*model),
        config_(model->config_),
        ledger_(ledger),
        stream_(std::move(stream)),
        ring_(std::move(ring)) {}

  using Key = std::pair<WeightKind, int>;
  static char* At(uintptr_t base, int64_t offset) {
    return reinterpret_cast<char*>(base + static_cast<uintptr_t>(offset));
  }
  static Key KeyOf(const WeightSlot& slot) { return {slot.kind, slot.index}; }

  // Lays the weights out behind `base` and points the model at them. Called with 0 first, to
  // learn the size.
  void Place(Layout& layout, uintptr_t base) {
    const auto vector = [&](WeightKind kind, int index, int64_t size) {
      char* at = At(base, layout.Add(size * 4));
      places_[{kind, index}] = at;
      return reinterpret_cast<const float*>(at);
    };
    model_.layers_.resize(config_.num_layers);
    for (int64_t i = 0; i < config_.num_layers; ++i) {
      LayerWeights& layer = model_.layers_[i];
      const auto id = [i](model::LayerModule module) { return model::LayerModuleId(i, module); };
      layer.qkv = Group(layout, base, id(model::kQ), 3, config_.qkv_bias);
      layer.o = Group(layout, base, id(model::kO), 1, config_.output_bias);
      layer.gate_up = Group(layout, base, id(model::kGate), 2, config_.mlp_bias);
      layer.down = Group(layout, base, id(model::kDown), 1, config_.mlp_bias);
      const auto index = static_cast<int>(i);
      layer.input_norm = vector(WeightKind::kInputNorm, index, config_.hidden_size);
      layer.post_attention_norm =
          vector(WeightKind::kPostAttentionNorm, index, config_.hidden_size);
      if (config_.qk_norm) {
        layer.q_norm = vector(WeightKind::kQueryNorm, index, config_.head_dim);
        layer.k_norm = vector(WeightKind::kKeyNorm, index, config_.head_dim);
      }
    }
    const int embedding = model::EmbeddingId(config_);
    const int head = model::HeadId(config_);
    (void)Group(layout, base, embedding, 1, /*bias=*/false);
    if (config_.tied_embeddings) {
      model_.matrices_[head] = model_.matrices_[embedding];
      model_.head_ = {model_.matrices_[head], nullptr, config_.hidden_size,
                      config_.vocab_size,     head,    {config_.vocab_size}};
    } else {
      model_.head_ = Group(layout, base, head, 1, /*bias=*/false);
    }
    model_.final_norm_ = vector(WeightKind::kFinalNorm, 0, config_.hidden_size);
  }

  LinearGroup Group(Layout& layout, uintptr_t base, int first, int count, bool bias) {
    LinearGroup group;
    group.first_module = first;
    for (int id = first; id < first + count; ++id) {
      const adapter::BaseModule& module = model_.modules_.all()[id];
      group.in = module.cols;
      group.out += module.rows;
      group.outs.push_back(module.rows);
    }
    char* weight = At(base, layout.Add(group.out * group.in * 2));
    group.weight = reinterpret_cast<const __nv_bfloat16*>(weight);
    char* biases = bias ? At(base, layout.Add(group.out * 4)) : nullptr;
    group.bias = reinterpret_cast<const float*>(biases);
    for (int i = 0; i < count; ++i) {
      places_[{WeightKind::kMatrix, first + i}] = weight;
      model_.matrices_[first + i] = reinterpret_cast<const __nv_bfloat16*>(weight);
      weight += group.outs[i] * group.in * 2;
      if (!bias) continue;
      places_[{WeightKind::kBias, first + i}] = biases;
      biases += group.outs[i] * 4;
    }
    return group;
  }

  CudaModel& model_;
  const model::ModelConfig& config_;
  MemoryLedger* const ledger_;
  Stream stream_;
  std::map<Key, char*> places_;
  StagingRing ring_;
};

CudaModel::CudaModel(model::ModelConfig config)
    : config_(std::move(config)), modules_(ListModules(config_)), matrices_(modules_.size()) {}

absl::StatusOr<std::unique_ptr<CudaModel>> CudaModel::Load(const std::string& dir,
                                                           model::ModelConfig config,
                                                           MemoryLedger* ledger) {
  std::unique_ptr<CudaModel> model(new CudaModel(std::move(config)));
  DORAD_ASSIGN_OR_RETURN(Sink sink, Sink::Create(model.get(), ledger));
  DORAD_ASSIGN_OR_RETURN(model::ImportedCheckpoint imported,
                         model::ImportWeights(dir, model->config_, sink));
  DORAD_RETURN_IF_ERROR(sink.Finish());
  model->dtypes_ = std::move(imported.dtypes);
  model->digest_ = std::move(imported.digest);
  model->num_parameters_ = imported.num_parameters;
  return model;
}

absl::StatusOr<std::unique_ptr<CudaModel>> CudaModel::Random(model::ModelConfig config,
                                                             uint32_t seed, MemoryLedger* ledger) {
  std::unique_ptr<CudaModel> model(new CudaModel(std::move(config)));
  DORAD_ASSIGN_OR_RETURN(Sink sink, Sink::Create(model.get(), ledger));
  DORAD_RETURN_IF_ERROR(sink.Allocate({}));
  DORAD_RETURN_IF_ERROR(sink.Randomise(seed));
  DORAD_RETURN_IF_ERROR(sink.Finish());
  model->dtypes_.assign(model->matrices_.size(), DType::kBF16);
  model->digest_ = absl::StrCat("random-", seed);
  for (const adapter::BaseModule& module : model->modules_.all()) {
    model->num_parameters_ += module.rows * module.cols;
  }
  return model;
}

}  // namespace dorad::cuda
