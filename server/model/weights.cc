#include "server/model/weights.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/check.h"
#include "server/base/error.h"
#include "server/model/checkpoint.h"
#include "server/model/tensor_table.h"
#include "server/ops/torch_error.h"

namespace dorad::model {
namespace {

using Slots = std::map<std::string, TensorSlot>;

constexpr char kEmbedding[] = "model.embed_tokens.weight";
constexpr char kHead[] = "lm_head.weight";

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

at::ScalarType StorageType(const TensorSlot& slot, DType dtype, ops::ComputeDType compute) {
  if (slot.module_id < 0) return at::kFloat;
  if (compute == ops::ComputeDType::kBF16) return at::kBFloat16;
  return dtype == DType::kBF16 ? at::kBFloat16 : at::kFloat;
}

// Tensors that take no part in the result: the rotary frequencies that old checkpoints carry, and
// the head of a tied model (whose bytes must then be the embedding's).
bool IsTolerated(const std::string& name, const ModelConfig& config) {
  return absl::EndsWith(name, "rotary_emb.inv_freq") || (config.tied_embeddings && name == kHead);
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

std::vector<Violation> CheckTensorList(const Checkpoint& checkpoint, const Slots& slots,
                                       const ModelConfig& config) {
  std::vector<Violation> violations;
  for (const auto& [name, slot] : slots) {
    const auto found = checkpoint.tensors().find(name);
    if (found == checkpoint.tensors().end()) {
      const char* hint = name == kHead ? " (tie_word_embeddings is false)" : "";
      violations.push_back(
          {name, "MODEL_TENSOR_MISSING",
           absl::StrCat("is missing", hint, ": expected ", ShapeText(slot.shape))});
    } else if (found->second.shape != slot.shape) {
      violations.push_back({name, "MODEL_TENSOR_SHAPE",
                            absl::StrCat("has shape ", ShapeText(found->second.shape),
                                         ", expected ", ShapeText(slot.shape))});
    }
  }
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    if (slots.count(name) == 0 && !IsTolerated(name, config)) {
      violations.push_back({name, "MODEL_TENSOR_UNEXPECTED",
                            absl::StrCat("is not a tensor of this ", config.model_type, " model")});
    }
  }
  return violations;
}

// Whether an element of a block is infinite or NaN: all bits of its exponent are set, and only then
// does adding the exponent's lowest bit carry into the sign's place. Several elements at once.
bool HasNonFinite(absl::Span<const std::byte> block, DType dtype) {
  const uint64_t exponent = dtype == DType::kF32   ? 0x7F800000'7F800000
                            : dtype == DType::kF16 ? 0x7C007C00'7C007C00
                                                   : 0x7F807F80'7F807F80;
  const uint64_t lowest = dtype == DType::kF32   ? 0x00800000'00800000
                          : dtype == DType::kF16 ? 0x04000400'04000400
                                                 : 0x00800080'00800080;
  const uint64_t sign = dtype == DType::kF32 ? 0x80000000'80000000 : 0x80008000'80008000;
  uint64_t carries = 0;
  size_t i = 0;
  for (; i + sizeof(uint64_t) <= block.size(); i += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, block.data() + i, sizeof(word));
    carries |= (word & exponent) + lowest;
  }
  uint64_t rest = 0;
  std::memcpy(&rest, block.data() + i, block.size() - i);
  carries |= (rest & exponent) + lowest;
  return (carries & sign) != 0;
}

// Writes a tensor's blocks, converted, to where they belong.
class Importer {
 public:
  Importer(const Checkpoint& checkpoint, const Slots& slots, ops::ComputeDType compute)
      : checkpoint_(checkpoint), slots_(slots), compute_(compute) {}

  void Allocate() {
    for (const auto& [name, slot] : slots_) {
      const DType dtype = checkpoint_.tensors().at(name).dtype;
      *slot.destination = at::empty(slot.shape, StorageType(slot, dtype, compute_));
    }
  }

  void Import(const std::string& name, uint64_t offset, absl::Span<const std::byte> block) {
    const auto slot = slots_.find(name);
    if (slot == slots_.end()) return;  // tolerated; its digest is enough
    const DType dtype = checkpoint_.tensors().at(name).dtype;
    const int64_t elements = static_cast<int64_t>(block.size() / SizeOf(dtype));
    const int64_t first = static_cast<int64_t>(offset / SizeOf(dtype));
    const at::Tensor source = at::from_blob(const_cast<std::byte*>(block.data()), {elements},
                                            at::TensorOptions(ToScalarType(dtype)));
    at::Tensor target = slot->second.destination->view({-1}).narrow(0, first, elements);
    target.copy_(source);
    // A finite fp32 value near the limit becomes infinite in bf16.
    const bool rounded = dtype == DType::kF32 && target.scalar_type() == at::kBFloat16;
    const bool bad = rounded ? HasNonFinite({static_cast<const std::byte*>(target.const_data_ptr()),
                                             target.nbytes()},
                                            DType::kBF16)
                             : HasNonFinite(block, dtype);
    if (bad) not_finite_.insert(name);
  }

  std::vector<Violation> violations() const {
    std::vector<Violation> violations;
    for (const std::string& name : not_finite_) {
      violations.push_back({name, "MODEL_TENSOR_NOT_FINITE", "has an infinite or NaN element"});
    }
    return violations;
  }

 private:
  const Checkpoint& checkpoint_;
  const Slots& slots_;
  const ops::ComputeDType compute_;
  std::set<std::string> not_finite_;
};

// A tied head that is stored too must be the embedding; transformers would silently untie it.
std::vector<Violation> CheckTiedHead(const Checkpoint& checkpoint, const ModelConfig& config) {
  const auto head = checkpoint.tensors().find(kHead);
  if (!config.tied_embeddings || head == checkpoint.tensors().end()) return {};
  const CheckpointTensor& embedding = checkpoint.tensors().at(kEmbedding);
  const bool same = head->second.dtype == embedding.dtype &&
                    head->second.shape == embedding.shape &&
                    head->second.sha256 == embedding.sha256;
  if (same) return {};
  return {{kHead, "MODEL_TENSOR_UNEXPECTED",
           absl::StrCat("differs from ", kEmbedding, ", though tie_word_embeddings is true")}};
}

}  // namespace

LoadedModel::LoadedModel(ModelConfig config, ops::ComputeDType compute,
                         ops::NormOptions norm_options)
    : config_(std::move(config)),
      compute_(compute),
      norm_options_(norm_options),
      modules_(ListModules(config_)),
      checkpoint_dtypes_(modules_.size(), at::kFloat),
      squared_norms_(modules_.size()) {}

absl::StatusOr<std::unique_ptr<LoadedModel>> LoadedModel::Load(const std::string& dir,
                                                               ModelConfig config,
                                                               ops::ComputeDType compute,
                                                               ops::NormOptions norm_options) {
  DORAD_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(dir));
  std::unique_ptr<LoadedModel> model(new LoadedModel(std::move(config), compute, norm_options));
  const Slots slots = ListTensorSlots(model->config_, &model->weights_);
  std::vector<Violation> violations = CheckTensorList(checkpoint, slots, model->config_);
  if (!violations.empty()) return MakeInvalid(dir, std::move(violations));
  try {
    Importer importer(checkpoint, slots, compute);
    importer.Allocate();
    DORAD_RETURN_IF_ERROR(checkpoint.ReadAll(
        [&](const std::string& name, uint64_t offset, absl::Span<const std::byte> block) {
          importer.Import(name, offset, block);
        }));
    violations = importer.violations();
  } catch (...) {  // ATen's allocator throws
    return ops::FromTorchException(absl::StrCat("loading the weights of ", dir), "INTERNAL");
  }
  for (Violation& violation : CheckTiedHead(checkpoint, model->config_)) {
    violations.push_back(std::move(violation));
  }
  if (!violations.empty()) return MakeInvalid(dir, std::move(violations));
  for (const auto& [name, slot] : slots) {
    model->num_parameters_ += slot.destination->numel();
    model->bytes_ += static_cast<int64_t>(slot.destination->nbytes());
    if (slot.module_id < 0) continue;
    model->checkpoint_dtypes_[slot.module_id] = ToScalarType(checkpoint.tensors().at(name).dtype);
  }
  if (model->config_.tied_embeddings) {
    model->weights_.head.weight_OI = model->weights_.embedding_VD;
    model->checkpoint_dtypes_[HeadId(model->config_)] =
        model->checkpoint_dtypes_[EmbeddingId(model->config_)];
  }
  model->digest_ = checkpoint.Digest();
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
  if (module_id == EmbeddingId(config_)) return weights_.embedding_VD;
  if (module_id == HeadId(config_)) return weights_.head.weight_OI;
  const LayerWeights& layer = weights_.layers[module_id / kModulesPerLayer];
  const ops::BaseLinear* const linears[kModulesPerLayer] = {
      &layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down};
  return linears[module_id % kModulesPerLayer]->weight_OI;
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
  // Outside the lock: other modules, and those that are ready, need not wait for this one.
  const auto axis = module_id == EmbeddingId(config_) ? ops::NormAxis::kCols : ops::NormAxis::kRows;
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
