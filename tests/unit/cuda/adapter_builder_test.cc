#include "server/backends/cuda/adapter_builder.h"

#include <cuda_fp16.h>

#include "server/backends/cuda/adapter.h"
#include "server/backends/cuda/elements.h"
#include "server/platform/files/elements.h"
#include "tests/unit/cuda/small_model.h"
#include "tests/unit/kernels/device.h"

namespace dorad::cuda {
namespace {

using adapter::AdapterTensors;
using adapter::BaseModule;
using adapter::BuiltAdapter;
using adapter::ModuleKind;
using adapter::TensorPlace;

// An adapter's tensors in one piece of memory, anywhere.
class Tensors {
 public:
  Tensors(TensorPlace place, DType dtype) : dtype_(dtype) { tensors_.place = place; }

  // One module with smooth, different values. rank 0: not adapted at all.
  void Add(int id, const BaseModule& module, int rank, double scale, bool dora = true) {
    adapter::ModuleTensors tensors;
    tensors.target.module_id = id;
    tensors.target.rank = rank;
    tensors.target.scale = scale;
    const bool linear = module.kind == ModuleKind::kLinear;
    const int64_t in = linear ? module.cols : module.rows;
    const int64_t out = linear ? module.rows : module.cols;
    tensors.a = Values({rank, in}, 0.05f, 0.0f);
    tensors.b = Values({out, rank}, 0.05f, 0.0f);
    tensors_.modules.push_back(tensors);
    magnitudes_.push_back(nullptr);
    if (dora) {
      magnitudes_.back() = std::make_unique<TensorView>(Values({out}, 0.1f, 1.0f));
    } else {
      offsets_.push_back(-1);
    }
  }

  // A number of tensor `part` (0: A, 1: B, 2: magnitude) of the i-th module.
  void Plant(size_t i, int part, int64_t element, float value) {
    Store(offsets_[3 * i + static_cast<size_t>(part)], element, value);
  }

  // The views get their addresses. Once.
  const AdapterTensors& Finish() {
    const std::byte* base = nullptr;
    // Files have no alignment; what lies on a device is aligned to its elements.
    const size_t off = tensors_.place == TensorPlace::kDevice ? SizeOf(dtype_) : 1;
    if (tensors_.place == TensorPlace::kHost) {
      host_.resize(bytes_.size() + off);
      std::memcpy(host_.data() + off, bytes_.data(), bytes_.size());
      base = host_.data() + off;
    } else if (tensors_.place == TensorPlace::kPinned) {
      pinned_ = Must(PinnedBuffer::Allocate(static_cast<int64_t>(bytes_.size() + off)));
      std::memcpy(pinned_.as<>() + off, bytes_.data(), bytes_.size());
      base = pinned_.as<>() + off;
    } else {
      device_ = std::make_unique<kernels::DeviceBuffer<std::byte>>(bytes_.size() + off);
      EXPECT_EQ(
          cudaMemcpy(device_->get() + off, bytes_.data(), bytes_.size(), cudaMemcpyHostToDevice),
          cudaSuccess);
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      base = device_->get() + off;
    }
    const auto place = [&](TensorView& view, size_t index) {
      view.bytes = {base + offsets_[index],
                    static_cast<size_t>(view.num_elements()) * SizeOf(dtype_)};
    };
    for (size_t i = 0; i < tensors_.modules.size(); ++i) {
      place(tensors_.modules[i].a, 3 * i);
      place(tensors_.modules[i].b, 3 * i + 1);
      if (magnitudes_[i] == nullptr) continue;
      place(*magnitudes_[i], 3 * i + 2);
      tensors_.modules[i].magnitude = magnitudes_[i].get();
    }
    return tensors_;
  }

 private:
  TensorView Values(std::vector<int64_t> shape, float size, float centre) {
    const TensorView view{dtype_, std::move(shape), {}};
    offsets_.push_back(static_cast<int64_t>(bytes_.size()));
    bytes_.resize(bytes_.size() + static_cast<size_t>(view.num_elements()) * SizeOf(dtype_));
    for (int64_t i = 0; i < view.num_elements(); ++i) {
      Store(offsets_.back(), i,
            centre + size * std::sin(0.37f * static_cast<float>(++made_ % 10007)));
    }
    return view;
  }

  void Store(int64_t at, int64_t element, float value) {
    std::byte* to = bytes_.data() + at + element * static_cast<int64_t>(SizeOf(dtype_));
    const __half half = __float2half_rn(value);
    const __nv_bfloat16 brain = __float2bfloat16_rn(value);
    const void* from = dtype_ == DType::kF32   ? static_cast<const void*>(&value)
                       : dtype_ == DType::kF16 ? static_cast<const void*>(&half)
                                               : static_cast<const void*>(&brain);
    std::memcpy(to, from, SizeOf(dtype_));
  }

  const DType dtype_;
  AdapterTensors tensors_;
  std::vector<std::unique_ptr<TensorView>> magnitudes_;
  std::vector<int64_t> offsets_;  // of A, B and magnitude of each module
  int64_t made_ = 0;
  std::vector<std::byte> bytes_;
  std::vector<std::byte> host_;
  PinnedBuffer pinned_;
  std::unique_ptr<kernels::DeviceBuffer<std::byte>> device_;
};

template <typename T>
std::vector<T> Read(const T* from, int64_t size) {
  std::vector<T> values(static_cast<size_t>(size));
  EXPECT_EQ(cudaMemcpy(values.data(), from, values.size() * sizeof(T), cudaMemcpyDeviceToHost),
            cudaSuccess);
  return values;
}

class AdapterBuilderTest : public kernels::IsaTest {
 protected:
  void SetUp() override {
    kernels::IsaTest::SetUp();
    if (IsSkipped()) return;
    ASSERT_TRUE(OpenDevice().ok());
    model_ = Must(CudaModel::Random(SmallModel(3), 1, &ledger_, GetParam()));
    gaps_ = Must(BackgroundLaunchQueue::Create());
    // Pieces smaller than most tensors.
    builder_ = Must(MakeCudaAdapterBuilder(model_.get(), gaps_.get(), &ledger_, {3, 4096, 2}));
  }

  // Every module, embedding and head too, with ranks that fit no vector and one without adapter,
  // one without magnitude, one with s = 0.
  std::unique_ptr<Tensors> AllModules(TensorPlace place, DType dtype) const {
    auto tensors = std::make_unique<Tensors>(place, dtype);
    const int ranks[] = {8, 5, 64, 24, 3};
    for (int id = 0; id < model_->modules().size(); ++id) {
      if (id == 4) continue;
      tensors->Add(id, model_->modules().all()[id], ranks[id % 5], id == 9 ? 0.0 : 0.75, id != 6);
    }
    return tensors;
  }

  // g, A and B of every module, one after the other.
  static std::vector<std::vector<float>> Contents(const CudaModel& model,
                                                  const BuiltAdapter& built) {
    std::vector<std::vector<float>> contents;
    const auto& weights = static_cast<const CudaAdapterWeights&>(*built.weights);
    for (int id = 0; id < model.modules().size(); ++id) {
      const kernels::DoraFactors& factors = weights.modules()[id];
      const BaseModule& module = model.modules().all()[id];
      const bool linear = module.kind == ModuleKind::kLinear;
      const int64_t in = linear ? module.cols : module.rows;
      const int64_t out = linear ? module.rows : module.cols;
      contents.emplace_back();
      if (factors.g != nullptr) contents.back() = Read(factors.g, out);
      for (const auto& part :
           {Read(factors.a, factors.rank * in), Read(factors.b, out * factors.ldb)}) {
        contents.emplace_back();
        for (const __nv_bfloat16 value : part) contents.back().push_back(__bfloat162float(value));
      }
    }
    return contents;
  }

  MemoryLedger ledger_;
  std::unique_ptr<CudaModel> model_;
  std::unique_ptr<BackgroundLaunchQueue> gaps_;
  std::unique_ptr<adapter::AdapterBuilder> builder_;
};

DORAD_FOR_EACH_ISA(AdapterBuilderTest);

TEST_P(AdapterBuilderTest, FactorsAreTheFilesRoundedAndLaidOut) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const auto tensors = AllModules(TensorPlace::kHost, dtype);
    const AdapterTensors& file = tensors->Finish();
    const BuiltAdapter built = Must(builder_->Build(file));
    EXPECT_EQ(ledger_.bytes("adapters"), built.bytes);
    EXPECT_EQ(ledger_.bytes("loading"), 0);
    const auto got = Contents(*model_, built);
    for (const adapter::ModuleTensors& module : file.modules) {
      SCOPED_TRACE(module.target.module_id);
      const bool linear =
          model_->modules().all()[module.target.module_id].kind == ModuleKind::kLinear;
      const int64_t rank = module.target.rank;
      const int64_t ldb = RoundUp(rank, 8);
      for (const bool is_b : {false, true}) {
        const TensorView& view = is_b ? module.b : module.a;
        std::vector<__nv_bfloat16> expected(static_cast<size_t>(view.num_elements()));
        ToBf16(dtype, view.bytes, reinterpret_cast<uint16_t*>(expected.data()));
        const auto& served = got[3 * module.target.module_id + 1 + (is_b ? 1 : 0)];
        const int64_t columns = view.shape[1];
        for (int64_t row = 0; row < view.shape[0]; ++row) {
          for (int64_t column = 0; column < columns; ++column) {
            const int64_t at = is_b     ? row * ldb + column
                               : linear ? row * columns + column
                                        : column * rank + row;
            ASSERT_EQ(served[at], __bfloat162float(expected[row * columns + column]));
          }
          for (int64_t pad = rank; is_b && pad < ldb; ++pad)
            ASSERT_EQ(served[row * ldb + pad], 0.0f);
        }
      }
    }
  }
}

TEST_P(AdapterBuilderTest, TheScaleIsMagnitudeOverNorm) {
  const auto tensors = AllModules(TensorPlace::kHost, DType::kF32);
  const AdapterTensors& file = tensors->Finish();
  const BuiltAdapter built = Must(builder_->Build(file));
  const auto got = Contents(*model_, built);
  for (const adapter::ModuleTensors& module : file.modules) {
    const int id = module.target.module_id;
    SCOPED_TRACE(id);
    if (module.magnitude == nullptr) {
      EXPECT_TRUE(got[3 * id].empty());
      continue;
    }
    const BaseModule& base = model_->modules().all()[id];
    const bool linear = base.kind == ModuleKind::kLinear;
    const int64_t in = linear ? base.cols : base.rows;
    const int64_t out = linear ? base.rows : base.cols;
    const int64_t rank = module.target.rank;
    const int64_t ldb = RoundUp(rank, 8);
    const auto weight = Read(model_->Weight(id), in * out);
    std::vector<float> magnitude(static_cast<size_t>(out));
    ToFloat(DType::kF32, module.magnitude->bytes, magnitude.data());
    const auto& a = got[3 * id + 1];
    const auto& b = got[3 * id + 2];
    for (int64_t row = 0; row < out; row += 7) {
      double sum = 0.0;
      for (int64_t i = 0; i < in; ++i) {
        double value = __bfloat162float(weight[linear ? row * in + i : i * out + row]);
        for (int64_t r = 0; r < rank; ++r) {
          value += module.target.scale * b[row * ldb + r] * a[linear ? r * in + i : i * rank + r];
        }
        sum += value * value;
      }
      ASSERT_NEAR(got[3 * id][row] / (magnitude[row] / std::sqrt(sum)), 1.0, 2e-6) << row;
    }
  }
}

// From pageable, page-locked and device memory; alone and while steps run.
TEST_P(AdapterBuilderTest, TheBitsDependOnTheTensorsAlone) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto reference_tensors = AllModules(TensorPlace::kHost, dtype);
    const auto reference = Contents(*model_, Must(builder_->Build(reference_tensors->Finish())));
    for (const TensorPlace place :
         {TensorPlace::kHost, TensorPlace::kPinned, TensorPlace::kDevice}) {
      for (const bool stepping : {false, true}) {
        std::atomic<bool> stop{false};
        std::thread engine([&] {
          const Stream stream = Must(Stream::Create());
          while (stepping && !stop) {
            gaps_->BeginStep(stream);
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            gaps_->EndStep();
          }
        });
        const auto tensors = AllModules(place, dtype);
        const absl::StatusOr<BuiltAdapter> built = builder_->Build(tensors->Finish());
        stop = true;
        engine.join();
        ASSERT_TRUE(built.ok()) << built.status();
        EXPECT_EQ(Contents(*model_, *built), reference)
            << static_cast<int>(place) << (stepping ? ", steps" : "");
      }
    }
  }
}

TEST_P(AdapterBuilderTest, NamesModulesThatOverflowOrDegenerate) {
  for (const TensorPlace place : {TensorPlace::kHost, TensorPlace::kPinned, TensorPlace::kDevice}) {
    const auto tensors = AllModules(place, DType::kF32);
    tensors->Plant(1, 1, 7, 3.4e38f);  // beyond bf16
    tensors->Plant(2, 2, 3, 3e38f);    // a g that overflows
    const absl::StatusOr<BuiltAdapter> built = builder_->Build(tensors->Finish());
    ASSERT_FALSE(built.ok());
    std::vector<std::string> found;
    for (const Violation& violation : ViolationsOf(built.status())) {
      found.push_back(violation.field + " " + violation.reason);
      if (violation.reason == "ADAPTER_NORM_DEGENERATE" &&
          violation.field == "base_model.model." + model_->modules().all()[2].name) {
        EXPECT_THAT(violation.description, HasSubstr("the first is row 3 "));
      }
    }
    const auto name = [&](int id) {
      return "base_model.model." + model_->modules().all()[id].name;
    };
    EXPECT_THAT(found, UnorderedElementsAre(name(1) + " ADAPTER_NOT_FINITE",
                                            name(1) + " ADAPTER_NORM_DEGENERATE",
                                            name(2) + " ADAPTER_NORM_DEGENERATE"));
    EXPECT_EQ(ledger_.bytes("adapters"), 0);
    EXPECT_EQ(ledger_.bytes("loading"), 0);
  }
}

TEST_P(AdapterBuilderTest, WhatDoesNotFitIsRefusedAndTheRestServesOn) {
  const auto tensors = AllModules(TensorPlace::kHost, DType::kBF16);
  const AdapterTensors& file = tensors->Finish();
  BuiltAdapter first = Must(builder_->Build(file));
  const auto before = Contents(*model_, first);
  const int64_t held = ledger_.total();
  // Room for the adapter, but not for what its load needs beside it.
  for (const int64_t room : {first.bytes - 1, first.bytes + 1000}) {
    ledger_.set_limit(held + room);
    const absl::Status refused = builder_->Build(file).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(ReasonOf(refused), "OUT_OF_MEMORY");
    EXPECT_EQ(ledger_.total(), held);
  }
  EXPECT_EQ(Contents(*model_, first), before);
  ledger_.set_limit(held + first.bytes + (8 << 20));
  EXPECT_TRUE(builder_->Build(file).ok());
}

}  // namespace
}  // namespace dorad::cuda
