#include "server/cuda/adapter.h"

#include <cuda_fp16.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/dora/linear.h"
#include "kernels/random/fill.h"
#include "kernels/reference/row_norms.h"
#include "server/adapter/violations.h"
#include "server/base/error.h"
#include "server/cuda/elements.h"

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

std::atomic<uint64_t> next_id{1};

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// As ops::NormEpsilon: by the dtype of the base weight in the checkpoint.
double NormEpsilon(DType dtype) { return dtype == DType::kF32 ? 1e-12 : 1e-6; }

std::vector<float> Floats(const TensorView& view) {
  std::vector<float> values(static_cast<size_t>(view.num_elements()));
  ToFloat(view.dtype, view.bytes, values.data());
  return values;
}

// Fills in what a slot needs and makes the weights. The stream's work is done on return.
absl::StatusOr<std::shared_ptr<const CudaAdapterWeights>> Finish(const CudaModel& model,
                                                                 DeviceBuffer memory,
                                                                 int64_t image_at,
                                                                 std::vector<DoraFactors> modules,
                                                                 const Stream& stream) {
  const int count = model.modules().size();
  std::vector<std::byte> image(static_cast<size_t>(ImageBytes(count)));
  std::memcpy(image.data(), modules.data(), count * sizeof(DoraFactors));
  for (int id = 0; id < count; ++id) {
    const BaseModule& module = model.modules().all()[id];
    if (module.kind != ModuleKind::kLinear) continue;
    alignas(64) CUtensorMap maps[2];
    DORAD_RETURN_IF_CUDA_ERROR(kernels::EncodeDoraMaps(modules[id], static_cast<int>(module.cols),
                                                       static_cast<int>(module.rows), maps),
                               kLoading);
    std::memcpy(image.data() + ImageMapsOffset(count) + id * sizeof(maps), maps, sizeof(maps));
  }
  auto* on_device = memory.as<std::byte>(image_at);
  DORAD_RETURN_IF_CUDA_ERROR(
      cudaMemcpyAsync(on_device, image.data(), image.size(), cudaMemcpyHostToDevice, stream.get()),
      kLoading);
  DORAD_RETURN_IF_ERROR(stream.Synchronize(kLoading));
  return std::make_shared<const CudaAdapterWeights>(std::move(memory), std::move(modules),
                                                    on_device);
}

// One adapter's build. The stream is its own: work of other streams goes on beside it.
class AdapterBuild {
 public:
  AdapterBuild(const CudaModel& model, MemoryLedger* ledger, const Stream& stream)
      : model_(model), ledger_(ledger), stream_(stream) {}

  absl::StatusOr<BuiltAdapter> Run(const AdapterTensors& tensors) {
    Layout layout;
    std::vector<Offsets> offsets;
    for (const ModuleTensors& module : tensors.modules) {
      offsets.push_back(Place(module, layout));
    }
    const int64_t image_at = layout.Add(ImageBytes(model_.modules().size()));
    DORAD_ASSIGN_OR_RETURN(DeviceBuffer memory,
                           DeviceBuffer::Allocate(ledger_, "adapters", layout.bytes()));
    std::vector<DoraFactors> modules(static_cast<size_t>(model_.modules().size()));
    for (size_t i = 0; i < tensors.modules.size(); ++i) {
      const ModuleTensors& module = tensors.modules[i];
      DORAD_ASSIGN_OR_RETURN(modules[module.target.module_id],
                             BuildModule(module, offsets[i], memory));
    }
    DORAD_RETURN_IF_ERROR(violations_.ToStatus(kSubject));
    built_.bytes = memory.bytes();
    DORAD_ASSIGN_OR_RETURN(
        built_.weights, Finish(model_, std::move(memory), image_at, std::move(modules), stream_));
    return std::move(built_);
  }

 private:
  struct Offsets {
    int64_t a = 0, b = 0, g = 0;
  };

  const BaseModule& ModuleOf(const ModuleTensors& tensors) const {
    return model_.modules().all()[tensors.target.module_id];
  }

  Offsets Place(const ModuleTensors& tensors, Layout& layout) const {
    const int64_t rank = tensors.target.rank;
    Offsets offsets;
    offsets.a = layout.Add(tensors.a.num_elements() * 2);
    offsets.b = layout.Add(tensors.b.shape[0] * RoundUp(rank, 8) * 2);
    if (tensors.magnitude != nullptr) offsets.g = layout.Add(tensors.b.shape[0] * 4);
    return offsets;
  }

  absl::StatusOr<DoraFactors> BuildModule(const ModuleTensors& tensors, const Offsets& offsets,
                                          const DeviceBuffer& memory) {
    const BaseModule& module = ModuleOf(tensors);
    const absl::Time start = absl::Now();
    DoraFactors factors;
    factors.rank = tensors.target.rank;
    factors.ldb = static_cast<int32_t>(RoundUp(factors.rank, 8));
    factors.scale = static_cast<float>(tensors.target.scale);
    factors.a = memory.as<__nv_bfloat16>(offsets.a);
    factors.b = memory.as<__nv_bfloat16>(offsets.b);
    DORAD_RETURN_IF_ERROR(UploadFactors(tensors, module, factors));
    const absl::Time copied = absl::Now();
    built_.copy += copied - start;
    if (tensors.magnitude == nullptr) return factors;
    factors.g = memory.as<float>(offsets.g);
    DORAD_RETURN_IF_ERROR(UploadScale(tensors, module, factors));
    built_.norms += absl::Now() - copied;
    return factors;
  }

  absl::Status UploadFactors(const ModuleTensors& tensors, const BaseModule& module,
                             const DoraFactors& factors) {
    const int64_t rank = factors.rank;
    std::vector<__nv_bfloat16> a(static_cast<size_t>(tensors.a.num_elements()));
    ToBf16(tensors.a.dtype, tensors.a.bytes, a.data());
    if (module.kind == ModuleKind::kEmbedding) a = Transposed(a, rank, module.rows);
    std::vector<__nv_bfloat16> narrow(static_cast<size_t>(tensors.b.num_elements()));
    ToBf16(tensors.b.dtype, tensors.b.bytes, narrow.data());
    const int64_t rows = tensors.b.shape[0];
    std::vector<__nv_bfloat16> b(static_cast<size_t>(rows * factors.ldb), __float2bfloat16_rn(0));
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(narrow.begin() + row * rank, rank, b.begin() + row * factors.ldb);
    }
    for (const auto* values : {&a, &b}) {
      const bool finite = std::all_of(values->begin(), values->end(), [](__nv_bfloat16 value) {
        return std::isfinite(__bfloat162float(value));
      });
      if (!finite) {
        violations_.Add(absl::StrCat("base_model.model.", module.name), "ADAPTER_NOT_FINITE",
                        "a factor has values beyond bf16's range, in which this server computes");
      }
    }
    DORAD_RETURN_IF_ERROR(Upload(a, const_cast<__nv_bfloat16*>(factors.a)));
    return Upload(b, const_cast<__nv_bfloat16*>(factors.b));
  }

  absl::Status UploadScale(const ModuleTensors& tensors, const BaseModule& module,
                           const DoraFactors& factors) {
    DORAD_ASSIGN_OR_RETURN(const std::vector<float> norms, Norms(tensors, module, factors.scale));
    const std::vector<float> magnitude = Floats(*tensors.magnitude);
    const double eps = NormEpsilon(model_.CheckpointDtype(tensors.target.module_id));
    std::vector<float> g(norms.size());
    for (size_t i = 0; i < g.size(); ++i) {
      // NaN stays NaN.
      const float floor = norms[i] < static_cast<float>(eps) ? static_cast<float>(eps) : norms[i];
      g[i] = magnitude[i] / floor;
    }
    CheckNorms(module, magnitude, norms, g, eps, &violations_);
    return Upload(g, const_cast<float*>(factors.g));
  }

  absl::StatusOr<std::vector<float>> Norms(const ModuleTensors& tensors, const BaseModule& module,
                                           float scale) {
    const std::vector<float> a = Floats(tensors.a);
    const std::vector<float> b = Floats(tensors.b);
    const bool linear = module.kind == ModuleKind::kLinear;
    kernels::RowNormsParams params;
    params.weight = model_.Weight(tensors.target.module_id);
    params.rows = linear ? module.rows : module.cols;
    params.cols = linear ? module.cols : module.rows;
    params.row_stride = linear ? module.cols : 1;
    params.col_stride = linear ? 1 : module.cols;
    params.rank = tensors.target.rank;
    params.scale = scale;
    Layout layout;
    const int64_t a_at = layout.Add(static_cast<int64_t>(a.size()) * 4);
    const int64_t b_at = layout.Add(static_cast<int64_t>(b.size()) * 4);
    const int64_t norms_at = layout.Add(params.rows * 4);
    DORAD_ASSIGN_OR_RETURN(const DeviceBuffer scratch,
                           DeviceBuffer::Allocate(ledger_, "loading", layout.bytes()));
    params.a = scratch.as<float>(a_at);
    params.b = scratch.as<float>(b_at);
    params.norms = scratch.as<float>(norms_at);
    DORAD_RETURN_IF_ERROR(Upload(a, scratch.as<float>(a_at)));
    DORAD_RETURN_IF_ERROR(Upload(b, scratch.as<float>(b_at)));
    DORAD_RETURN_IF_CUDA_ERROR(kernels::RowNorms(params, stream_.get()), kLoading);
    std::vector<float> norms(static_cast<size_t>(params.rows));
    DORAD_RETURN_IF_CUDA_ERROR(
        cudaMemcpyAsync(norms.data(), params.norms, norms.size() * sizeof(float),
                        cudaMemcpyDeviceToHost, stream_.get()),
        kLoading);
    DORAD_RETURN_IF_ERROR(stream_.Synchronize(kLoading));
    return norms;
  }

  // Returns when the copy is done: the source may go.
  template <typename T>
  absl::Status Upload(const std::vector<T>& values, T* to) {
    DORAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(to, values.data(), values.size() * sizeof(T),
                                               cudaMemcpyHostToDevice, stream_.get()),
                               kLoading);
    return stream_.Synchronize(kLoading);
  }

  static std::vector<__nv_bfloat16> Transposed(const std::vector<__nv_bfloat16>& from, int64_t rows,
                                               int64_t cols) {
    std::vector<__nv_bfloat16> to(from.size());
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t col = 0; col < cols; ++col) to[col * rows + row] = from[row * cols + col];
    }
    return to;
  }

  const CudaModel& model_;
  MemoryLedger* const ledger_;
  const Stream& stream_;
  Violations violations_;
  BuiltAdapter built_;
};

class CudaAdapterBuilder final : public adapter::AdapterBuilder {
 public:
  CudaAdapterBuilder(const CudaModel* model, MemoryLedger* ledger)
      : model_(*model), ledger_(ledger) {}

  absl::Status CheckBaseCopies(const AdapterTensors& tensors) override {
    Violations violations;
    for (const adapter::BaseCopy& copy : tensors.base_copies) {
      DORAD_ASSIGN_OR_RETURN(const bool equal, EqualsBase(copy));
      if (equal) continue;
      violations.Add(
          copy.key, "ADAPTER_BASE_DIFFERS",
          absl::StrCat("the file's copy of ", model_.modules().all()[copy.module_id].name,
                       " differs from the base model's weight: the adapter was trained "
                       "on other weights or with a resized vocabulary"));
    }
    return violations.ToStatus(kSubject);
  }

  absl::StatusOr<BuiltAdapter> Build(const AdapterTensors& tensors) override {
    DORAD_ASSIGN_OR_RETURN(const Stream stream, Stream::Create());
    return AdapterBuild(model_, ledger_, stream).Run(tensors);
  }

 private:
  // Equal after the roundings that lie between the trainer's copy and ours, which is bf16: the file
  // may be fp16, or the checkpoint finer than bf16.
  absl::StatusOr<bool> EqualsBase(const adapter::BaseCopy& copy) const {
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
};

}  // namespace

CudaAdapterWeights::CudaAdapterWeights(DeviceBuffer memory,
                                       std::vector<kernels::DoraFactors> modules, const void* image)
    : id_(next_id++), memory_(std::move(memory)), modules_(std::move(modules)), image_(image) {}

int64_t ImageMapsOffset(int modules) {
  return RoundUp(modules * static_cast<int64_t>(sizeof(DoraFactors)), 256);
}

int64_t ImageBytes(int modules) {
  return ImageMapsOffset(modules) + modules * int64_t{2 * sizeof(CUtensorMap)};
}

absl::StatusOr<std::shared_ptr<const CudaAdapterWeights>> MakeRandomAdapter(const CudaModel& model,
                                                                            int rank, uint32_t seed,
                                                                            MemoryLedger* ledger) {
  const int count = model::EmbeddingId(model.config());  // the layers' modules
  if (rank % 8 != 0) {
    return MakeError(absl::StatusCode::kInvalidArgument, "RANK_UNSUPPORTED",
                     "random adapters have a rank that is a multiple of 8");
  }
  Layout layout;
  std::vector<int64_t> offsets;
  for (int id = 0; id < count; ++id) {
    const BaseModule& module = model.modules().all()[id];
    offsets.push_back(layout.Add(rank * module.cols * 2));
    offsets.push_back(layout.Add(module.rows * rank * 2));
    offsets.push_back(layout.Add(module.rows * 4));
  }
  const int64_t image_at = layout.Add(ImageBytes(model.modules().size()));
  DORAD_ASSIGN_OR_RETURN(DeviceBuffer memory,
                         DeviceBuffer::Allocate(ledger, "adapters", layout.bytes()));
  DORAD_ASSIGN_OR_RETURN(const Stream stream, Stream::Create());
  std::vector<DoraFactors> modules(static_cast<size_t>(model.modules().size()));
  for (int id = 0; id < count; ++id) {
    const BaseModule& module = model.modules().all()[id];
    auto* a = memory.as<__nv_bfloat16>(offsets[3 * id]);
    auto* b = memory.as<__nv_bfloat16>(offsets[3 * id + 1]);
    auto* g = memory.as<float>(offsets[3 * id + 2]);
    modules[id] = {a, b, g, 0.5f, rank, rank, 0};
    DORAD_RETURN_IF_CUDA_ERROR(
        kernels::FillRandom(a, rank * module.cols, 0.035f, seed++, stream.get()), kLoading);
    DORAD_RETURN_IF_CUDA_ERROR(
        kernels::FillRandom(b, module.rows * rank, 0.035f, seed++, stream.get()), kLoading);
    DORAD_RETURN_IF_CUDA_ERROR(kernels::FillConstant(g, module.rows, 1.01f, stream.get()),
                               kLoading);
  }
  return Finish(model, std::move(memory), image_at, std::move(modules), stream);
}

std::unique_ptr<adapter::AdapterBuilder> MakeCudaAdapterBuilder(const CudaModel* model,
                                                                MemoryLedger* ledger) {
  return std::make_unique<CudaAdapterBuilder>(model, ledger);
}

}  // namespace dorad::cuda
