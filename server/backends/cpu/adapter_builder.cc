#include "server/backends/cpu/adapter_builder.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <omp.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/adapter/peft/violations.h"
#include "server/backends/cpu/adapter_weights.h"
#include "server/backends/cpu/ops/dora_norm.h"
#include "server/platform/check.h"
#include "server/platform/instant.h"

namespace dorad::adapter {
namespace {

constexpr char kSubject[] = "adapter_model.safetensors";

at::ScalarType ScalarTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return at::kHalf;
    case DType::kBF16:
      return at::kBFloat16;
    case DType::kF32:
      break;
  }
  return at::kFloat;
}

// Rows [begin, end) of a file's tensor, in memory of their own: the file's bytes may be unaligned.
at::Tensor CopyRows(const TensorView& view, int64_t begin, int64_t end) {
  std::vector<int64_t> shape = view.shape;
  const int64_t rows = shape[0];
  shape[0] = end - begin;
  at::Tensor tensor = at::empty(shape, at::TensorOptions(ScalarTypeOf(view.dtype)));
  const size_t row_bytes = rows == 0 ? 0 : view.bytes.size() / static_cast<size_t>(rows);
  std::memcpy(tensor.mutable_data_ptr(), view.bytes.data() + row_bytes * begin, tensor.nbytes());
  return tensor;
}

at::Tensor Copy(const TensorView& view) { return CopyRows(view, 0, view.shape[0]); }

// fp32, or bf16 when both factors are bf16 in the file: exact either way.
std::pair<at::Tensor, at::Tensor> CopyFactors(const ModuleTensors& module) {
  at::Tensor a = Copy(module.a);
  at::Tensor b = Copy(module.b);
  if (a.scalar_type() == at::kBFloat16 && b.scalar_type() == at::kBFloat16) return {a, b};
  return {a.to(at::kFloat), b.to(at::kFloat)};
}

absl::Span<const float> Floats(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<float>(), static_cast<size_t>(tensor.numel())};
}

std::string ModuleField(const BaseModule& module) {
  return absl::StrCat("base_model.model.", module.name);
}

// One adapter's build.
class AdapterBuild {
 public:
  AdapterBuild(const BaseModules& modules, BaseWeightSource& base, const CpuBuilderOptions& options)
      : modules_(modules), base_(base), options_(options) {}

  absl::StatusOr<BuiltAdapter> Run(const AdapterTensors& tensors) {
    DORAD_CHECK(tensors.place != TensorPlace::kDevice);
    auto weights = std::make_shared<CpuAdapterWeights>();
    weights->modules.resize(static_cast<size_t>(modules_.size()));
    for (const ModuleTensors& module : tensors.modules) {
      weights->modules[module.target.module_id] = BuildModule(module);
    }
    DORAD_RETURN_IF_ERROR(violations_.ToStatus(kSubject));
    built_.bytes = weights->bytes();
    built_.weights = std::move(weights);
    return std::move(built_);
  }

 private:
  ops::AdapterFactors BuildModule(const ModuleTensors& tensors) {
    const BaseModule& module = modules_.all()[tensors.target.module_id];
    const Instant start = SteadyNow();
    auto [a, b] = CopyFactors(tensors);
    const Instant copied = SteadyNow();
    ops::AdapterFactors factors;
    factors.scale = static_cast<float>(tensors.target.scale);
    // The norm uses the factors of the file, before any rounding for serving.
    if (tensors.magnitude != nullptr) factors.g_O = MagnitudeScaleOf(tensors, module, a, b);
    const Instant normed = SteadyNow();
    factors.a_RI = ServingLayout(module, module.kind == ModuleKind::kEmbedding ? a.t() : a);
    factors.b_OR = ServingLayout(module, b);
    built_.copy += Between(start, copied) + Since(normed);
    built_.norms += Between(copied, normed);
    return factors;
  }

  at::Tensor MagnitudeScaleOf(const ModuleTensors& tensors, const BaseModule& module,
                              const at::Tensor& a, const at::Tensor& b) {
    const int id = tensors.target.module_id;
    const ops::NormAxis axis =
        module.kind == ModuleKind::kLinear ? ops::NormAxis::kRows : ops::NormAxis::kCols;
    const at::Tensor norms =
        ops::FactoredNorms(base_.Weight(id), base_.SquaredNorms(id), a, b, tensors.target.scale,
                           axis, {options_.norm_chunk_budget_bytes});
    const at::Tensor magnitude = Copy(*tensors.magnitude).to(at::kFloat);
    const double eps = ops::NormEpsilon(base_.CheckpointDtype(id));
    at::Tensor g = ops::MagnitudeScale(magnitude, norms, eps);
    g = g.contiguous();
    CheckNorms(module, Floats(magnitude), Floats(norms), Floats(g), eps, &violations_);
    return g;
  }

  at::Tensor ServingLayout(const BaseModule& module, const at::Tensor& factor) {
    if (!options_.factors_bf16 || factor.scalar_type() == at::kBFloat16) return factor.contiguous();
    at::Tensor rounded = factor.to(at::kBFloat16).contiguous();
    const TensorView view{
        DType::kBF16, rounded.sizes().vec(),
        absl::MakeConstSpan(static_cast<const std::byte*>(rounded.const_data_ptr()),
                            rounded.nbytes())};
    if (!AllFinite(view)) {
      violations_.Add(ModuleField(module), "ADAPTER_NOT_FINITE",
                      "a factor has values beyond bf16's range, in which this server computes");
    }
    return rounded;
  }

  const BaseModules& modules_;
  BaseWeightSource& base_;
  const CpuBuilderOptions& options_;
  Violations violations_;
  BuiltAdapter built_;
};

// Compares the file's copy with the weight as stored; see AdapterBuilder::EqualsBase.
bool Equals(const TensorView& copy, const at::Tensor& weight, at::ScalarType checkpoint) {
  constexpr int64_t kRows = 1024;  // bounds the transient copies
  const at::ScalarType file_dtype = ScalarTypeOf(copy.dtype);
  const bool narrowed = weight.scalar_type() == at::kBFloat16 && checkpoint != at::kBFloat16;
  const auto same = [](const at::Tensor& x, const at::Tensor& y) {
    return x.to(at::kFloat).equal(y.to(at::kFloat));
  };
  for (int64_t begin = 0; begin < weight.size(0); begin += kRows) {
    const int64_t end = std::min(begin + kRows, weight.size(0));
    const at::Tensor theirs = CopyRows(copy, begin, end);
    const at::Tensor ours = weight.slice(0, begin, end);
    if (!same(ours.to(file_dtype), theirs) && !(narrowed && same(ours, theirs.to(at::kBFloat16)))) {
      return false;
    }
  }
  return true;
}

class CpuAdapterBuilder final : public AdapterBuilder {
 public:
  CpuAdapterBuilder(const BaseModules* modules, BaseWeightSource* base, CpuBuilderOptions options)
      : AdapterBuilder(modules), base_(*base), options_(options) {}

  // A load must not use the cores of running streams: this thread's parallel regions stay on it.
  void PrepareThread() override {
    // The first call on a thread installs ATen's default, so it precedes ours. at::set_num_threads
    // would also change the default of later threads.
    (void)at::get_num_threads();
    omp_set_num_threads(1);
  }

  absl::StatusOr<BuiltAdapter> Build(const AdapterTensors& tensors) override {
    return AdapterBuild(modules_, base_, options_).Run(tensors);
  }

 private:
  absl::StatusOr<bool> EqualsBase(const BaseCopy& copy) const override {
    return Equals(*copy.tensor, base_.Weight(copy.module_id),
                  base_.CheckpointDtype(copy.module_id));
  }

  BaseWeightSource& base_;
  const CpuBuilderOptions options_;
};

}  // namespace

int64_t CpuAdapterWeights::bytes() const {
  int64_t total = 0;
  for (const auto& factors : modules) {
    if (!factors) continue;
    total += static_cast<int64_t>(factors->a_RI.nbytes() + factors->b_OR.nbytes());
    if (factors->g_O.defined()) total += static_cast<int64_t>(factors->g_O.nbytes());
  }
  return total;
}

std::unique_ptr<AdapterBuilder> MakeCpuAdapterBuilder(const BaseModules* modules,
                                                      BaseWeightSource* base,
                                                      CpuBuilderOptions options) {
  return std::make_unique<CpuAdapterBuilder>(modules, base, options);
}

}  // namespace dorad::adapter
