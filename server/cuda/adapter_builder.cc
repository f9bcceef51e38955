#include "server/cuda/adapter_builder.h"

#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "kernels/dora/norm.h"
#include "server/adapter/violations.h"
#include "server/base/error.h"
#include "server/cuda/adapter.h"
#include "server/cuda/elements.h"
#include "server/cuda/staging.h"
#include "server/model/weight_import.h"

namespace dorad::cuda {
namespace {

using adapter::AdapterTensors;
using adapter::BaseModule;
using adapter::BuiltAdapter;
using adapter::ModuleKind;
using adapter::ModuleTensors;
using adapter::Violations;
using kernels::DoraFactors;

constexpr char kSubject[] = "adapter_model.safetensors";
constexpr char kLoading[] = "loading an adapter";
constexpr int64_t kPieceBytes = 16 << 20;
// Modules whose norms are one launch: the linears of a layer.
constexpr size_t kNormBatch = 7;

// As ops::NormEpsilon: by the dtype of the base weight in the checkpoint.
float NormEpsilon(DType dtype) { return dtype == DType::kF32 ? 1e-12f : 1e-6f; }

// One adapter's build.
class AdapterBuild {
 public:
  AdapterBuild(const CudaModel& model, MemoryLedger* ledger, StagingRing& ring,
               const Stream& stream)
      : model_(model), ledger_(ledger), ring_(ring), stream_(stream) {}
  // After a failure copies may still be on their way to memory that goes now.
  ~AdapterBuild() { (void)stream_.Synchronize(kLoading); }

  absl::StatusOr<BuiltAdapter> Run(const AdapterTensors& tensors) {
    const absl::Time start = absl::Now();
    Layout layout;
    for (const ModuleTensors& module : tensors.modules) modules_.push_back(Place(module, layout));
    const int64_t image_at = layout.Add(ImageBytes(model_.modules().size()));
    DORAD_ASSIGN_OR_RETURN(memory_, DeviceBuffer::Allocate(ledger_, "adapters", layout.bytes()));
    DORAD_RETURN_IF_ERROR(AllocateScratch());
    std::vector<DoraFactors> factors(static_cast<size_t>(model_.modules().size()));
    for (const Module& module : modules_) {
      factors[module.id] = FactorsOf(module);
      DORAD_RETURN_IF_ERROR(UploadFactors(module, factors[module.id]));
    }
    DORAD_RETURN_IF_ERROR(stream_.Synchronize(kLoading));
    const absl::Time copied = absl::Now();
    built_.copy = copied - start;
    for (size_t begin = 0; begin < modules_.size(); begin += kNormBatch) {
      const size_t count = std::min(kNormBatch, modules_.size() - begin);
      DORAD_RETURN_IF_ERROR(
          LaunchNorms(absl::MakeConstSpan(modules_).subspan(begin, count), factors));
    }
    DORAD_RETURN_IF_ERROR(CheckAllNorms(factors));
    built_.norms = absl::Now() - copied;
    DORAD_RETURN_IF_ERROR(violations_.ToStatus(kSubject));
    built_.bytes = memory_.bytes();
    DORAD_ASSIGN_OR_RETURN(built_.weights, FinishAdapter(model_, std::move(memory_), image_at,
                                                         std::move(factors), stream_));
    return std::move(built_);
  }

 private:
  // Where a module's tensors go; offsets in bytes.
  struct Module {
    const ModuleTensors* tensors = nullptr;
    const BaseModule* base = nullptr;
    int id = 0;
    int64_t rank = 0, ldb = 0;
    int64_t out = 0, in = 0;  // of the norm: an embedding's rows are its dimensions
    int64_t a_at = 0, b_at = 0, g_at = 0;
    int64_t norms_at = 0;  // in norms_: norm, magnitude

    bool has_norm() const { return tensors->magnitude != nullptr; }
    bool is_embedding() const { return base->kind == ModuleKind::kEmbedding; }
  };

  Module Place(const ModuleTensors& tensors, Layout& layout) {
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
    if (module.has_norm()) {
      module.g_at = layout.Add(module.out * 4);
      module.norms_at = norms_layout_.Add(2 * module.out * 4);
      int64_t workspace = RoundUp(
          static_cast<int64_t>(kernels::DirectNormWorkspace(module.out, module.in, module.rank)),
          256);
      workspace += module.out * 4;  // ||W||², where it is asked for
      if (module.is_embedding())
        workspace += module.rank * module.in * 2 + 256;  // A as in the file
      workspace_bytes_ = std::max(workspace_bytes_, RoundUp(workspace, 256));
    }
    return module;
  }

  absl::Status AllocateScratch() {
    DORAD_ASSIGN_OR_RETURN(norms_,
                           DeviceBuffer::Allocate(ledger_, "loading", norms_layout_.bytes()));
    DORAD_ASSIGN_OR_RETURN(
        workspace_, DeviceBuffer::Allocate(ledger_, "loading",
                                           static_cast<int64_t>(kNormBatch) * workspace_bytes_));
    return absl::OkStatus();
  }

  DoraFactors FactorsOf(const Module& module) const {
    DoraFactors factors;
    factors.rank = static_cast<int32_t>(module.rank);
    factors.ldb = static_cast<int32_t>(module.ldb);
    factors.scale = static_cast<float>(module.tensors->target.scale);
    factors.a = memory_.as<__nv_bfloat16>(module.a_at);
    factors.b = memory_.as<__nv_bfloat16>(module.b_at);
    if (module.has_norm()) factors.g = memory_.as<float>(module.g_at);
    return factors;
  }

  absl::Status UploadFactors(const Module& module, const DoraFactors& factors) {
    const TensorView& a = module.tensors->a;
    const TensorView& b = module.tensors->b;
    bool finite = true;
    if (module.is_embedding()) {
      DORAD_RETURN_IF_ERROR(
          UploadTransposed(a, module, const_cast<__nv_bfloat16*>(factors.a), &finite));
    } else {
      DORAD_RETURN_IF_ERROR(UploadRows(a, module.rank, module.in, module.in,
                                       const_cast<__nv_bfloat16*>(factors.a), &finite));
    }
    DORAD_RETURN_IF_ERROR(UploadRows(b, module.out, module.rank, module.ldb,
                                     const_cast<__nv_bfloat16*>(factors.b), &finite));
    if (!finite) {
      violations_.Add(absl::StrCat("base_model.model.", module.base->name), "ADAPTER_NOT_FINITE",
                      "a factor has values beyond bf16's range, in which this server computes");
    }
    if (!module.has_norm()) return absl::OkStatus();
    const TensorView& magnitude = *module.tensors->magnitude;
    return ring_.Upload(
        MagnitudeOf(module), module.out, 4,
        [&](int64_t first, int64_t count, std::byte* out) {
          ToFloat(magnitude.dtype, Elements(magnitude, first, count),
                  reinterpret_cast<float*>(out));
        },
        stream_);
  }

  static absl::Span<const std::byte> Elements(const TensorView& view, int64_t first,
                                              int64_t count) {
    const size_t size = SizeOf(view.dtype);
    return view.bytes.subspan(first * size, count * size);
  }

  // [rows, cols] to bf16 with a leading dimension; what lies between is zero.
  absl::Status UploadRows(const TensorView& view, int64_t rows, int64_t cols, int64_t ld,
                          __nv_bfloat16* to, bool* finite) {
    return ring_.Upload(
        to, rows, ld * 2,
        [&](int64_t first, int64_t count, std::byte* out) {
          auto* elements = reinterpret_cast<__nv_bfloat16*>(out);
          if (ld == cols) {
            ToBf16(view.dtype, Elements(view, first * cols, count * cols), elements);
          } else {
            std::memset(out, 0, count * ld * 2);
            for (int64_t row = 0; row < count; ++row) {
              ToBf16(view.dtype, Elements(view, (first + row) * cols, cols), elements + row * ld);
            }
          }
          NoteFinite(view, out, count * ld, finite);
        },
        stream_);
  }

  // [rank, in] to [in, rank].
  absl::Status UploadTransposed(const TensorView& view, const Module& module, __nv_bfloat16* to,
                                bool* finite) {
    std::vector<__nv_bfloat16> whole(static_cast<size_t>(view.num_elements()));
    ToBf16(view.dtype, view.bytes, whole.data());
    return ring_.Upload(
        to, module.in, module.rank * 2,
        [&](int64_t first, int64_t count, std::byte* out) {
          auto* elements = reinterpret_cast<__nv_bfloat16*>(out);
          for (int64_t i = 0; i < count; ++i) {
            for (int64_t r = 0; r < module.rank; ++r) {
              elements[i * module.rank + r] = whole[r * module.in + first + i];
            }
          }
          NoteFinite(view, out, count * module.rank, finite);
        },
        stream_);
  }

  // Only the rounding of fp32 can make a finite value infinite.
  static void NoteFinite(const TensorView& view, const std::byte* rounded, int64_t count,
                         bool* finite) {
    if (view.dtype != DType::kF32) return;
    *finite =
        *finite && !model::HasNonFinite({rounded, static_cast<size_t>(count * 2)}, DType::kBF16);
  }

  float* NormOf(const Module& module) const { return norms_.as<float>(module.norms_at); }
  float* MagnitudeOf(const Module& module) const { return NormOf(module) + module.out; }

  absl::Status LaunchNorms(absl::Span<const Module> modules,
                           const std::vector<DoraFactors>& factors) {
    std::vector<kernels::DoraNormParams> batch;
    for (size_t i = 0; i < modules.size(); ++i) {
      const Module& module = modules[i];
      if (!module.has_norm()) continue;
      const int64_t space = static_cast<int64_t>(i) * workspace_bytes_;
      const size_t bytes = kernels::DirectNormWorkspace(module.out, module.in, module.rank);
      int64_t next = space + RoundUp(static_cast<int64_t>(bytes), 256);
      kernels::DoraNormParams params;
      params.w = model_.Weight(module.id);
      params.a = factors[module.id].a;
      params.b = factors[module.id].b;
      params.magnitude = MagnitudeOf(module);
      params.norm = NormOf(module);
      params.g = const_cast<float*>(factors[module.id].g);
      params.workspace = workspace_.as<>(space);
      params.workspace_bytes = bytes;
      params.out = module.out;
      params.in = module.in;
      params.rank = module.rank;
      params.ldb = module.ldb;
      params.scale = module.tensors->target.scale;
      params.eps = NormEpsilon(model_.CheckpointDtype(module.id));
      params.w_by_in = module.is_embedding();
      if (module.is_embedding()) {
        // The norm wants A as the file has it.
        auto* a = workspace_.as<__nv_bfloat16>(RoundUp(next, 256));
        bool finite = true;
        DORAD_RETURN_IF_ERROR(
            UploadRows(module.tensors->a, module.rank, module.in, module.in, a, &finite));
        params.a = a;
      } else if (params.scale == 0.0) {
        auto* squares = workspace_.as<float>(next);
        DORAD_RETURN_IF_CUDA_ERROR(
            kernels::SquaredRowNorms(params.w, module.out, module.in, squares, stream_.get()),
            kLoading);
        params.base_sq = squares;
      }
      batch.push_back(params);
    }
    if (batch.empty()) return absl::OkStatus();
    return ToStatus(
        kernels::DirectNorms(batch.data(), static_cast<int>(batch.size()), stream_.get()),
        kLoading);
  }

  // Also waits for the norms.
  absl::Status CheckAllNorms(const std::vector<DoraFactors>& factors) {
    std::vector<float> norms(static_cast<size_t>(norms_layout_.bytes() / 4));
    DORAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(norms.data(), norms_.as<>(), norms_layout_.bytes(),
                                               cudaMemcpyDeviceToHost, stream_.get()),
                               kLoading);
    std::vector<float> g;
    for (const Module& module : modules_) {
      if (!module.has_norm()) continue;
      g.resize(static_cast<size_t>(module.out));
      DORAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(g.data(), factors[module.id].g, module.out * 4,
                                                 cudaMemcpyDeviceToHost, stream_.get()),
                                 kLoading);
      DORAD_RETURN_IF_ERROR(stream_.Synchronize(kLoading));
      const auto both = absl::MakeConstSpan(norms).subspan(module.norms_at / 4, 2 * module.out);
      CheckNorms(*module.base, both.subspan(module.out), both.subspan(0, module.out), g,
                 NormEpsilon(model_.CheckpointDtype(module.id)), &violations_);
    }
    return stream_.Synchronize(kLoading);
  }

  const CudaModel& model_;
  MemoryLedger* const ledger_;
  StagingRing& ring_;
  const Stream& stream_;
  std::vector<Module> modules_;
  Layout norms_layout_;
  int64_t workspace_bytes_ = 0;  // of one module
  DeviceBuffer memory_;
  DeviceBuffer norms_;
  DeviceBuffer workspace_;
  Violations violations_;
  BuiltAdapter built_;
};

class CudaAdapterBuilder final : public adapter::AdapterBuilder {
 public:
  CudaAdapterBuilder(const CudaModel* model, MemoryLedger* ledger, StagingRing ring, Stream stream)
      : adapter::AdapterBuilder(&model->modules()),
        model_(*model),
        ledger_(ledger),
        ring_(std::move(ring)),
        stream_(std::move(stream)) {}

  absl::StatusOr<BuiltAdapter> Build(const AdapterTensors& tensors) override {
    absl::MutexLock lock(&mu_);
    return AdapterBuild(model_, ledger_, ring_, stream_).Run(tensors);
  }

 private:
  // Ours is bf16.
  absl::StatusOr<bool> EqualsBase(const adapter::BaseCopy& copy) const override {
    constexpr int64_t kElements = 1 << 20;  // bounds the transient copies
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
      ToBf16(view.dtype, part, rounded.data());
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
  absl::Mutex mu_;
  StagingRing ring_ ABSL_GUARDED_BY(mu_);
  const Stream stream_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<adapter::AdapterBuilder>> MakeCudaAdapterBuilder(
    const CudaModel* model, MemoryLedger* ledger) {
  DORAD_ASSIGN_OR_RETURN(StagingRing ring, StagingRing::Create(kPieceBytes));
  DORAD_ASSIGN_OR_RETURN(Stream stream, Stream::Create());
  return std::unique_ptr<adapter::AdapterBuilder>(
      new CudaAdapterBuilder(model, ledger, std::move(ring), std::move(stream)));
}

}  // namespace dorad::cuda
