#include "server/model/weight_import.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/model/checkpoint.h"
#include "server/platform/error.h"
#include "server/platform/files/elements.h"
#include "server/platform/instant.h"
#include "server/platform/log.h"

namespace dorad::model {
namespace {

std::string EmbeddingOf(const Spelling& names) { return names.body + "embed_tokens.weight"; }
std::string HeadOf(const Spelling& names) { return names.head + ".weight"; }

// The spelling of the checkpoint's names.
const Spelling& SpellingOf(const Checkpoint& checkpoint, const ModelConfig& config) {
  const Spelling* best = nullptr;
  for (const Spelling& names : config.spellings) {
    if (checkpoint.tensors().count(EmbeddingOf(names)) == 0) continue;
    if (best == nullptr) best = &names;
    if (!config.vision) break;
    const std::string patch = absl::StrCat(names.tower, config.vision->names.patch, ".weight");
    if (checkpoint.tensors().count(patch) > 0) return names;
  }
  if (best != nullptr) return *best;
  return config.spellings.front();
}

// All weights of one spelling.
class SlotList {
 public:
  SlotList(const ModelConfig& config, const Spelling& names)
      : config_(config), modules_(ListModules(config, names)) {
    for (int i = 0; i < config.num_layers(); ++i)
      AddLayer(absl::StrCat(names.body, "layers.", i), i);
    AddMatrix(config.embedding);
    if (!config.tied_embeddings) AddMatrix(config.head);
    AddNorm(names.body + "norm", WeightKind::kFinalNorm, 0, config.hidden_size,
            config.norms_add_one);
    if (config.vision) AddTower(*config.vision, names);
  }

  WeightSlots Take() { return std::move(slots_); }

 private:
  void AddLayer(const std::string& name, int index) {
    const LayerSpec& layer = config_.layers[index];
    if (layer.delta) {
      AddDelta(name + ".linear_attn.", *layer.delta, index);
    } else {
      AddAttention(name + ".self_attn.", layer.attention, index);
    }
    for (const int id : {layer.mlp.gate, layer.mlp.up, layer.mlp.down}) {
      AddLinear(id, layer.mlp.bias);
    }
    const auto norm = [&](const char* norm, WeightKind kind) {
      AddNorm(name + norm, kind, index, config_.hidden_size, config_.norms_add_one);
    };
    norm(".input_layernorm", WeightKind::kAttentionNorm);
    if (layer.output_norms) {
      norm(".post_attention_layernorm", WeightKind::kAttentionOutputNorm);
      norm(".pre_feedforward_layernorm", WeightKind::kMlpNorm);
      norm(".post_feedforward_layernorm", WeightKind::kMlpOutputNorm);
    } else {
      norm(".post_attention_layernorm", WeightKind::kMlpNorm);
    }
  }

  void AddAttention(const std::string& name, const AttentionSpec& attention, int layer) {
    for (const int id : {attention.q, attention.k, attention.v}) AddLinear(id, attention.qkv_bias);
    AddLinear(attention.o, attention.output_bias);
    if (!attention.qk_norm) return;
    AddNorm(name + "q_norm", WeightKind::kQueryNorm, layer, config_.head_dim,
            config_.norms_add_one);
    AddNorm(name + "k_norm", WeightKind::kKeyNorm, layer, config_.head_dim, config_.norms_add_one);
  }

  void AddDelta(const std::string& name, const DeltaSpec& delta, int layer) {
    for (const int id : {delta.qkv, delta.z, delta.b, delta.a, delta.out}) AddMatrix(id);
    const DeltaSizes& sizes = config_.delta;
    slots_[name + "conv1d.weight"] = {
        WeightKind::kDeltaConvolution, layer, {sizes.qkv_size(), 1, sizes.convolution}};
    slots_[name + "A_log"] = {WeightKind::kDeltaDecay, layer, {sizes.value_heads}};
    slots_[name + "dt_bias"] = {WeightKind::kDeltaTimeBias, layer, {sizes.value_heads}};
    slots_[name + "norm.weight"] = {WeightKind::kDeltaNorm, layer, {sizes.value_dim}};
  }

  void AddMatrix(int id) {
    const adapter::BaseModule& module = modules_[id];
    slots_[module.name + ".weight"] = {WeightKind::kMatrix, id, {module.rows, module.cols}};
  }

  void AddLinear(int id, bool bias) {
    AddMatrix(id);
    if (bias) slots_[modules_[id].name + ".bias"] = {WeightKind::kBias, id, {modules_[id].rows}};
  }

  void AddNorm(const std::string& name, WeightKind kind, int index, int64_t size, bool adds_one) {
    slots_[name + ".weight"] = {kind, index, {size}, DType::kF32, adds_one};
  }

  void AddTower(const VisionConfig& vision, const Spelling& spelling) {
    const std::string& name = spelling.tower;
    const std::string patch = name + vision.names.patch;
    std::vector<int64_t> shape = {vision.width, vision.channels, vision.temporal_patch,
                                  vision.patch, vision.patch};
    if (vision.style.flat_patches) shape.erase(shape.begin() + 2);
    slots_[patch + ".weight"] = {WeightKind::kPatchMatrix, 0, shape};
    if (vision.style.patch_bias) {
      slots_[patch + ".bias"] = {WeightKind::kPatchBias, 0, {vision.width}};
    }
    if (vision.style.position_table) {
      slots_[absl::StrCat(name, vision.names.table, ".weight")] = {
          WeightKind::kPositionTable, 0, {vision.table_side * vision.table_side, vision.width}};
    }
    for (int id = config_.head + 1; id < config_.num_modules(); ++id) {
      AddLinear(id, vision.has_bias(id));
    }
    int next = 0;
    const auto norm = [&](const std::string& norm, int64_t size) {
      slots_[name + norm + ".weight"] = {WeightKind::kTowerNorm, next, {size}};
      if (!vision.style.rms_norms) {
        slots_[name + norm + ".bias"] = {WeightKind::kTowerNormBias, next, {size}};
      }
      ++next;
    };
    for (size_t i = 0; i < vision.blocks.size(); ++i) {
      norm(absl::StrCat(vision.names.blocks, i, vision.names.norm1), vision.width);
      norm(absl::StrCat(vision.names.blocks, i, vision.names.norm2), vision.width);
    }
    norm(vision.names.merger_norm, vision.width);
    for (size_t i = 0; i < vision.deepstack_mergers.size(); ++i) {
      norm(absl::StrCat("deepstack_merger_list.", i, ".norm"), vision.merged_width());
    }
    if (vision.style.patch_norm) norm(vision.names.patch_norm, vision.width);
    if (!vision.style.pools_patches) return;
    AddNorm(spelling.projector + vision.names.pooled_norm, WeightKind::kTowerNorm, next,
            vision.width, /*adds_one=*/true);
    slots_[spelling.projector + vision.names.projection] = {
        WeightKind::kProjection, 0, {vision.width, vision.output}};
  }

  const ModelConfig& config_;
  const std::vector<adapter::BaseModule> modules_;
  WeightSlots slots_;
};

// Tensors without effect on the result: the rotary frequencies of old checkpoints, the head of a
// tied model (whose bytes must then be the embedding's), and parts that are not served.
bool IsTolerated(const std::string& name, const ModelConfig& config, const Spelling& names) {
  return absl::EndsWith(name, "rotary_emb.inv_freq") ||
         (config.tied_embeddings && name == HeadOf(names)) || config.IsOfOtherPart(name) ||
         std::any_of(config.ignored_parts.begin(), config.ignored_parts.end(),
                     [&](const std::string& part) { return absl::StartsWith(name, part); });
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

std::vector<Violation> CheckTensorList(const Checkpoint& checkpoint, const WeightSlots& slots,
                                       const ModelConfig& config, const Spelling& names) {
  std::vector<Violation> violations;
  for (const auto& [name, slot] : slots) {
    const auto found = checkpoint.tensors().find(name);
    if (found == checkpoint.tensors().end()) {
      const char* hint = name == HeadOf(names) ? " (tie_word_embeddings is false)" : "";
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
    if (slots.count(name) == 0 && !IsTolerated(name, config, names)) {
      violations.push_back({name, "MODEL_TENSOR_UNEXPECTED",
                            absl::StrCat("is not a tensor of this ", config.model_type, " model")});
    }
  }
  return violations;
}

// A tied head that is stored too must be the embedding; transformers would silently untie it.
std::vector<Violation> CheckTiedHead(const Checkpoint& checkpoint, const ModelConfig& config,
                                     const Spelling& names) {
  const auto head = checkpoint.tensors().find(HeadOf(names));
  if (!config.tied_embeddings || head == checkpoint.tensors().end()) return {};
  const CheckpointTensor& embedding = checkpoint.tensors().at(EmbeddingOf(names));
  const bool same = head->second.dtype == embedding.dtype &&
                    head->second.shape == embedding.shape &&
                    head->second.sha256 == embedding.sha256;
  if (same) return {};
  return {
      {HeadOf(names), "MODEL_TENSOR_UNEXPECTED",
       absl::StrCat("differs from ", EmbeddingOf(names), ", though tie_word_embeddings is true")}};
}

// As transformers adds them: in fp32.
std::vector<float> OnePlus(absl::Span<const std::byte> block, DType dtype) {
  std::vector<float> sums(block.size() / SizeOf(dtype));
  ToFloat(dtype, block, sums.data());
  for (float& sum : sums) sum += 1.0f;
  return sums;
}

// Logs how far the reading is, every few seconds. Thread-safe.
class Progress {
 public:
  explicit Progress(const Checkpoint& checkpoint) {
    for (const auto& [name, tensor] : checkpoint.tensors()) {
      uint64_t size = SizeOf(tensor.dtype);
      for (const int64_t extent : tensor.shape) size *= static_cast<uint64_t>(extent);
      total_ += size;
    }
  }

  void Add(uint64_t bytes) {
    const uint64_t done = done_ += bytes;
    const double seconds = absl::ToDoubleSeconds(Since(start_));
    double due = due_;
    if (seconds < due || !due_.compare_exchange_strong(due, seconds + kSecondsBetween)) return;
    const double rate = static_cast<double>(done) / seconds;
    LogInfo("loading weights", {{"bytes", static_cast<int64_t>(done)},
                                {"of", static_cast<int64_t>(total_)},
                                {"bytes_per_second", rate},
                                {"seconds_left", static_cast<double>(total_ - done) / rate}});
  }

 private:
  static constexpr double kSecondsBetween = 2;
  const Instant start_ = SteadyNow();
  uint64_t total_ = 0;
  std::atomic<uint64_t> done_{0};
  std::atomic<double> due_{kSecondsBetween};
};

}  // namespace

int64_t WeightSlot::num_elements() const {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  return elements;
}

// All bits of such an element's exponent are set, and only then does adding the exponent's lowest
// bit carry into the sign bit. Several elements at once.
bool HasNonFinite(absl::Span<const std::byte> elements, DType dtype) {
  const uint64_t exponent = dtype == DType::kF32   ? 0x7F800000'7F800000
                            : dtype == DType::kF16 ? 0x7C007C00'7C007C00
                                                   : 0x7F807F80'7F807F80;
  const uint64_t lowest = dtype == DType::kF32   ? 0x00800000'00800000
                          : dtype == DType::kF16 ? 0x04000400'04000400
                                                 : 0x00800080'00800080;
  const uint64_t sign = dtype == DType::kF32 ? 0x80000000'80000000 : 0x80008000'80008000;
  uint64_t carries = 0;
  size_t i = 0;
  for (; i + sizeof(uint64_t) <= elements.size(); i += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, elements.data() + i, sizeof(word));
    carries |= (word & exponent) + lowest;
  }
  uint64_t rest = 0;
  std::memcpy(&rest, elements.data() + i, elements.size() - i);
  carries |= (rest & exponent) + lowest;
  return (carries & sign) != 0;
}

absl::StatusOr<ImportedCheckpoint> ImportWeights(const std::string& dir, const ModelConfig& config,
                                                 WeightSink& sink) {
  DORAD_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(dir));
  const Spelling& names = SpellingOf(checkpoint, config);
  WeightSlots slots = SlotList(config, names).Take();
  std::vector<Violation> violations = CheckTensorList(checkpoint, slots, config, names);
  if (!violations.empty()) return MakeInvalid(dir, std::move(violations));
  for (auto& [name, slot] : slots) {
    if (!slot.adds_one) slot.dtype = checkpoint.tensors().at(name).dtype;
  }

  DORAD_RETURN_IF_ERROR(sink.Allocate(slots));
  Progress progress(checkpoint);
  absl::Mutex mu;
  std::set<std::string> not_finite;
  DORAD_RETURN_IF_ERROR(checkpoint.ReadAll([&](const std::string& name, uint64_t offset,
                                               absl::Span<const std::byte> block) -> absl::Status {
    progress.Add(block.size());
    const auto found = slots.find(name);
    if (found == slots.end()) return absl::OkStatus();  // a tolerated tensor: its digest is enough
    const WeightSlot& slot = found->second;
    const DType dtype = checkpoint.tensors().at(name).dtype;
    const auto first = static_cast<int64_t>(offset / SizeOf(dtype));
    std::vector<float> sums;
    absl::Span<const std::byte> elements = block;
    if (slot.adds_one) {
      sums = OnePlus(block, dtype);
      elements = {reinterpret_cast<const std::byte*>(sums.data()), sums.size() * sizeof(float)};
    }
    DORAD_ASSIGN_OR_RETURN(const bool finite, sink.Write(slot, first, elements));
    if (finite && !HasNonFinite(block, dtype)) return absl::OkStatus();
    absl::MutexLock lock(&mu);
    not_finite.insert(name);
    return absl::OkStatus();
  }));

  for (const std::string& name : not_finite) {
    violations.push_back({name, "MODEL_TENSOR_NOT_FINITE", "has an infinite or NaN element"});
  }
  for (Violation& violation : CheckTiedHead(checkpoint, config, names)) {
    violations.push_back(std::move(violation));
  }
  if (!violations.empty()) return MakeInvalid(dir, std::move(violations));

  ImportedCheckpoint imported;
  imported.digest = checkpoint.Digest();
  imported.tensors = checkpoint.tensors();
  imported.dtypes.resize(config.num_modules());
  for (const auto& [name, slot] : slots) {
    imported.num_parameters += slot.num_elements();
    if (slot.kind == WeightKind::kMatrix) imported.dtypes[slot.index] = slot.dtype;
  }
  if (config.tied_embeddings) {
    imported.dtypes[config.head] = imported.dtypes[config.embedding];
  }
  return imported;
}

}  // namespace dorad::model
