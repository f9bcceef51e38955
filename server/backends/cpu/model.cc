#include "server/backends/cpu/model.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/model/weight_import.h"
#include "server/platform/check.h"
#include "server/platform/error.h"
#include "server/platform/exception.h"

namespace dorad::model {
namespace {

at::ScalarType ToScalarType(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return at::kFloat;
    case DType::kF16:
      return at::kHalf;
    case DType::kBF16:
      return at::kBFloat16;
  }
  DORAD_CHECK(false);
}

DType FromScalarType(at::ScalarType type) {
  DORAD_CHECK(type == at::kFloat || type == at::kBFloat16);
  return type == at::kFloat ? DType::kF32 : DType::kBF16;
}

at::ScalarType StorageType(const WeightSlot& slot, ops::ComputeDType compute) {
  const bool is_matrix = slot.kind == WeightKind::kMatrix ||
                         slot.kind == WeightKind::kPatchMatrix ||
                         slot.kind == WeightKind::kProjection;
  if (!is_matrix) return at::kFloat;
  if (compute == ops::ComputeDType::kBF16) return at::kBFloat16;
  return slot.dtype == DType::kBF16 ? at::kBFloat16 : at::kFloat;
}

// Alignment of each tensor in shared memory, as of ATen's allocator.
constexpr uint64_t kAlignment = 64;

// Converts blocks into their tensors.
class TensorSink final : public WeightSink {
 public:
  // `memory`: shared memory for the tensors; nullptr: they are allocated one by one.
  TensorSink(const ModelConfig& config, ops::ComputeDType compute, ModelWeights* weights,
             SealedMemory* memory)
      : config_(config), compute_(compute), weights_(*weights), memory_(memory) {
    weights_.layers.resize(config.num_layers());
    weights_.linears.resize(config.num_modules());
    for (int64_t i = 0; i < config.num_layers(); ++i) {
      const AttentionSpec& attention = config.layers[i].attention;
      const MlpSpec& mlp = config.layers[i].mlp;
      LayerWeights& layer = weights_.layers[i];
      if (const auto& delta = config.layers[i].delta) {
        weights_.linears[delta->qkv] = &layer.delta.qkv;
        weights_.linears[delta->z] = &layer.delta.z;
        weights_.linears[delta->b] = &layer.delta.b;
        weights_.linears[delta->a] = &layer.delta.a;
        weights_.linears[delta->out] = &layer.delta.out;
      } else {
        weights_.linears[attention.q] = &layer.q;
        weights_.linears[attention.k] = &layer.k;
        weights_.linears[attention.v] = &layer.v;
        weights_.linears[attention.o] = &layer.o;
      }
      weights_.linears[mlp.gate] = &layer.gate;
      weights_.linears[mlp.up] = &layer.up;
      weights_.linears[mlp.down] = &layer.down;
    }
    weights_.linears[config.head] = &weights_.head;
    if (config.vision) PlaceTower(*config.vision);
  }

  int64_t bytes() const { return bytes_; }
  // Places in the shared memory, of tensors that are as in the checkpoint.
  const std::map<std::string, PlacedTensor>& places() const { return places_; }

  absl::Status Allocate(const WeightSlots& slots) override {
    std::map<std::string, uint64_t> offsets;
    uint64_t end = 0;
    for (const auto& [name, slot] : slots) {
      const at::ScalarType type = StorageType(slot, compute_);
      offsets[name] = end;
      if (!slot.adds_one && slot.kind != WeightKind::kProjection)
        places_[name] = {FromScalarType(type), end};
      const uint64_t size = static_cast<uint64_t>(slot.num_elements()) * at::elementSize(type);
      bytes_ += static_cast<int64_t>(size);
      end += (size + kAlignment - 1) / kAlignment * kAlignment;
    }
    if (memory_ != nullptr) {
      DORAD_ASSIGN_OR_RETURN(*memory_, SealedMemory::Create("dorad-weights", end));
    }
    for (const auto& [name, slot] : slots) {
      const at::ScalarType type = StorageType(slot, compute_);
      Place(slot) = memory_ == nullptr ? at::empty(slot.shape, type)
                                       : at::from_blob(memory_->data() + offsets.at(name),
                                                       slot.shape, at::TensorOptions(type));
    }
    if (config_.tied_embeddings) weights_.head.weight_OI = weights_.embedding_VD;
    if (config_.vision) {
      at::Tensor& projection = weights_.vision.merger.projection.weight_OI;
      if (projection.defined()) projection = projection.view({projection.size(1), -1});
      at::Tensor& patch = weights_.vision.patch.weight_OI;
      patch = patch.view({config_.vision->width, config_.vision->patch_elements()});
    }
    return absl::OkStatus();
  }

  absl::StatusOr<bool> Write(const WeightSlot& slot, int64_t first_element,
                             absl::Span<const std::byte> block) override {
    const auto elements = static_cast<int64_t>(block.size() / SizeOf(slot.dtype));
    at::Tensor& whole = Place(slot);
    if (slot.kind == WeightKind::kProjection) return WriteTransposed(slot, first_element, block);
    if (FromScalarType(whole.scalar_type()) == slot.dtype) {
      std::memcpy(static_cast<std::byte*>(whole.mutable_data_ptr()) +
                      static_cast<size_t>(first_element) * SizeOf(slot.dtype),
                  block.data(), block.size());
      return true;
    }
    const at::Tensor source = at::from_blob(const_cast<std::byte*>(block.data()), {elements},
                                            at::TensorOptions(ToScalarType(slot.dtype)));
    at::Tensor target = whole.view({-1}).narrow(0, first_element, elements);
    target.copy_(source);
    return IsFinite(slot, target);
  }

 private:
  // A finite fp32 value near the limit becomes infinite in bf16. stored: contiguous.
  static bool IsFinite(const WeightSlot& slot, const at::Tensor& stored) {
    if (slot.dtype != DType::kF32 || stored.scalar_type() != at::kBFloat16) return true;
    return !HasNonFinite({static_cast<const std::byte*>(stored.const_data_ptr()), stored.nbytes()},
                         DType::kBF16);
  }

  // Elements of [in, out] into [out, in].
  bool WriteTransposed(const WeightSlot& slot, int64_t first_element,
                       absl::Span<const std::byte> block) {
    at::Tensor& whole = Place(slot);
    const at::Tensor source =
        at::from_blob(const_cast<std::byte*>(block.data()),
                      {static_cast<int64_t>(block.size() / SizeOf(slot.dtype))},
                      at::TensorOptions(ToScalarType(slot.dtype)))
            .to(whole.scalar_type());
    const at::Tensor by_input = whole.t();
    const int64_t outputs = by_input.size(1);
    for (int64_t done = 0; done < source.size(0);) {
      const int64_t row = (first_element + done) / outputs;
      const int64_t column = (first_element + done) % outputs;
      const int64_t count = std::min(outputs - column, source.size(0) - done);
      by_input.select(0, row).narrow(0, column, count).copy_(source.narrow(0, done, count));
      done += count;
    }
    return IsFinite(slot, source);
  }

  void PlaceTower(const VisionConfig& config) {
    VisionWeights& vision = weights_.vision;
    vision.blocks.resize(config.blocks.size());
    vision.deepstack_mergers.resize(config.deepstack_mergers.size());
    for (size_t i = 0; i < config.blocks.size(); ++i) {
      VisionBlockWeights& block = vision.blocks[i];
      weights_.linears[config.blocks[i].qkv] = &block.qkv;
      weights_.linears[config.blocks[i].proj] = &block.proj;
      weights_.linears[config.blocks[i].fc1] = &block.fc1;
      if (config.style.split_qkv) {
        weights_.linears[config.blocks[i].k] = &block.k;
        weights_.linears[config.blocks[i].v] = &block.v;
      }
      if (config.style.gated()) weights_.linears[config.blocks[i].up] = &block.up;
      weights_.linears[config.blocks[i].fc2] = &block.fc2;
      vision.norms.insert(vision.norms.end(), {&block.norm1, &block.norm2});
    }
    const auto place = [&](const MergerSpec& spec, MergerWeights& merger) {
      weights_.linears[spec.fc1] = &merger.fc1;
      weights_.linears[spec.fc2] = &merger.fc2;
      vision.norms.push_back(&merger.norm);
    };
    if (config.style.joins_patches) weights_.linears[config.merger.join] = &vision.merger.join;
    if (config.style.pools_patches) {
      vision.norms.insert(vision.norms.end(), {&vision.merger.norm, &vision.merger.pooled_norm});
      return;
    }
    place(config.merger, vision.merger);
    for (size_t i = 0; i < config.deepstack_mergers.size(); ++i) {
      place(config.deepstack_mergers[i], vision.deepstack_mergers[i]);
    }
    if (config.style.patch_norm) vision.norms.push_back(&vision.patch_norm);
  }

  at::Tensor& Place(const WeightSlot& slot) {
    switch (slot.kind) {
      case WeightKind::kMatrix:
        return slot.index == config_.embedding ? weights_.embedding_VD
                                               : weights_.linears[slot.index]->weight_OI;
      case WeightKind::kBias:
        return weights_.linears[slot.index]->bias_O;
      case WeightKind::kAttentionNorm:
        return weights_.layers[slot.index].attention_norm;
      case WeightKind::kMlpNorm:
        return weights_.layers[slot.index].mlp_norm;
      case WeightKind::kAttentionOutputNorm:
        return weights_.layers[slot.index].attention_output_norm;
      case WeightKind::kMlpOutputNorm:
        return weights_.layers[slot.index].mlp_output_norm;
      case WeightKind::kQueryNorm:
        return weights_.layers[slot.index].q_norm;
      case WeightKind::kKeyNorm:
        return weights_.layers[slot.index].k_norm;
      case WeightKind::kDeltaConvolution:
        return weights_.layers[slot.index].delta.convolution;
      case WeightKind::kDeltaDecay:
        return weights_.layers[slot.index].delta.decay_log;
      case WeightKind::kDeltaTimeBias:
        return weights_.layers[slot.index].delta.time_bias;
      case WeightKind::kDeltaNorm:
        return weights_.layers[slot.index].delta.norm;
      case WeightKind::kFinalNorm:
        return weights_.final_norm;
      case WeightKind::kPatchMatrix:
        return weights_.vision.patch.weight_OI;
      case WeightKind::kPatchBias:
        return weights_.vision.patch.bias_O;
      case WeightKind::kPositionTable:
        return weights_.vision.table_PD;
      case WeightKind::kTowerNorm:
        return weights_.vision.norms[slot.index]->weight;
      case WeightKind::kTowerNormBias:
        return weights_.vision.norms[slot.index]->bias;
      case WeightKind::kProjection:
        return weights_.vision.merger.projection.weight_OI;
    }
    DORAD_CHECK(false);
  }

  const ModelConfig& config_;
  const ops::ComputeDType compute_;
  ModelWeights& weights_;
  SealedMemory* const memory_;
  std::map<std::string, PlacedTensor> places_;
  int64_t bytes_ = 0;
};

}  // namespace

LoadedModel::LoadedModel(ModelConfig config, ops::ComputeDType compute,
                         ops::NormOptions norm_options)
    : config_(std::move(config)),
      compute_(compute),
      norm_options_(norm_options),
      modules_(MakeModules(config_)),
      squared_norms_(modules_.size()) {}

absl::StatusOr<std::unique_ptr<LoadedModel>> LoadedModel::Load(const std::string& dir,
                                                               ModelConfig config,
                                                               ops::ComputeDType compute,
                                                               ops::NormOptions norm_options,
                                                               bool shareable) {
  std::unique_ptr<LoadedModel> model(new LoadedModel(std::move(config), compute, norm_options));
  try {
    TensorSink sink(model->config_, compute, &model->weights_,
                    shareable ? &model->memory_ : nullptr);
    DORAD_ASSIGN_OR_RETURN(ImportedCheckpoint imported, ImportWeights(dir, model->config_, sink));
    model->bytes_ = sink.bytes();
    model->num_parameters_ = imported.num_parameters;
    model->digest_ = std::move(imported.digest);
    if (shareable) {
      DORAD_RETURN_IF_ERROR(model->memory_.Seal());
      model->layout_ = {model->digest_,
                        LayOut(imported.tensors, sink.places()),
                        {model->memory_.size()},
                        /*device_uuid=*/""};
    }
    for (const DType dtype : imported.dtypes) {
      model->checkpoint_dtypes_.push_back(ToScalarType(dtype));
    }
  } catch (...) {  // ATen's allocator throws
    return StatusOfException(absl::StrCat("loading the weights of ", dir), "INTERNAL");
  }
  return model;
}

int64_t LoadedModel::norm_cache_bytes() const {
  absl::MutexLock lock(&mu_);
  int64_t bytes = 0;
  for (const at::Tensor& norms : squared_norms_) {
    if (norms.defined()) bytes += static_cast<int64_t>(norms.nbytes());
  }
  return bytes;
}

int LoadedModel::norm_cache_entries() const {
  absl::MutexLock lock(&mu_);
  int entries = 0;
  for (const at::Tensor& norms : squared_norms_) entries += norms.defined() ? 1 : 0;
  return entries;
}

at::Tensor LoadedModel::Weight(int module_id) const {
  DORAD_CHECK(module_id >= 0 && module_id < modules_.size());
  if (module_id == config_.embedding) return weights_.embedding_VD;
  return weights_.linears[module_id]->weight_OI;
}

at::Tensor LoadedModel::SquaredNorms(int module_id) {
  DORAD_CHECK(module_id >= 0 && module_id < modules_.size());
  {
    absl::MutexLock lock(&mu_);
    const auto free = [this, module_id]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
      return computing_.count(module_id) == 0;
    };
    mu_.Await(absl::Condition(&free));
    if (squared_norms_[module_id].defined()) return squared_norms_[module_id];
    computing_.insert(module_id);
  }
  // Outside the lock: callers for other modules need not wait.
  const auto axis = module_id == config_.embedding ? ops::NormAxis::kCols : ops::NormAxis::kRows;
  at::Tensor norms;
  const auto end = [&]() {
    absl::MutexLock lock(&mu_);
    squared_norms_[module_id] = norms;
    computing_.erase(module_id);
  };
  try {
    norms = ops::BaseSquaredNorms(Weight(module_id), axis, norm_options_);
  } catch (...) {
    end();  // the next caller tries again
    throw;
  }
  end();
  return norms;
}

at::ScalarType LoadedModel::CheckpointDtype(int module_id) const {
  DORAD_CHECK(module_id >= 0 && module_id < modules_.size());
  return checkpoint_dtypes_[module_id];
}

}  // namespace dorad::model
