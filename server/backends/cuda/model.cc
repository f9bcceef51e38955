#include "server/backends/cuda/model.h"

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/dora/import.h"
#include "kernels/random/fill.h"
#include "server/backends/cuda/elements.h"
#include "server/backends/cuda/page_copier.h"
#include "server/backends/cuda/staging.h"
#include "server/model/weight_import.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::cuda {

using model::WeightKind;
using model::WeightSlot;

namespace {

constexpr char kLoading[] = "loading weights";

absl::StatusOr<std::string> DeviceUuid() {
  int device = 0;
  cudaDeviceProp properties;
  DORAD_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device), kLoading);
  DORAD_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&properties, device), kLoading);
  return std::string(properties.uuid.bytes, sizeof(properties.uuid.bytes));
}

bool IsMatrix(WeightKind kind) {
  return kind == WeightKind::kMatrix || kind == WeightKind::kPatchMatrix ||
         kind == WeightKind::kProjection;
}

}  // namespace

// The layout of the weights.
class CudaModel::Places {
 public:
  explicit Places(CudaModel* model) : model_(*model), config_(model->config_) {}

  // Lays the weights out from `base` on, sets the model's pointers and returns their size. Called
  // with 0 first, for the size.
  int64_t LayOut(uintptr_t base) {
    Layout layout;
    PlaceDecoder(layout, base);
    if (config_.vision) PlaceTower(layout, base, *config_.vision);
    return layout.bytes();
  }

  using Key = std::pair<WeightKind, int>;
  static Key KeyOf(const WeightSlot& slot) { return {slot.kind, slot.index}; }
  struct Place {
    char* at = nullptr;
    int64_t elements = 0;  // bf16 of matrices, otherwise fp32
  };
  const std::map<Key, Place>& all() const { return places_; }

 private:
  static char* At(uintptr_t base, int64_t offset) {
    return reinterpret_cast<char*>(base + static_cast<uintptr_t>(offset));
  }

  const float* Vector(Layout& layout, uintptr_t base, WeightKind kind, int index, int64_t size) {
    char* at = At(base, layout.Add(size * 4));
    places_[{kind, index}] = {at, size};
    return reinterpret_cast<const float*>(at);
  }

  void PlaceDecoder(Layout& layout, uintptr_t base) {
    const auto vector = [&](WeightKind kind, int index, int64_t size) {
      return Vector(layout, base, kind, index, size);
    };
    model_.layers_.resize(config_.num_layers());
    for (int i = 0; i < config_.num_layers(); ++i) {
      const model::LayerSpec& spec = config_.layers[i];
      LayerWeights& layer = model_.layers_[i];
      if (spec.delta) {
        layer.delta = PlaceDelta(layout, base, *spec.delta, i);
      } else {
        PlaceAttention(layout, base, spec.attention, i);
      }
      layer.gate_up = Group(layout, base, spec.mlp.gate, 2, spec.mlp.bias);
      layer.down = Group(layout, base, spec.mlp.down, 1, spec.mlp.bias);
      const int64_t hidden = config_.hidden_size;
      layer.attention_norm = vector(WeightKind::kAttentionNorm, i, hidden);
      layer.mlp_norm = vector(WeightKind::kMlpNorm, i, hidden);
      if (spec.output_norms) {
        layer.attention_output_norm = vector(WeightKind::kAttentionOutputNorm, i, hidden);
        layer.mlp_output_norm = vector(WeightKind::kMlpOutputNorm, i, hidden);
      }
    }
    const int embedding = config_.embedding;
    const int head = config_.head;
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

  void PlaceAttention(Layout& layout, uintptr_t base, const model::AttentionSpec& spec, int index) {
    LayerWeights& layer = model_.layers_[index];
    layer.qkv = Group(layout, base, spec.q, 3, spec.qkv_bias);
    layer.o = Group(layout, base, spec.o, 1, spec.output_bias);
    if (!spec.qk_norm) return;
    layer.q_norm = Vector(layout, base, WeightKind::kQueryNorm, index, config_.head_dim);
    layer.k_norm = Vector(layout, base, WeightKind::kKeyNorm, index, config_.head_dim);
  }

  DeltaWeights PlaceDelta(Layout& layout, uintptr_t base, const model::DeltaSpec& spec, int index) {
    const model::DeltaSizes& sizes = config_.delta;
    const auto vector = [&](WeightKind kind, int64_t size) {
      return Vector(layout, base, kind, index, size);
    };
    DeltaWeights delta;
    delta.qkvz = Group(layout, base, spec.qkv, 2, /*bias=*/false);
    delta.ba = Group(layout, base, spec.b, 2, /*bias=*/false);
    delta.out = Group(layout, base, spec.out, 1, /*bias=*/false);
    delta.convolution = vector(WeightKind::kDeltaConvolution, sizes.qkv_size() * sizes.convolution);
    delta.decay_log = vector(WeightKind::kDeltaDecay, sizes.value_heads);
    delta.time_bias = vector(WeightKind::kDeltaTimeBias, sizes.value_heads);
    delta.norm = vector(WeightKind::kDeltaNorm, sizes.value_dim);
    return delta;
  }

  void PlaceTower(Layout& layout, uintptr_t base, const model::VisionConfig& vision) {
    const model::TowerStyle& style = vision.style;
    int next_norm = 0;
    const auto norm = [&](int64_t size) {
      TowerNormWeights weights;
      weights.weight = Vector(layout, base, WeightKind::kTowerNorm, next_norm, size);
      if (!style.rms_norms) {
        weights.bias = Vector(layout, base, WeightKind::kTowerNormBias, next_norm, size);
      }
      ++next_norm;
      return weights;
    };
    const auto linear = [&](int first, int count = 1) {
      return Group(layout, base, first, count, vision.has_bias(first));
    };
    // Without a module.
    const auto product = [&](WeightKind kind, int64_t out, int64_t in) {
      LinearGroup group;
      group.in = in;
      group.out = out;
      group.outs = {out};
      char* weight = At(base, layout.Add(out * in * 2));
      places_[{kind, 0}] = {weight, out * in};
      group.weight = reinterpret_cast<const __nv_bfloat16*>(weight);
      return group;
    };
    TowerWeights& tower = model_.tower_;
    tower.patch = product(WeightKind::kPatchMatrix, vision.width, vision.patch_elements());
    if (style.patch_bias) {
      tower.patch.bias = Vector(layout, base, WeightKind::kPatchBias, 0, vision.width);
    }
    if (style.position_table) {
      tower.table = Vector(layout, base, WeightKind::kPositionTable, 0,
                           vision.table_side * vision.table_side * vision.width);
    }
    tower.blocks.clear();
    for (const model::VisionBlockSpec& spec : vision.blocks) {
      const TowerNormWeights norm1 = norm(vision.width);
      tower.blocks.push_back({norm1, norm(vision.width), linear(spec.qkv, style.split_qkv ? 3 : 1),
                              linear(spec.proj), linear(spec.fc1, style.gated() ? 2 : 1),
                              linear(spec.fc2)});
    }
    const auto merger = [&](const model::MergerSpec& spec, int64_t norm_size) {
      TowerWeights::Merger to;
      to.norm = norm(norm_size);
      if (style.pools_patches) {
        to.pooled_norm = Vector(layout, base, WeightKind::kTowerNorm, next_norm++, vision.width);
        to.projection = product(WeightKind::kProjection, vision.output, vision.width);
        return to;
      }
      if (style.joins_patches) to.join = linear(spec.join);
      to.fc1 = linear(spec.fc1);
      to.fc2 = linear(spec.fc2);
      return to;
    };
    tower.merger = merger(vision.merger, vision.width);
    tower.deepstack_mergers.clear();
    for (const model::MergerSpec& spec : vision.deepstack_mergers) {
      tower.deepstack_mergers.push_back(merger(spec, vision.merged_width()));
    }
    if (style.patch_norm) tower.patch_norm = norm(vision.width);
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
      places_[{WeightKind::kMatrix, first + i}] = {weight, group.outs[i] * group.in};
      model_.matrices_[first + i] = reinterpret_cast<const __nv_bfloat16*>(weight);
      weight += group.outs[i] * group.in * 2;
      if (!bias) continue;
      places_[{WeightKind::kBias, first + i}] = {biases, group.outs[i]};
      biases += group.outs[i] * 4;
    }
    return group;
  }

  CudaModel& model_;
  const model::ModelConfig& config_;
  std::map<Key, Place> places_;
};

// Copies blocks to the device and converts them there.
class CudaModel::Sink final : public model::WeightSink {
 public:
  static absl::StatusOr<std::unique_ptr<Sink>> Create(CudaModel* model, MemoryLedger* ledger) {
    DORAD_ASSIGN_OR_RETURN(std::unique_ptr<Uploader> uploader,
                           Uploader::Create(Uploader::DefaultOptions()));
    return std::unique_ptr<Sink>(new Sink(model, ledger, std::move(uploader)));
  }

  // After a failure, kernels may still read this memory.
  ~Sink() override { (void)Finish(); }

  absl::Status Allocate(const model::WeightSlots& slots) override {
    const int64_t bytes = places_.LayOut(0);
    if (model_.memory_.as<>() == nullptr) {
      DORAD_ASSIGN_OR_RETURN(model_.memory_,
                             MappedMemory::Create(ledger_, "weights", bytes, model_.shareable_));
    }
    DORAD_CHECK(places_.LayOut(reinterpret_cast<uintptr_t>(model_.memory_.as<>())) == bytes);
    for (const auto& [name, slot] : slots) {
      const auto place = places_.all().find(Places::KeyOf(slot));
      DORAD_CHECK(place != places_.all().end());
      const DType dtype = IsMatrix(slot.kind) ? DType::kBF16 : DType::kF32;
      if (slot.kind == WeightKind::kProjection) {
        const int64_t in_file = slot.num_elements() * int64_t{sizeof(__nv_bfloat16)};
        DORAD_ASSIGN_OR_RETURN(projection_, DeviceBuffer::Allocate(ledger_, "loading", in_file));
      }
      if (slot.adds_one || slot.kind == WeightKind::kProjection) continue;
      placed_[name] = {dtype, static_cast<uint64_t>(place->second.at - model_.memory_.as<char>())};
    }
    return absl::OkStatus();
  }

  // By name, in the model's memory: of tensors that are as in the checkpoint.
  const std::map<std::string, model::PlacedTensor>& placed() const { return placed_; }

  absl::StatusOr<bool> Write(const WeightSlot& slot, int64_t first_element,
                             absl::Span<const std::byte> block) override {
    char* const to = places_.all().at(Places::KeyOf(slot)).at;
    if (slot.kind != WeightKind::kProjection) return WriteTo(to, slot, first_element, block);
    DORAD_ASSIGN_OR_RETURN(const bool finite,
                           WriteTo(projection_.as<char>(), slot, first_element, block));
    const auto elements = static_cast<int64_t>(block.size() / SizeOf(slot.dtype));
    if (first_element + elements < slot.num_elements()) return finite;
    DORAD_RETURN_IF_CUDA_ERROR(
        kernels::Transpose(projection_.as<__nv_bfloat16>(), slot.shape[0], slot.shape[1],
                           reinterpret_cast<__nv_bfloat16*>(to), stream().get()),
        kLoading);
    return finite;
  }

  absl::Status Randomise(uint32_t seed) {
    for (const auto& [key, place] : places_.all()) {
      const WeightKind kind = key.first;
      cudaError_t error = cudaSuccess;
      if (IsMatrix(kind)) {
        error = kernels::FillRandom(reinterpret_cast<__nv_bfloat16*>(place.at), place.elements,
                                    0.035f, seed++, stream().get());
      } else {
        const bool is_bias = kind == WeightKind::kBias || kind == WeightKind::kPatchBias ||
                             kind == WeightKind::kTowerNormBias ||
                             kind == WeightKind::kPositionTable;
        error = kernels::FillConstant(reinterpret_cast<float*>(place.at), place.elements,
                                      is_bias ? 0.0f : 1.0f, stream().get());
      }
      DORAD_RETURN_IF_CUDA_ERROR(error, "making random weights");
    }
    return absl::OkStatus();
  }

  absl::Status Finish() { return stream().Synchronize(kLoading); }

 private:
  Sink(CudaModel* model, MemoryLedger* ledger, std::unique_ptr<Uploader> uploader)
      : model_(*model), ledger_(ledger), places_(model), uploader_(std::move(uploader)) {}

  const Stream& stream() const { return uploader_->stream(); }

  // The block's elements, as the tensor that begins at `tensor` has them.
  absl::StatusOr<bool> WriteTo(char* tensor, const WeightSlot& slot, int64_t first_element,
                               absl::Span<const std::byte> block) {
    const bool matrix = IsMatrix(slot.kind);
    const int64_t to_size = matrix ? sizeof(__nv_bfloat16) : sizeof(float);
    char* const to = tensor + first_element * to_size;
    const auto bytes = static_cast<int64_t>(block.size());
    if (slot.dtype == (matrix ? DType::kBF16 : DType::kF32)) {
      DORAD_RETURN_IF_ERROR(Copy(block, to));
      return true;
    }
    absl::MutexLock lock(&mu_);
    DORAD_RETURN_IF_ERROR(MakeRoom(bytes));
    DORAD_RETURN_IF_ERROR(Copy(block, raw_.as<>()));
    const int64_t count = bytes / static_cast<int64_t>(SizeOf(slot.dtype));
    if (!matrix) {
      DORAD_RETURN_IF_CUDA_ERROR(
          kernels::ImportVector(raw_.as<>(), TypeOf(slot.dtype), count,
                                reinterpret_cast<float*>(to), stream().get()),
          kLoading);
      return true;
    }
    kernels::ImportParams params;
    params.from = raw_.as<>();
    params.type = TypeOf(slot.dtype);
    params.count = params.columns = params.ld = count;
    params.to = reinterpret_cast<__nv_bfloat16*>(to);
    params.not_finite = not_finite_.as<uint32_t>();
    DORAD_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(params.not_finite, 0, sizeof(uint32_t), stream().get()), kLoading);
    DORAD_RETURN_IF_CUDA_ERROR(kernels::ImportFactor(params, stream().get()), kLoading);
    // A finite fp32 value near the limit becomes infinite in bf16.
    uint32_t not_finite = 0;
    DORAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(&not_finite, params.not_finite, sizeof(not_finite),
                                               cudaMemcpyDeviceToHost, stream().get()),
                               kLoading);
    DORAD_RETURN_IF_ERROR(Finish());
    return not_finite == 0;
  }

  absl::Status Copy(absl::Span<const std::byte> block, void* to) {
    return uploader_->Wait(*uploader_->Start(
        {{block.data(), to, static_cast<int64_t>(block.size())}}, /*pinned=*/false));
  }

  // For a block that needs conversion.
  absl::Status MakeRoom(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (raw_.bytes() >= bytes) return absl::OkStatus();
    DORAD_RETURN_IF_ERROR(Finish());
    DORAD_ASSIGN_OR_RETURN(raw_, DeviceBuffer::Allocate(ledger_, "loading", bytes));
    DORAD_ASSIGN_OR_RETURN(not_finite_,
                           DeviceBuffer::Allocate(ledger_, "loading", sizeof(uint32_t)));
    return absl::OkStatus();
  }

  CudaModel& model_;
  MemoryLedger* const ledger_;
  Places places_;
  std::map<std::string, model::PlacedTensor> placed_;
  DeviceBuffer projection_;  // WeightKind::kProjection as in the file
  absl::Mutex mu_;
  DeviceBuffer raw_ ABSL_GUARDED_BY(mu_);
  DeviceBuffer not_finite_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<Uploader> uploader_;  // ends first
};

CudaModel::CudaModel(model::ModelConfig config, kernels::KernelIsa isa)
    : config_(std::move(config)),
      isa_(isa),
      modules_(MakeModules(config_)),
      matrices_(modules_.size()) {}

int64_t CudaModel::BytesFor(model::ModelConfig config) {
  CudaModel model(std::move(config), kernels::KernelIsa::kSm90);  // any
  return Places(&model).LayOut(0);
}

absl::StatusOr<std::unique_ptr<CudaModel>> CudaModel::Load(const std::string& dir,
                                                           model::ModelConfig config,
                                                           MemoryLedger* ledger, bool shareable,
                                                           kernels::KernelIsa isa) {
  std::unique_ptr<CudaModel> model(new CudaModel(std::move(config), isa));
  model->shareable_ = shareable;
  DORAD_ASSIGN_OR_RETURN(const std::unique_ptr<Sink> sink, Sink::Create(model.get(), ledger));
  DORAD_ASSIGN_OR_RETURN(model::ImportedCheckpoint imported,
                         model::ImportWeights(dir, model->config_, *sink));
  DORAD_RETURN_IF_ERROR(sink->Finish());
  model->dir_ = dir;
  model->ledger_ = ledger;
  model->dtypes_ = std::move(imported.dtypes);
  model->digest_ = std::move(imported.digest);
  model->num_parameters_ = imported.num_parameters;
  if (shareable) {
    DORAD_ASSIGN_OR_RETURN(std::string uuid, DeviceUuid());
    model->layout_ = {model->digest_, model::LayOut(imported.tensors, sink->placed()),
                      model->memory_.piece_bytes(), std::move(uuid)};
  }
  return model;
}

absl::Status CudaModel::Restore() {
  if (host_ != nullptr) {
    DORAD_ASSIGN_OR_RETURN(PageCopier copier, PageCopier::Create());
    return copier.ToDevice(host_pages_, memory_.as<std::byte>(), memory_.bytes(),
                           "restoring the weights");
  }
  DORAD_CHECK(!dir_.empty());
  DORAD_ASSIGN_OR_RETURN(const std::unique_ptr<Sink> sink, Sink::Create(this, ledger_));
  DORAD_ASSIGN_OR_RETURN(const model::ImportedCheckpoint imported,
                         model::ImportWeights(dir_, config_, *sink));
  DORAD_RETURN_IF_ERROR(sink->Finish());
  if (imported.digest == digest_) return absl::OkStatus();
  return MakeError(absl::StatusCode::kDataLoss, "MODEL_CHANGED",
                   absl::StrCat("the files in ", dir_, " have the digest ", imported.digest,
                                ", not ", digest_, " as when the server started"));
}

absl::StatusOr<std::unique_ptr<CudaModel>> CudaModel::Random(model::ModelConfig config,
                                                             uint32_t seed, MemoryLedger* ledger,
                                                             kernels::KernelIsa isa) {
  std::unique_ptr<CudaModel> model(new CudaModel(std::move(config), isa));
  DORAD_ASSIGN_OR_RETURN(const std::unique_ptr<Sink> sink, Sink::Create(model.get(), ledger));
  DORAD_RETURN_IF_ERROR(sink->Allocate({}));
  DORAD_RETURN_IF_ERROR(sink->Randomise(seed));
  DORAD_RETURN_IF_ERROR(sink->Finish());
  model->ledger_ = ledger;
  model->dtypes_.assign(model->matrices_.size(), DType::kBF16);
  model->digest_ = absl::StrCat("random-", seed);
  for (const adapter::BaseModule& module : model->modules_.all()) {
    model->num_parameters_ += module.rows * module.cols;
  }
  return model;
}

}  // namespace dorad::cuda
