// Publishes adapters with the CPU's builder over a fake base model, on a pool of one thread.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/adapter/publish/loader.h"
#include "server/backends/cpu/adapter_builder.h"
#include "server/backends/cpu/adapter_weights.h"
#include "server/backends/cpu/ops/dora_norm.h"
#include "server/platform/files/byte_buffer.h"
#include "tests/unit/support/adapter_fixture.h"
#include "tests/unit/support/test.h"

namespace dorad::adapter {

using Json = nlohmann::ordered_json;
using test::MakeConfig;
using test::MakeModules;
using test::MakeTensor;
using test::MakeTensors;
using test::Tensors;

// Base weights with few bits, so that fp32 and bf16 hold the same values.
class FakeBase : public BaseWeightSource {
 public:
  explicit FakeBase(const BaseModules& modules, at::ScalarType dtype = at::kFloat) {
    std::mt19937 random(99);
    for (const BaseModule& module : modules.all()) {
      std::vector<float> values(static_cast<size_t>(module.rows * module.cols));
      for (float& value : values)
        value = static_cast<float>(static_cast<int>(random() % 127) - 63) / 32;
      weights_.push_back(
          at::tensor(values).reshape({module.rows, module.cols}).to(dtype).contiguous());
      kinds_.push_back(module.kind);
    }
  }

  at::Tensor Weight(int id) const override {
    if (on_weight) on_weight();
    return weights_[id];
  }
  at::Tensor SquaredNorms(int id) override {
    const ops::NormAxis axis =
        kinds_[id] == ModuleKind::kLinear ? ops::NormAxis::kRows : ops::NormAxis::kCols;
    return ops::BaseSquaredNorms(weights_[id], axis, {});
  }
  at::ScalarType CheckpointDtype(int) const override { return checkpoint; }

  std::vector<at::Tensor> weights_;
  std::function<void()> on_weight;
  at::ScalarType checkpoint = at::kFloat;

 private:
  std::vector<ModuleKind> kinds_;
};

class AdapterLoaderTest : public ::testing::Test {
 protected:
  AdapterLoaderTest() {
    AdapterRegistry::Options options;
    options.executor = [this](std::function<void()> task) { pool_.Submit(std::move(task)); };
    registry_ = std::make_unique<AdapterRegistry>(std::move(options));
    Residency::Options residency;
    residency.executor = [this](std::function<void()> task) { pool_.Submit(std::move(task)); };
    residency_ = std::make_unique<Residency>(std::move(residency));
    folder_ = std::filesystem::path(::testing::TempDir()) /
              ("loader_" + std::to_string(getpid()) + "_" +
               ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_ / "root");
    // Temporary folders may themselves be reached through a link.
    folder_ = std::filesystem::canonical(folder_);
    options_.read.allowed_roots = {folder_ / "root"};
    Start();
  }
  ~AdapterLoaderTest() override {
    loader_.reset();
    registry_.reset();
    std::filesystem::remove_all(folder_);
  }

  void Start() {
    loader_.reset();
    builder_ = MakeCpuAdapterBuilder(&modules_, &base_, builder_options_);
    loader_ = std::make_unique<AdapterLoader>(
        options_, &pool_, &modules_, builder_.get(), residency_.get(), registry_.get(),
        [this](const EndedLoad& load) {
          absl::MutexLock lock(&mu_);
          (load.summary != nullptr ? observed_good_ : observed_bad_) += 1;
          EXPECT_EQ(load.summary != nullptr, load.status.ok());
        });
  }

  // Of the weights that are held, when what is being freed has gone.
  int64_t Bytes() {
    absl::Notification freed;  // by the tasks before this one
    pool_.Submit([&freed] { freed.Notify(); });
    freed.WaitForNotification();
    return residency_->stats().bytes;
  }

  absl::StatusOr<PublishResult> Wait(std::function<void(PublishCallback)> start) {
    absl::Notification done;
    absl::StatusOr<PublishResult> result = absl::UnknownError("not called");
    start([&](absl::StatusOr<PublishResult> value) {
      result = std::move(value);
      done.Notify();
    });
    done.WaitForNotification();
    return result;
  }

  absl::StatusOr<PublishResult> Publish(const Json& config, const Tensors& tensors,
                                        PublishOptions options = {.name = "a", .activate = true}) {
    return Wait([&](PublishCallback done) {
      loader_->Publish(
          options,
          BytesSource{config.dump(), Share(test::WriteSafetensors(tensors)), absl::Seconds(1)},
          std::move(done));
    });
  }

  absl::StatusOr<PublishResult> PublishPath(const std::filesystem::path& path,
                                            bool trusted = false) {
    return Wait([&](PublishCallback done) {
      loader_->Publish({.name = "a"}, PathSource{path, trusted}, std::move(done));
    });
  }

  void WriteFile(const std::filesystem::path& path, const std::string& text) {
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
  }

  // A sound adapter in a folder of its own.
  std::filesystem::path WriteAdapter(const std::filesystem::path& path) {
    const ByteBuffer image = test::WriteSafetensors(MakeTensors(modules_, {"q_proj"}, 2, true));
    WriteFile(path / "adapter_config.json", MakeConfig(true, {"q_proj"}).dump());
    WriteFile(path / "adapter_model.safetensors",
              std::string(reinterpret_cast<const char*>(image.data()), image.size()));
    return path;
  }

  const CpuAdapterWeights& Weights(const AdapterLease& lease) {
    return static_cast<const CpuAdapterWeights&>(lease.get()->weights());
  }

  const ops::AdapterFactors& Factors(const AdapterLease& lease, const std::string& module) {
    const ops::AdapterFactors* factors = Weights(lease).Find(modules_.Find(module));
    EXPECT_NE(factors, nullptr) << module;
    return *factors;
  }

  const BaseModules modules_ = MakeModules();
  FakeBase base_{modules_};
  ThreadPool pool_{1, 0};
  LoaderOptions options_;
  CpuBuilderOptions builder_options_;
  std::filesystem::path folder_;
  std::unique_ptr<Residency> residency_;
  std::unique_ptr<AdapterRegistry> registry_;
  absl::Mutex mu_;
  int observed_good_ ABSL_GUARDED_BY(mu_) = 0;
  int observed_bad_ ABSL_GUARDED_BY(mu_) = 0;
  std::unique_ptr<AdapterBuilder> builder_;
  std::unique_ptr<AdapterLoader> loader_;
};

}  // namespace dorad::adapter
