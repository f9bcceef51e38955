#include "server/backends/cuda/adapter_builder.h"

#include <cuda_fp16.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/dora/import.h"
#include "kernels/dora/norm.h"
#include "server/adapter/peft/violations.h"
#include "server/backends/cuda/adapter.h"
#include "server/backends/cuda/device_reader.h"
#include "server/backends/cuda/device_tensors.h"
#include "server/backends/cuda/elements.h"
#include "server/platform/error.h"
#include "server/platform/files/elements.h"
#include "server/platform/instant.h"

namespace dorad::cuda {
namespace {

using adapter::AdapterTensors;
using adapter::BaseModule;
using adapter::BuiltAdapter;
using adapter::ModuleKind;
using adapter::ModuleTensors;
using adapter::TensorPlace;
using adapter::Violations;
using kernels::DoraFactors;

constexpr char kSubject[] = "adapter_model.safetensors";
constexpr char kLoading[] = "loading an adapter";
// A slice of modules is copied together, and its norms are one launch. Limits: modules; operations
// (a quarter of a millisecond, which may delay a decode step); bytes of tensors that need more than
// a copy.
constexpr size_t kSliceModules = 8;
constexpr double kSliceOperations = 1.6e11;
constexpr int64_t kSliceRawBytes = 256 << 20;

// As ops::NormEpsilon: by the dtype of the base weight in the checkpoint.
float NormEpsilon(DType dtype) { return dtype == DType::kF32 ? 1e-12f : 1e-6f; }

// Problems of a module, found on the device.
struct Flags {
  uint32_t not_finite;
  uint32_t degenerate;
};

// One tensor's conversion from the file to serving memory.
struct Tensor {
  const TensorView* view = nullptr;
  int64_t columns = 0;
  int64_t ld = 0;
  void* to = nullptr;     // device
  bool is_factor = true;  // bf16; else fp32
  int64_t raw_at = -1;    // in the slice's raw bytes; -1: the file's bytes are served as they are

  int64_t bytes() const { return static_cast<int64_t>(view->bytes.size()); }
};

struct Module {
  const ModuleTensors* tensors = nullptr;
  const BaseModule* base = nullptr;
  int id = 0;
  int64_t rank = 0, ldb = 0;
  int64_t out = 0, in = 0;  // of the norm: an embedding's rows are its dimensions
  // Offsets in bytes: in the adapter's memory,
  int64_t a_at = 0, b_at = 0, g_at = 0;
  // and in the scratch memory: norm, magnitude, an embedding's A as in the file.
  int64_t norm_at = 0, magnitude_at = 0, a_rows_at = 0;

  bool has_norm() const { return tensors->magnitude != nullptr; }
  bool is_embedding() const { return base->kind == ModuleKind::kEmbedding; }
  double operations() const {
    return has_norm() ? 2.0 * static_cast<double>(out) * static_cast<double>(in * rank) : 0.0;
  }
  // Of the norm, on the device: partial sums, and ||W||² if requested.
  int64_t partials_bytes() const {
    return RoundUp(static_cast<int64_t>(kernels::DirectNormWorkspace(out, in, rank)), 256);
  }
  int64_t workspace_bytes() const {
    return has_norm() ? partials_bytes() + RoundUp(out * 4, 256) : 0;
  }
};

struct Slice {
  std::vector<Module> modules;
  std::vector<Tensor> tensors;  // modules[i]'s are [3 i, 3 i + 3)
  std::shared_ptr<Uploader::Batch> upload;
};

// Objects that a builder keeps for all of its builds.
struct Equipment {
  const CudaModel* model;
  BackgroundLaunchQueue* gaps;
  MemoryLedger* ledger;
  std::unique_ptr<Uploader> uploader;
  Stream stream;
  Event copied;
  Event raw_free[2];   // end of use of the even and of the odd slices' raw bytes
  PinnedBuffer flags;  // [modules] Flags
};

// One adapter's build. Slices go through three stages: copy to the device (unless they are there),
// conversion to the serving layout, and norms. While one slice is in the later stages, the next one
// is copied.
class AdapterBuild {
 public:
  AdapterBuild(Equipment& equipment, const AdapterTensors& tensors)
      : equipment_(equipment),
        model_(*equipment.model),
        stream_(equipment.stream),
        uploader_(*equipment.uploader),
        tensors_(tensors) {}
  // After a failure, copies may still be writing to this memory.
  ~AdapterBuild() {
    for (const Slice& slice : slices_) {
      if (slice.upload != nullptr) (void)uploader_.Wait(*slice.upload);
    }
    (void)uploader_.stream().Synchronize(kLoading);
    (void)stream_.Synchronize(kLoading);
  }

  absl::StatusOr<BuiltAdapter> Run() {
    const Instant start = SteadyNow();
    DORAD_RETURN_IF_ERROR(PlaceAll());
    const Instant placed = SteadyNow();
    for (size_t i = 0; i < slices_.size(); ++i) {
      DORAD_RETURN_IF_ERROR(BeginCopies(i));
      if (i > 0) DORAD_RETURN_IF_ERROR(Finish(i - 1));
    }
    if (!slices_.empty()) DORAD_RETURN_IF_ERROR(Finish(slices_.size() - 1));
    DORAD_RETURN_IF_ERROR(uploader_.stream().Synchronize(kLoading));
    const Instant copied = tensors_.place == TensorPlace::kDevice ? placed : SteadyNow();
    const int64_t flags_bytes = model_.modules().size() * int64_t{sizeof(Flags)};
    DORAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(equipment_.flags.as<>(), scratch_.as<>(flags_at_),
                                               flags_bytes, cudaMemcpyDeviceToHost, stream_.get()),
                               kLoading);
    DORAD_RETURN_IF_ERROR(stream_.Synchronize(kLoading));
    DORAD_RETURN_IF_ERROR(Judge());
    BuiltAdapter built;
    built.bytes = memory_.bytes();
    DORAD_ASSIGN_OR_RETURN(built.weights, FinishAdapter(model_, std::move(memory_), image_at_,
                                                        std::move(factors_), stream_));
    built.copy = Between(start, copied);
    built.norms = Since(copied);
    return built;
  }

 private:
  // Lays out and allocates the memory.
  absl::Status PlaceAll() {
    Layout layout, scratch;
    int64_t raw_bytes = 0, workspace_bytes = 0;
    flags_at_ = scratch.Add(model_.modules().size() * int64_t{sizeof(Flags)});
    for (const ModuleTensors& tensors : tensors_.modules) {
      const Module module = PlaceModule(tensors, layout, scratch);
      if (slices_.empty() || !TakesOneMore(slices_.back(), module)) slices_.emplace_back();
      slices_.back().modules.push_back(module);
    }
    image_at_ = layout.Add(ImageBytes(model_.modules().size()));
    for (Slice& slice : slices_) {
      raw_bytes = std::max(raw_bytes, ListTensors(slice));
      int64_t workspace = 0;
      for (const Module& module : slice.modules) workspace += module.workspace_bytes();
      workspace_bytes = std::max(workspace_bytes, workspace);
    }
    workspace_at_ = scratch.Add(workspace_bytes);
    for (int64_t& at : raw_at_) at = scratch.Add(raw_bytes);
    DORAD_ASSIGN_OR_RETURN(memory_,
                           DeviceBuffer::Allocate(equipment_.ledger, "adapters", layout.bytes()));
    DORAD_ASSIGN_OR_RETURN(scratch_,
                           DeviceBuffer::Allocate(equipment_.ledger, "loading", scratch.bytes()));
    factors_.resize(static_cast<size_t>(model_.modules().size()));
    for (Slice& slice : slices_) PointTensors(slice);
    return ToStatus(cudaMemsetAsync(scratch_.as<>(flags_at_), 0,
                                    model_.modules().size() * sizeof(Flags), stream_.get()),
                    kLoading);
  }

  Module PlaceModule(const ModuleTensors& tensors, Layout& layout, Layout& scratch) const {
    Module module;
    module.tensors = &tensors;
    module.id = tensors.target.module_id;
    module.base = &model_.modules().all()[module.id];
    module.rank = tensors.target.rank;
    module.ldb = RoundUp(module.rank, 8);
    module.out = module.is_embedding() ? module.base->cols : module.base->rows;
    module.in = module.is_embedding() ? module.base->rows : module.base->cols;
    module.a_at = layout.Add(module.rank * module.in * 2);
    module.b_at = layout.Add(module.out * module.ldb * 2);
    if (module.is_embedding()) module.a_rows_at = scratch.Add(module.rank * module.in * 2);
    if (module.has_norm()) {
      module.g_at = layout.Add(module.out * 4);
      module.norm_at = scratch.Add(module.out * 4);
      module.magnitude_at = scratch.Add(module.out * 4);
    }
    return module;
  }

  static int64_t FileBytes(const ModuleTensors& tensors) {
    return static_cast<int64_t>(tensors.a.bytes.size() + tensors.b.bytes.size());
  }

  static bool TakesOneMore(const Slice& slice, const Module& module) {
    double operations = module.operations();
    int64_t bytes = FileBytes(*module.tensors);
    for (const Module& other : slice.modules) {
      operations += other.operations();
      bytes += FileBytes(*other.tensors);
    }
    return slice.modules.size() < kSliceModules && operations <= kSliceOperations &&
           bytes <= kSliceRawBytes;
  }

  // Returns the bytes that need conversion.
  int64_t ListTensors(Slice& slice) const {
    Layout raw;
    for (const Module& module : slice.modules) {
      const ModuleTensors& tensors = *module.tensors;
      slice.tensors.push_back({&tensors.a, module.in, module.in});
      slice.tensors.push_back({&tensors.b, module.rank, module.ldb});
      slice.tensors.push_back({tensors.magnitude, module.out, module.out});
      slice.tensors.back().is_factor = false;
    }
    for (Tensor& tensor : slice.tensors) {
      if (tensor.view == nullptr) continue;
      const DType served = tensor.is_factor ? DType::kBF16 : DType::kF32;
      if (tensor.view->dtype == served && tensor.ld == tensor.columns) continue;
      tensor.raw_at = raw.Add(tensor.bytes());
    }
    return tensors_.place == TensorPlace::kDevice ? 0 : raw.bytes();
  }

  void PointTensors(Slice& slice) {
    for (size_t i = 0; i < slice.modules.size(); ++i) {
      const Module& module = slice.modules[i];
      DoraFactors& factors = factors_[module.id];
      factors.rank = static_cast<int32_t>(module.rank);
      factors.ldb = static_cast<int32_t>(module.ldb);
      factors.scale = static_cast<float>(module.tensors->target.scale);
      factors.a = memory_.as<__nv_bfloat16>(module.a_at);
      factors.b = memory_.as<__nv_bfloat16>(module.b_at);
      if (module.has_norm()) factors.g = memory_.as<float>(module.g_at);
      slice.tensors[3 * i].to = const_cast<__nv_bfloat16*>(ARows(module));
      slice.tensors[3 * i + 1].to = memory_.as<>(module.b_at);
      slice.tensors[3 * i + 2].to = scratch_.as<>(module.magnitude_at);
    }
  }

  // A as in the file, [R, in].
  const __nv_bfloat16* ARows(const Module& module) const {
    return module.is_embedding() ? scratch_.as<__nv_bfloat16>(module.a_rows_at)
                                 : memory_.as<__nv_bfloat16>(module.a_at);
  }
  Flags* FlagsOf(const Module& module) const { return scratch_.as<Flags>(flags_at_) + module.id; }

  absl::Status BeginCopies(size_t index) {
    if (tensors_.place == TensorPlace::kDevice) return absl::OkStatus();
    DORAD_RETURN_IF_ERROR(equipment_.raw_free[index % 2].Synchronize(kLoading));
    std::vector<Uploader::Copy> copies;
    for (const Tensor& tensor : slices_[index].tensors) {
      if (tensor.view == nullptr) continue;
      void* const to =
          tensor.raw_at < 0 ? tensor.to : scratch_.as<>(raw_at_[index % 2] + tensor.raw_at);
      copies.push_back({tensor.view->bytes.data(), to, tensor.bytes()});
    }
    slices_[index].upload = uploader_.Start(copies, tensors_.place == TensorPlace::kPinned);
    return absl::OkStatus();
  }

  // The stages after the copies of a slice.
  absl::Status Finish(size_t index) {
    const Slice& slice = slices_[index];
    if (slice.upload != nullptr) {
      DORAD_RETURN_IF_ERROR(uploader_.Wait(*slice.upload));
      DORAD_RETURN_IF_ERROR(equipment_.copied.Record(uploader_.stream(), kLoading));
      DORAD_RETURN_IF_ERROR(equipment_.copied.Hold(stream_, kLoading));
    }
    for (size_t i = 0; i < slice.tensors.size(); ++i) {
      DORAD_RETURN_IF_ERROR(Import(slice.tensors[i], slice.modules[i / 3], index));
    }
    DORAD_RETURN_IF_ERROR(equipment_.raw_free[index % 2].Record(stream_, kLoading));
    for (const Module& module : slice.modules) {
      if (!module.is_embedding()) continue;
      DORAD_RETURN_IF_CUDA_ERROR(
          kernels::Transpose(ARows(module), module.rank, module.in,
                             memory_.as<__nv_bfloat16>(module.a_at), stream_.get()),
          kLoading);
    }
    return equipment_.gaps->Run(
        stream_, [&](cudaStream_t stream) { return LaunchNorms(slice.modules, stream); });
  }

  // Tensors already on the device always come through here: their values are still unchecked.
  absl::Status Import(const Tensor& tensor, const Module& module, size_t index) const {
    if (tensor.view == nullptr) return absl::OkStatus();
    const void* from = tensor.view->bytes.data();
    if (tensors_.place != TensorPlace::kDevice) {
      if (tensor.raw_at < 0) return absl::OkStatus();
      from = scratch_.as<>(raw_at_[index % 2] + tensor.raw_at);
    }
    const kernels::FloatType type = TypeOf(tensor.view->dtype);
    const int64_t count = tensor.view->num_elements();
    if (!tensor.is_factor) {
      return ToStatus(
          kernels::ImportVector(from, type, count, static_cast<float*>(tensor.to), stream_.get()),
          kLoading);
    }
    kernels::ImportParams params;
    params.from = from;
    params.type = type;
    params.count = count;
    params.columns = tensor.columns;
    params.to = static_cast<__nv_bfloat16*>(tensor.to);
    params.ld = tensor.ld;
    params.not_finite = &FlagsOf(module)->not_finite;
    return ToStatus(kernels::ImportFactor(params, stream_.get()), kLoading);
  }

  absl::Status LaunchNorms(const std::vector<Module>& modules, cudaStream_t stream) const {
    std::vector<kernels::DoraNormParams> batch;
    int64_t workspace_at = workspace_at_;
    for (const Module& module : modules) {
      if (!module.has_norm()) continue;
      kernels::DoraNormParams params;
      params.w = model_.Weight(module.id);
      params.a = ARows(module);
      params.b = factors_[module.id].b;
      params.magnitude = scratch_.as<float>(module.magnitude_at);
      params.norm = scratch_.as<float>(module.norm_at);
      params.g = memory_.as<float>(module.g_at);
      params.degenerate = &FlagsOf(module)->degenerate;
      params.workspace = scratch_.as<>(workspace_at);
      params.workspace_bytes = static_cast<size_t>(module.partials_bytes());
      params.out = module.out;
      params.in = module.in;
      params.rank = module.rank;
      params.ldb = module.ldb;
      params.scale = module.tensors->target.scale;
      params.eps = NormEpsilon(model_.CheckpointDtype(module.id));
      params.w_by_in = module.is_embedding();
      params.isa = model_.isa();
      if (params.scale == 0.0 && !module.is_embedding()) {
        auto* squares = scratch_.as<float>(workspace_at + module.partials_bytes());
        DORAD_RETURN_IF_CUDA_ERROR(
            kernels::SquaredRowNorms(params.w, module.out, module.in, squares, stream), kLoading);
        params.base_sq = squares;
      }
      workspace_at += module.workspace_bytes();
      batch.push_back(params);
    }
    if (batch.empty()) return absl::OkStatus();
    return ToStatus(kernels::DirectNorms(batch.data(), static_cast<int>(batch.size()), stream),
                    kLoading);
  }

  absl::Status Judge() const {
    Violations violations;
    for (const Slice& slice : slices_) {
      for (const Module& module : slice.modules) {
        const Flags& flags = equipment_.flags.as<Flags>()[module.id];
        if (flags.not_finite != 0) {
          violations.Add(absl::StrCat("base_model.model.", module.base->name), "ADAPTER_NOT_FINITE",
                         "a factor has values beyond bf16's range, in which this server computes");
        }
        if (flags.degenerate != 0) DORAD_RETURN_IF_ERROR(Explain(module, violations));
      }
    }
    return violations.ToStatus(kSubject);
  }

  // Lists the degenerate rows of a module.
  absl::Status Explain(const Module& module, Violations& violations) const {
    const auto read = [&](const float* from, std::vector<float>& to) {
      to.resize(static_cast<size_t>(module.out));
      return cudaMemcpyAsync(to.data(), from, to.size() * sizeof(float), cudaMemcpyDeviceToHost,
                             stream_.get());
    };
    std::vector<float> magnitude, norm, g;
    DORAD_RETURN_IF_CUDA_ERROR(read(scratch_.as<float>(module.magnitude_at), magnitude), kLoading);
    DORAD_RETURN_IF_CUDA_ERROR(read(scratch_.as<float>(module.norm_at), norm), kLoading);
    DORAD_RETURN_IF_CUDA_ERROR(read(memory_.as<float>(module.g_at), g), kLoading);
    DORAD_RETURN_IF_ERROR(stream_.Synchronize(kLoading));
    CheckNorms(*module.base, magnitude, norm, g, NormEpsilon(model_.CheckpointDtype(module.id)),
               &violations);
    return absl::OkStatus();
  }

  Equipment& equipment_;
  const CudaModel& model_;
  const Stream& stream_;
  Uploader& uploader_;
  const AdapterTensors& tensors_;
  std::vector<Slice> slices_;
  std::vector<DoraFactors> factors_;  // by module id
  DeviceBuffer memory_;
  int64_t image_at_ = 0;
  DeviceBuffer scratch_;
  int64_t flags_at_ = 0, workspace_at_ = 0;
  int64_t raw_at_[2] = {};
};

class CudaAdapterBuilder final : public adapter::AdapterBuilder {
 public:
  CudaAdapterBuilder(Equipment equipment, std::shared_ptr<const DeviceReader> reader)
      : adapter::AdapterBuilder(&equipment.model->modules()),
        model_(*equipment.model),
        ledger_(equipment.ledger),
        reader_(std::move(reader)),
        equipment_(std::move(equipment)) {}

  absl::StatusOr<std::unique_ptr<adapter::DeviceTensors>> CopyOnDevice(
      const adapter::PeerTensors& peer) override {
    return CopyTensors(peer, reader_, ledger_);
  }

  absl::StatusOr<BuiltAdapter> Build(const AdapterTensors& tensors) override {
    DORAD_ASSIGN_OR_RETURN(const CudaModel::Use weights, model_.UseWeights());
    absl::MutexLock lock(&mu_);
    return AdapterBuild(equipment_, tensors).Run();
  }

 private:
  // The server's weight is bf16.
  absl::StatusOr<bool> EqualsBase(const adapter::BaseCopy& copy) const override {
    constexpr int64_t kElements = 1 << 20;  // bounds the transient copies
    DORAD_ASSIGN_OR_RETURN(const CudaModel::Use weights, model_.UseWeights());
    const TensorView& view = *copy.tensor;
    const bool narrowed = model_.CheckpointDtype(copy.module_id) != DType::kBF16;
    const size_t size = SizeOf(view.dtype);
    std::vector<__nv_bfloat16> ours(kElements), rounded(kElements);
    std::vector<float> theirs(kElements);
    for (int64_t begin = 0; begin < view.num_elements(); begin += kElements) {
      const int64_t count = std::min(kElements, view.num_elements() - begin);
      const auto part = view.bytes.subspan(begin * size, count * size);
      DORAD_RETURN_IF_CUDA_ERROR(cudaMemcpy(ours.data(), model_.Weight(copy.module_id) + begin,
                                            count * 2, cudaMemcpyDeviceToHost),
                                 kLoading);
      ToFloat(view.dtype, part, theirs.data());
      ToBf16(view.dtype, part, reinterpret_cast<uint16_t*>(rounded.data()));
      for (int64_t i = 0; i < count; ++i) {
        const float value = __bfloat162float(ours[i]);
        const float in_file_dtype =
            view.dtype == DType::kF16 ? __half2float(__float2half_rn(value)) : value;
        if (in_file_dtype == theirs[i]) continue;
        if (narrowed && value == __bfloat162float(rounded[i])) continue;
        return false;
      }
    }
    return true;
  }

  const CudaModel& model_;
  MemoryLedger* const ledger_;
  const std::shared_ptr<const DeviceReader> reader_;
  absl::Mutex mu_;
  Equipment equipment_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<adapter::AdapterBuilder>> MakeCudaAdapterBuilder(
    const CudaModel* model, BackgroundLaunchQueue* gaps, MemoryLedger* ledger,
    const Uploader::Options& upload) {
  DORAD_ASSIGN_OR_RETURN(std::unique_ptr<Uploader> uploader, Uploader::Create(upload));
  DORAD_ASSIGN_OR_RETURN(Stream stream, Stream::Create(Priority::kLow));
  DORAD_ASSIGN_OR_RETURN(Event copied, Event::Create());
  DORAD_ASSIGN_OR_RETURN(Event even, Event::Create());
  DORAD_ASSIGN_OR_RETURN(Event odd, Event::Create());
  DORAD_ASSIGN_OR_RETURN(PinnedBuffer flags,
                         PinnedBuffer::Allocate(model->modules().size() * sizeof(Flags)));
  DORAD_ASSIGN_OR_RETURN(std::shared_ptr<const DeviceReader> reader, DeviceReader::Create());
  return std::unique_ptr<adapter::AdapterBuilder>(
      new CudaAdapterBuilder({model,
                              gaps,
                              ledger,
                              std::move(uploader),
                              std::move(stream),
                              std::move(copied),
                              {std::move(even), std::move(odd)},
                              std::move(flags)},
                             std::move(reader)));
}

}  // namespace dorad::cuda
