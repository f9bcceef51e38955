#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <filesystem>
#include <fstream>
#include <new>
#include <thread>

#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/adapter/cpu_builder.h"
#include "server/adapter/cpu_weights.h"
#include "server/adapter/loader.h"
#include "server/base/error.h"
#include "server/ops/dora_norm.h"
#include "tests/unit/support/adapter_fixture.h"

namespace dorad::adapter {
namespace {

using Json = nlohmann::ordered_json;
using test::MakeConfig;
using test::MakeModules;
using test::MakeTensor;
using test::MakeTensors;
using test::Tensors;
using ::testing::HasSubstr;

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
    options_.allowed_roots = {folder_ / "root"};
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
      loader_->PublishFromBytes(options, config.dump(), test::WriteSafetensors(tensors),
                                absl::Seconds(1), std::move(done));
    });
  }

  absl::StatusOr<PublishResult> PublishPath(const std::filesystem::path& path,
                                            bool trusted = false) {
    return Wait([&](PublishCallback done) {
      loader_->PublishFromPath({.name = "a"}, path, trusted, std::move(done));
    });
  }

  void WriteFile(const std::filesystem::path& path, const std::string& text) {
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
  }

  // A sound adapter in a folder of its own.
  std::filesystem::path WriteAdapter(const std::filesystem::path& path) {
    const std::vector<std::byte> image =
        test::WriteSafetensors(MakeTensors(modules_, {"q_proj"}, 2, true));
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

at::Tensor ToTensor(const test::TestTensor& tensor) {
  const at::ScalarType dtype = tensor.dtype == "F32"    ? at::kFloat
                               : tensor.dtype == "BF16" ? at::kBFloat16
                                                        : at::kHalf;
  return at::from_blob(const_cast<std::byte*>(tensor.bytes.data()), tensor.shape, dtype).clone();
}

// g by the definition, dense and in fp64.
at::Tensor DenseG(const at::Tensor& weight, const at::Tensor& a, const at::Tensor& b, double scale,
                  const at::Tensor& magnitude, bool embedding) {
  const at::Tensor w = embedding ? weight.to(at::kDouble).t() : weight.to(at::kDouble);
  const at::Tensor sum = w + scale * b.to(at::kDouble).matmul(a.to(at::kDouble));
  return magnitude.to(at::kDouble) / sum.square().sum(1).sqrt();
}

TEST_F(AdapterLoaderTest, PublishesWeightsInServingLayoutWithExactG) {
  const std::vector<std::string> targets = {"q_proj", "down_proj", "embed_tokens", "lm_head"};
  Json config = MakeConfig(true, targets, 3, 6);
  config["rank_pattern"] = {{"down_proj", 5}};
  Tensors tensors = MakeTensors(modules_, {"q_proj", "embed_tokens", "lm_head"}, 3, true, "F16");
  tensors.merge(MakeTensors(modules_, {"down_proj"}, 5, true, "F32"));
  const auto result = Publish(config, tensors);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->adapter.state, AdapterState::kReady);
  EXPECT_TRUE(result->adapter.active);
  EXPECT_EQ(result->generation, 1);
  const AdapterSummary& summary = result->adapter.summary;
  EXPECT_EQ(summary.kind, AdapterKind::kDora);
  EXPECT_EQ(summary.min_rank, 3);
  EXPECT_EQ(summary.max_rank, 5);
  EXPECT_EQ(summary.num_modules, 8);
  EXPECT_EQ(summary.digest.size(), 64u);
  EXPECT_GE(summary.timing.total, absl::Seconds(1)) << "receiving counts";
  EXPECT_GT(summary.timing.norms, absl::ZeroDuration());

  const AdapterLease lease = *registry_->Acquire({"a", 0});
  int64_t parameters = 0;
  for (const BaseModule& module : modules_.all()) {
    const std::string stem = "base_model.model." + module.name;
    const bool embedding = module.kind == ModuleKind::kEmbedding;
    const auto a = tensors.find(stem + (embedding ? ".lora_embedding_A" : ".lora_A.weight"));
    if (a == tensors.end()) {
      EXPECT_EQ(Weights(lease).Find(modules_.Find(module.name)), nullptr);
      continue;
    }
    SCOPED_TRACE(module.name);
    const at::Tensor a_file = ToTensor(a->second);
    const at::Tensor b_file =
        ToTensor(tensors.at(stem + (embedding ? ".lora_embedding_B" : ".lora_B.weight")));
    const at::Tensor m_file = ToTensor(tensors.at(stem + ".lora_magnitude_vector"));
    parameters += a_file.numel() + b_file.numel() + m_file.numel();
    const ops::AdapterFactors& factors = Factors(lease, module.name);
    const double scale = 6.0 / static_cast<double>(a_file.size(0));
    EXPECT_EQ(factors.scale, static_cast<float>(scale));
    EXPECT_EQ(factors.a_RI.scalar_type(), at::kFloat);
    EXPECT_TRUE(factors.a_RI.is_contiguous());
    EXPECT_TRUE(factors.a_RI.equal((embedding ? a_file.t() : a_file).to(at::kFloat)));
    EXPECT_TRUE(factors.b_OR.equal(b_file.to(at::kFloat)));
    const at::Tensor g = DenseG(base_.weights_[modules_.Find(module.name)], a_file, b_file, scale,
                                m_file, embedding);
    EXPECT_EQ(factors.g_O.scalar_type(), at::kFloat);
    EXPECT_LT(((factors.g_O - g) / g).abs().max().item<double>(), 1e-6);
  }
  EXPECT_EQ(summary.num_parameters, parameters);
  EXPECT_EQ(summary.resident_bytes, parameters * 4);
  EXPECT_EQ(Bytes(), parameters * 4);
}

TEST_F(AdapterLoaderTest, PlainLoraHasNoG) {
  ASSERT_TRUE(
      Publish(MakeConfig(false, {"q_proj"}), MakeTensors(modules_, {"q_proj"}, 2, false)).ok());
  const AdapterLease lease = *registry_->Acquire({"a", 0});
  EXPECT_EQ(lease.get()->summary().kind, AdapterKind::kLora);
  EXPECT_FALSE(Factors(lease, "model.layers.0.self_attn.q_proj").g_O.defined());
}

TEST_F(AdapterLoaderTest, KeepsBf16AndMakesOneDtypeOfTwo) {
  Tensors tensors = MakeTensors(modules_, {"q_proj"}, 2, true, "BF16");
  const std::string mixed = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight";
  std::mt19937 random(5);
  tensors[mixed] = test::RandomTensor("F16", {test::kHidden, 2}, random);
  ASSERT_TRUE(Publish(MakeConfig(true, {"q_proj"}), tensors).ok());
  const AdapterLease lease = *registry_->Acquire({"a", 0});
  EXPECT_EQ(Factors(lease, "model.layers.0.self_attn.q_proj").a_RI.scalar_type(), at::kBFloat16);
  const ops::AdapterFactors& factors = Factors(lease, "model.layers.1.self_attn.q_proj");
  EXPECT_EQ(factors.a_RI.scalar_type(), at::kFloat);
  EXPECT_EQ(factors.b_OR.scalar_type(), at::kFloat);
}

TEST_F(AdapterLoaderTest, RoundsFactorsToBf16ButComputesGFromTheFile) {
  builder_options_.factors_bf16 = true;
  Start();
  Tensors tensors = MakeTensors(modules_, {"q_proj"}, 2, true);
  const std::string stem = "base_model.model.model.layers.0.self_attn.q_proj";
  // 1 + 2^-8 lies half-way between two bf16 values; ties go to even.
  tensors[stem + ".lora_A.weight"] =
      MakeTensor("F32", {2, test::kHidden}, std::vector<float>(16, 1.00390625f));
  ASSERT_TRUE(Publish(MakeConfig(true, {"q_proj"}), tensors).ok());
  const AdapterLease lease = *registry_->Acquire({"a", 0});
  const ops::AdapterFactors& factors = Factors(lease, "model.layers.0.self_attn.q_proj");
  EXPECT_EQ(factors.a_RI.scalar_type(), at::kBFloat16);
  EXPECT_EQ(factors.a_RI[0][0].item<float>(), 1.0f);
  const at::Tensor g = DenseG(base_.weights_[modules_.Find("model.layers.0.self_attn.q_proj")],
                              ToTensor(tensors.at(stem + ".lora_A.weight")),
                              ToTensor(tensors.at(stem + ".lora_B.weight")), 2.0,
                              ToTensor(tensors.at(stem + ".lora_magnitude_vector")), false);
  EXPECT_LT(((factors.g_O - g) / g).abs().max().item<double>(), 1e-6);

  // Finite in fp32, infinite in bf16.
  Tensors huge = MakeTensors(modules_, {"q_proj"}, 2, false);
  huge[stem + ".lora_A.weight"] =
      MakeTensor("F32", {2, test::kHidden}, std::vector<float>(16, 3.4e38f));
  EXPECT_EQ(ReasonOf(Publish(MakeConfig(false, {"q_proj"}), huge).status()), "ADAPTER_NOT_FINITE");
}

TEST_F(AdapterLoaderTest, AnAlphaOfZeroLeavesTheDirectionOfTheBase) {
  ASSERT_TRUE(
      Publish(MakeConfig(true, {"q_proj"}, 2, 0), MakeTensors(modules_, {"q_proj"}, 2, true)).ok());
  const AdapterLease lease = *registry_->Acquire({"a", 0});
  EXPECT_EQ(Factors(lease, "model.layers.0.self_attn.q_proj").scale, 0.0f);
}

TEST_F(AdapterLoaderTest, RefusesRowsWithoutANormUnlessTheirMagnitudeIsZero) {
  const std::string name = "model.layers.1.self_attn.q_proj";
  const std::string stem = "base_model.model." + name;
  base_.weights_[modules_.Find(name)][3].zero_();
  Tensors tensors = MakeTensors(modules_, {"q_proj"}, 2, true);
  std::vector<float> b(2 * test::kHidden, 0.5f);
  b[6] = b[7] = 0.0f;
  tensors[stem + ".lora_B.weight"] = MakeTensor("F32", {test::kHidden, 2}, b);
  const auto refused = Publish(MakeConfig(true, {"q_proj"}), tensors);
  EXPECT_EQ(ReasonOf(refused.status()), "ADAPTER_NORM_DEGENERATE");
  EXPECT_THAT(refused.status().message(), HasSubstr(name));
  EXPECT_THAT(refused.status().message(), HasSubstr("row 3"));

  std::vector<float> magnitude(test::kHidden, 1.0f);
  magnitude[3] = 0.0f;
  tensors[stem + ".lora_magnitude_vector"] = MakeTensor("F32", {test::kHidden}, magnitude);
  EXPECT_TRUE(Publish(MakeConfig(true, {"q_proj"}), tensors).ok());
}

TEST_F(AdapterLoaderTest, RefusesNormsBeyondFp32) {
  Tensors tensors = MakeTensors(modules_, {"q_proj"}, 2, true);
  const std::string stem = "base_model.model.model.layers.0.self_attn.q_proj";
  tensors[stem + ".lora_A.weight"] =
      MakeTensor("F32", {2, test::kHidden}, std::vector<float>(16, 1e30f));
  EXPECT_EQ(ReasonOf(Publish(MakeConfig(true, {"q_proj"}), tensors).status()),
            "ADAPTER_NORM_DEGENERATE");
}

TEST_F(AdapterLoaderTest, AcceptsACopyOfTheBaseOnlyWhenItIsOne) {
  const at::Tensor head = base_.weights_[modules_.Find("lm_head")];
  const std::vector<float> values(head.const_data_ptr<float>(),
                                  head.const_data_ptr<float>() + head.numel());
  const std::vector<int64_t> shape = {test::kVocabulary, test::kHidden};
  const std::string key = "base_model.model.lm_head.base_layer.weight";
  for (const char* dtype : {"F32", "BF16"}) {
    Tensors tensors = MakeTensors(modules_, {"lm_head"}, 2, true);
    tensors[key] = MakeTensor(dtype, shape, values);
    EXPECT_TRUE(Publish(MakeConfig(true, {"lm_head"}), tensors).ok()) << dtype;
    std::vector<float> other = values;
    other.back() += 1.0f;
    tensors[key] = MakeTensor(dtype, shape, other);
    const auto refused = Publish(MakeConfig(true, {"lm_head"}), tensors);
    EXPECT_EQ(ReasonOf(refused.status()), "ADAPTER_BASE_DIFFERS");
    EXPECT_THAT(refused.status().message(), HasSubstr(key));
  }
}

TEST_F(AdapterLoaderTest, ComparesACopyOfTheBaseAfterTheServersOwnRounding) {
  const int head = modules_.Find("lm_head");
  const std::string key = "base_model.model.lm_head.base_layer.weight";
  const std::vector<int64_t> shape = {test::kVocabulary, test::kHidden};
  std::vector<float> values(test::kVocabulary * test::kHidden, 1.001f);
  base_.weights_[head] = at::tensor(values).reshape(shape).to(at::kBFloat16);
  Tensors tensors = MakeTensors(modules_, {"lm_head"}, 2, true);
  tensors[key] = MakeTensor("F32", shape, values);
  base_.checkpoint = at::kFloat;  // rounded by the server: the checkpoint had 1.001
  EXPECT_TRUE(Publish(MakeConfig(true, {"lm_head"}), tensors).ok());
  base_.checkpoint = at::kBFloat16;  // the checkpoint had 1.0: the file is of other weights
  EXPECT_EQ(ReasonOf(Publish(MakeConfig(true, {"lm_head"}), tensors).status()),
            "ADAPTER_BASE_DIFFERS");
}

TEST_F(AdapterLoaderTest, TheDigestIsOfTheContentAlone) {
  const Tensors tensors = MakeTensors(modules_, {"q_proj"}, 2, true);
  const Json config = MakeConfig(true, {"q_proj"});
  const auto digest = [this](const Json& json, const Tensors& content) {
    const auto result = Publish(json, content);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? result->adapter.summary.digest : "";
  };
  const std::string original = digest(config, tensors);
  const std::string magnitude =
      "base_model.model.model.layers.2.self_attn.q_proj.lora_magnitude_vector";

  Tensors renamed = tensors;
  renamed[magnitude + ".weight"] = renamed.at(magnitude);
  renamed.erase(magnitude);
  Json reordered;
  reordered["lora_dropout"] = 0.5;
  reordered["target_modules"] = R"(.*\.q_proj)";
  for (const auto& [key, value] : config.items()) {
    if (!reordered.contains(key)) reordered[key] = value;
  }
  EXPECT_EQ(digest(reordered, renamed), original);

  Json alpha = config;
  alpha["lora_alpha"] = 5;
  EXPECT_NE(digest(alpha, tensors), original);
  Json rslora = config;
  rslora["use_rslora"] = true;
  EXPECT_NE(digest(rslora, tensors), original);
  Tensors changed = tensors;
  changed.at(magnitude).bytes[0] ^= std::byte{1};
  EXPECT_NE(digest(config, changed), original);
  EXPECT_NE(digest(config, MakeTensors(modules_, {"q_proj"}, 2, true, "F16")), original)
      << "the same values in another dtype are other content";
  Json fewer = config;
  fewer["target_modules"] = {"0.self_attn.q_proj", "1.self_attn.q_proj"};
  EXPECT_NE(
      digest(fewer, MakeTensors(modules_, {"0.self_attn.q_proj", "1.self_attn.q_proj"}, 2, true)),
      original);
  EXPECT_NE(digest(MakeConfig(false, {"q_proj"}), MakeTensors(modules_, {"q_proj"}, 2, false)),
            original);
}

TEST_F(AdapterLoaderTest, AFailedLoadLeavesARecordAndNothingElse) {
  ASSERT_TRUE(
      Publish(MakeConfig(true, {"q_proj"}), MakeTensors(modules_, {"q_proj"}, 2, true)).ok());
  const int64_t bytes = Bytes();
  const auto refused =
      Publish(MakeConfig(true, {"q_proj"}, 3), MakeTensors(modules_, {"q_proj"}, 2, true));
  EXPECT_EQ(ReasonOf(refused.status()), "ADAPTER_RANK_MISMATCH");
  EXPECT_EQ(registry_->Get({"a", 0})->version, 1);
  const AdapterRecord failed = *registry_->Get({"a", 2});
  EXPECT_EQ(failed.state, AdapterState::kFailed);
  EXPECT_EQ(ReasonOf(failed.failure), "ADAPTER_RANK_MISMATCH");
  EXPECT_EQ(Bytes(), bytes);
  absl::MutexLock lock(&mu_);
  EXPECT_EQ(observed_good_, 1);
  EXPECT_EQ(observed_bad_, 1);
}

TEST_F(AdapterLoaderTest, AStaleExpectationFailsThePublish) {
  const auto refused =
      Publish(MakeConfig(true, {"q_proj"}), MakeTensors(modules_, {"q_proj"}, 2, true),
              {.name = "a", .activate = true, .expected_generation = 41});
  EXPECT_EQ(ReasonOf(refused.status()), "GENERATION_MISMATCH");
  EXPECT_EQ(Bytes(), 0);
}

TEST_F(AdapterLoaderTest, RefusesABadNameWithoutALoad) {
  const auto refused = Publish(MakeConfig(true, {"q_proj"}),
                               MakeTensors(modules_, {"q_proj"}, 2, true), {.name = "../a"});
  EXPECT_EQ(ReasonOf(refused.status()), "ADAPTER_NAME_INVALID");
}

TEST_F(AdapterLoaderTest, ReportsWhatTorchThrows) {
  const Json config = MakeConfig(true, {"q_proj"});
  const Tensors tensors = MakeTensors(modules_, {"q_proj"}, 2, true);
  base_.on_weight = [] { throw std::bad_alloc(); };
  EXPECT_EQ(Publish(config, tensors).status().code(), absl::StatusCode::kResourceExhausted);
  base_.on_weight = [] { TORCH_CHECK(false, "a secret of the implementation"); };
  const absl::Status internal = Publish(config, tensors).status();
  EXPECT_EQ(internal.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(internal.message(), ::testing::Not(HasSubstr("secret")));
  EXPECT_EQ(registry_->Get({"a", 2})->state, AdapterState::kFailed);
  base_.on_weight = nullptr;
  EXPECT_TRUE(Publish(config, tensors).ok());
}

TEST_F(AdapterLoaderTest, LoadsUseOneThreadAndLeaveOtherThreadsAlone) {
  at::set_num_threads(3);
  int in_load = 0;
  base_.on_weight = [&in_load] { in_load = at::get_num_threads(); };
  ASSERT_TRUE(
      Publish(MakeConfig(true, {"q_proj"}), MakeTensors(modules_, {"q_proj"}, 2, true)).ok());
  int elsewhere = 0;
  std::thread([&elsewhere] { elsewhere = at::get_num_threads(); }).join();
  EXPECT_EQ(in_load, 1);
  EXPECT_EQ(elsewhere, 3);
  at::set_num_threads(1);
}

TEST_F(AdapterLoaderTest, EndsQueuedLoadsWithCancelledAndWaitsForTheRunningOne) {
  options_.max_queued_loads = 2;
  Start();
  absl::Notification entered, leave;
  base_.on_weight = [&] {
    if (!entered.HasBeenNotified()) entered.Notify();
    leave.WaitForNotification();
  };
  const std::string config = MakeConfig(true, {"q_proj"}).dump();
  const std::vector<std::byte> image =
      test::WriteSafetensors(MakeTensors(modules_, {"q_proj"}, 2, true));
  std::vector<absl::Status> results(4, absl::UnknownError("not called"));
  const auto submit = [&](int i) {
    loader_->PublishFromBytes({.name = "a"}, config, image, absl::ZeroDuration(),
                              [&results, i](const auto& result) { results[i] = result.status(); });
  };
  submit(0);
  entered.WaitForNotification();
  submit(1);
  submit(2);
  submit(3);
  EXPECT_EQ(ReasonOf(results[3]), "LOAD_QUEUE_FULL");
  EXPECT_TRUE(RetryAfterOf(results[3]).has_value());
  std::thread ender([this] { loader_.reset(); });
  while (registry_->Get({"a", 3})->state != AdapterState::kFailed) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  leave.Notify();
  ender.join();
  EXPECT_TRUE(results[0].ok()) << results[0];
  EXPECT_EQ(results[1].code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(results[2].code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(registry_->Get({"a", 1})->state, AdapterState::kReady);
}

TEST_F(AdapterLoaderTest, HeldLoadsWaitInLineAndEndWell) {
  absl::Notification entered, leave;
  base_.on_weight = [&] {
    if (!entered.HasBeenNotified()) entered.Notify();
    leave.WaitForNotification();
  };
  const std::string config = MakeConfig(true, {"q_proj"}).dump();
  const std::vector<std::byte> image =
      test::WriteSafetensors(MakeTensors(modules_, {"q_proj"}, 2, true));
  std::vector<absl::Status> results(3, absl::UnknownError("not called"));
  std::vector<absl::Notification> done(3);
  const auto submit = [&](int i) {
    loader_->PublishFromBytes({.name = "a"}, config, image, absl::ZeroDuration(),
                              [&, i](const auto& result) {
                                results[i] = result.status();
                                done[i].Notify();
                              });
  };
  submit(0);
  entered.WaitForNotification();
  submit(1);
  absl::Notification begun, held;
  std::thread holder([&] {
    begun.Notify();
    loader_->HoldLoads();
    held.Notify();
  });
  begun.WaitForNotification();
  absl::SleepFor(absl::Milliseconds(50));  // by now it waits, on all but the busiest machines
  EXPECT_FALSE(held.HasBeenNotified()) << "a load is under way";
  leave.Notify();
  holder.join();
  EXPECT_TRUE(done[0].HasBeenNotified());
  submit(2);
  absl::Notification idle;  // the pool has nothing left to do
  pool_.Submit([&] { idle.Notify(); });
  idle.WaitForNotification();
  EXPECT_FALSE(done[1].HasBeenNotified() || done[2].HasBeenNotified());
  EXPECT_EQ(registry_->Get({"a", 2})->state, AdapterState::kLoading);
  loader_->ReleaseLoads();
  for (int i = 0; i < 3; ++i) {
    done[i].WaitForNotification();
    EXPECT_TRUE(results[i].ok()) << results[i];
  }
}

TEST_F(AdapterLoaderTest, LoadsThatAreHeldAtTheEndAreCancelled) {
  loader_->HoldLoads();
  absl::Status result;
  loader_->PublishFromBytes({.name = "a"}, MakeConfig(true, {"q_proj"}).dump(),
                            test::WriteSafetensors(MakeTensors(modules_, {"q_proj"}, 2, true)),
                            absl::ZeroDuration(),
                            [&](const auto& published) { result = published.status(); });
  loader_.reset();
  EXPECT_EQ(ReasonOf(result), "LOAD_CANCELLED");
}

TEST_F(AdapterLoaderTest, LoadsAFolderBeneathAnAllowedRoot) {
  const auto result = PublishPath(WriteAdapter(folder_ / "root" / "x" / "y"));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->adapter.summary.num_modules, 3);
}

TEST_F(AdapterLoaderTest, FollowsLinksThatStayBeneathTheRoot) {
  WriteAdapter(folder_ / "root" / "blobs");
  std::filesystem::create_directories(folder_ / "root" / "snapshot");
  for (const char* file : {"adapter_config.json", "adapter_model.safetensors"}) {
    std::filesystem::create_symlink(std::filesystem::path("../blobs") / file,
                                    folder_ / "root" / "snapshot" / file);
  }
  EXPECT_TRUE(PublishPath(folder_ / "root" / "snapshot").ok());
}

TEST_F(AdapterLoaderTest, RefusesPathsThatLeaveTheRoots) {
  const std::filesystem::path outside = WriteAdapter(folder_ / "outside");
  const std::filesystem::path root = folder_ / "root";
  std::filesystem::create_symlink(outside, root / "link");
  std::filesystem::create_directories(root / "files");
  std::filesystem::create_symlink(outside / "adapter_config.json",
                                  root / "files" / "adapter_config.json");
  std::filesystem::create_directories(folder_ / "root2");
  WriteAdapter(folder_ / "root2");
  for (const std::filesystem::path& path :
       {outside, root / ".." / "outside", root / "link", root / "files", folder_ / "root2",
        folder_ / "no such thing", std::filesystem::path("/"), std::filesystem::path("")}) {
    const auto refused = PublishPath(path);
    EXPECT_EQ(ReasonOf(refused.status()), "PATH_NOT_ALLOWED") << path;
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kPermissionDenied);
  }
  EXPECT_TRUE(PublishPath(outside, /*trusted=*/true).ok());
}

TEST_F(AdapterLoaderTest, SaysWhatAFolderLacks) {
  const std::filesystem::path folder = folder_ / "root" / "x";
  EXPECT_EQ(ReasonOf(PublishPath(folder).status()), "ADAPTER_FOLDER_NOT_FOUND");
  std::filesystem::create_directories(folder);
  absl::Status status = PublishPath(folder).status();
  EXPECT_EQ(ReasonOf(status), "ADAPTER_FILE_MISSING");
  EXPECT_THAT(status.message(), HasSubstr("adapter_config.json"));
  WriteFile(folder / "adapter_config.json", "{}");
  status = PublishPath(folder).status();
  EXPECT_EQ(ReasonOf(status), "ADAPTER_FILE_MISSING");
  EXPECT_THAT(status.message(), HasSubstr("adapter_model.safetensors"));
  WriteFile(folder / "adapter_model.bin", "pickle");
  EXPECT_EQ(ReasonOf(PublishPath(folder).status()), "ADAPTER_FORMAT_UNSUPPORTED");
  ASSERT_EQ(mkfifo((folder / "adapter_model.safetensors").c_str(), 0600), 0);
  EXPECT_EQ(ReasonOf(PublishPath(folder).status()), "FILE_UNREADABLE");
}

TEST_F(AdapterLoaderTest, RefusesWhatIsTooLarge) {
  const std::filesystem::path folder = WriteAdapter(folder_ / "root" / "x");
  options_.max_adapter_bytes = 100;
  Start();
  EXPECT_EQ(ReasonOf(PublishPath(folder).status()), "ADAPTER_TOO_LARGE");
  EXPECT_EQ(
      ReasonOf(Publish(MakeConfig(true, {"q_proj"}), MakeTensors(modules_, {"q_proj"}, 2, true))
                   .status()),
      "ADAPTER_TOO_LARGE");
  WriteFile(folder / "adapter_config.json", std::string((1 << 20) + 1, ' '));
  EXPECT_EQ(ReasonOf(PublishPath(folder).status()), "ADAPTER_CONFIG_TOO_LARGE");
}

// Memory of another process, to which things happen while it is read.
class FakeMemory : public PeerMemory {
 public:
  explicit FakeMemory(std::vector<std::byte> b) : bytes(std::move(b)) {}
  uint64_t size() const override { return bytes.size(); }
  absl::Status Read(uint64_t offset, absl::Span<std::byte> to) const override {
    if (on_read) on_read();
    std::copy_n(bytes.begin() + static_cast<int64_t>(offset), to.size(), to.begin());
    return absl::OkStatus();
  }

  std::vector<std::byte> bytes;
  std::function<void()> on_read;
};

PeerTensors MakePeer(const Tensors& tensors, std::shared_ptr<FakeMemory>* memory) {
  *memory = std::make_shared<FakeMemory>(std::vector<std::byte>());
  PeerTensors peer;
  for (const auto& [name, tensor] : tensors) {
    peer.tensors.push_back({name,
                            tensor.dtype == "BF16" ? DType::kBF16 : DType::kF32,
                            tensor.shape,
                            tensor.bytes.size(),
                            *memory,
                            (*memory)->bytes.size(),
                            {}});
    (*memory)->bytes.insert((*memory)->bytes.end(), tensor.bytes.begin(), tensor.bytes.end());
  }
  peer.wanted = [] { return true; };
  return peer;
}

TEST_F(AdapterLoaderTest, MemoryMakesTheVersionThatTheSameFileMakes) {
  for (const char* dtype : {"F32", "BF16"}) {
    const Json config = MakeConfig(true, {"q_proj", "down_proj"});
    const Tensors tensors = MakeTensors(modules_, {"q_proj", "down_proj"}, 2, true, dtype);
    std::shared_ptr<FakeMemory> memory;
    const PeerTensors peer = MakePeer(tensors, &memory);
    const auto from_memory = Wait([&](PublishCallback done) {
      loader_->PublishFromMemory({.name = "a"}, config.dump(), peer, std::move(done));
    });
    ASSERT_TRUE(from_memory.ok()) << from_memory.status();
    EXPECT_EQ(from_memory->adapter.summary.digest,
              Publish(config, tensors)->adapter.summary.digest);
  }
}

TEST_F(AdapterLoaderTest, ReadsMemoryOnceAndNothingOfItAfterwards) {
  const Tensors tensors = MakeTensors(modules_, {"q_proj"}, 2, true);
  std::shared_ptr<FakeMemory> memory;
  PeerTensors peer = MakePeer(tensors, &memory);
  size_t reads = 0;
  memory->on_read = [&] { ++reads; };
  const std::weak_ptr<FakeMemory> held = memory;
  memory.reset();
  const size_t count = peer.tensors.size();
  absl::Notification done;
  loader_->PublishFromMemory({.name = "a"}, MakeConfig(true, {"q_proj"}).dump(), std::move(peer),
                             [&](const absl::StatusOr<PublishResult>& result) {
                               EXPECT_TRUE(result.ok()) << result.status();
                               EXPECT_TRUE(held.expired()) << "answered while it is held";
                               done.Notify();
                             });
  done.WaitForNotification();
  EXPECT_EQ(reads, count);
}

TEST_F(AdapterLoaderTest, MemoryWithdrawnDuringTheLoadPublishesNothing) {
  std::shared_ptr<FakeMemory> memory;
  PeerTensors peer = MakePeer(MakeTensors(modules_, {"q_proj"}, 2, true), &memory);
  bool wanted = true;
  peer.wanted = [&] { return wanted; };
  for (const bool early : {true, false}) {
    wanted = true;
    // As a process that dies while its memory is copied, or while norms are computed.
    memory->on_read = [&] { wanted = !early; };
    base_.on_weight = [&] { wanted = false; };
    const auto result = Wait([&](PublishCallback done) {
      loader_->PublishFromMemory({.name = "a", .activate = true},
                                 MakeConfig(true, {"q_proj"}).dump(), peer, std::move(done));
    });
    EXPECT_EQ(result.status().code(), absl::StatusCode::kAborted);
    EXPECT_EQ(ReasonOf(result.status()), "HANDOVER_CLOSED");
    EXPECT_FALSE(registry_->Acquire({"a", 0}).ok());
    EXPECT_EQ(Bytes(), 0);
  }
  // What is not wanted when its turn comes is not even read.
  memory->on_read = [] { ADD_FAILURE(); };
  EXPECT_EQ(ReasonOf(Wait([&](PublishCallback done) {
                       loader_->PublishFromMemory({.name = "a"},
                                                  MakeConfig(true, {"q_proj"}).dump(), peer,
                                                  std::move(done));
                     }).status()),
            "HANDOVER_CLOSED");
  EXPECT_EQ(registry_->Get({"a", 3})->state, AdapterState::kFailed);
}

TEST_F(AdapterLoaderTest, MemoryThatIsTooLargeIsNotRead) {
  std::shared_ptr<FakeMemory> memory;
  const PeerTensors peer = MakePeer(MakeTensors(modules_, {"q_proj"}, 2, true), &memory);
  memory->on_read = [] { ADD_FAILURE(); };
  EXPECT_EQ(ReasonOf(CopyToImage(peer, 100).status()), "ADAPTER_TOO_LARGE");
}

// Memory on a GPU, as far as the loader can tell: it must not look at it.
class FakeDeviceMemory final : public FakeMemory {
 public:
  using FakeMemory::FakeMemory;
  const std::byte* device_data() const override { return bytes.data(); }
};

class FakeDeviceTensors final : public DeviceTensors {
 public:
  explicit FakeDeviceTensors(const PeerTensors& peer) {
    for (const PeerTensor& tensor : peer.tensors) {
      const std::byte* from = tensor.memory->device_data() + tensor.offset;
      copies_.emplace_back(from, from + tensor.bytes);
      tensors_[tensor.name] = {tensor.dtype, tensor.shape, copies_.back()};
    }
  }
  absl::Status Read(const std::byte* from, absl::Span<std::byte> to) const override {
    std::copy_n(from, to.size(), to.begin());
    return absl::OkStatus();
  }
  absl::StatusOr<std::map<const std::byte*, Digest>> Digests() const override {
    std::map<const std::byte*, Digest> digests;
    for (const std::vector<std::byte>& copy : copies_) digests[copy.data()] = TreeSha256(copy);
    return digests;
  }

 private:
  std::deque<std::vector<std::byte>> copies_;
};

class FakeGpuBuilder final : public AdapterBuilder {
 public:
  FakeGpuBuilder(const BaseModules* modules, AdapterBuilder* cpu)
      : AdapterBuilder(modules), cpu_(*cpu) {}

  absl::StatusOr<std::unique_ptr<DeviceTensors>> CopyOnDevice(const PeerTensors& peer) override {
    return std::make_unique<FakeDeviceTensors>(peer);
  }
  absl::StatusOr<BuiltAdapter> Build(const AdapterTensors& tensors) override {
    EXPECT_EQ(tensors.place, TensorPlace::kDevice);
    AdapterTensors host = tensors;
    host.place = TensorPlace::kHost;
    ++builds;
    return cpu_.Build(host);
  }

  int builds = 0;

 private:
  absl::StatusOr<bool> EqualsBase(const BaseCopy& copy) const override {
    AdapterTensors one;
    one.base_copies.push_back(copy);
    return cpu_.CheckBaseCopies(one).ok();
  }

  AdapterBuilder& cpu_;
};

class AdapterLoaderOnDeviceTest : public AdapterLoaderTest {
 protected:
  AdapterLoaderOnDeviceTest() {
    loader_ = std::make_unique<AdapterLoader>(options_, &pool_, &modules_, &gpu_, residency_.get(),
                                              registry_.get(), nullptr);
  }
  ~AdapterLoaderOnDeviceTest() override { loader_.reset(); }

  PeerTensors OnDevice(const Tensors& tensors) {
    std::shared_ptr<FakeMemory> host;
    PeerTensors peer = MakePeer(tensors, &host);
    memory_ = std::make_shared<FakeDeviceMemory>(host->bytes);
    memory_->on_read = [] { ADD_FAILURE() << "it was brought to the host as a whole"; };
    for (PeerTensor& tensor : peer.tensors) tensor.memory = memory_;
    return peer;
  }

  absl::StatusOr<PublishResult> PublishPeer(const Json& config, const PeerTensors& peer) {
    return Wait([&](PublishCallback done) {
      loader_->PublishFromMemory({.name = "a"}, config.dump(), peer, std::move(done));
    });
  }

  FakeGpuBuilder gpu_{&modules_, builder_.get()};
  std::shared_ptr<FakeDeviceMemory> memory_;
};

TEST_F(AdapterLoaderOnDeviceTest, MakesTheVersionThatTheSameFileMakes) {
  const Json config = MakeConfig(true, {"q_proj", "down_proj"});
  const Tensors tensors = MakeTensors(modules_, {"q_proj", "down_proj"}, 2, true);
  const auto result = PublishPeer(config, OnDevice(tensors));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(gpu_.builds, 1);
  Start();
  const auto from_file = Publish(config, tensors);
  EXPECT_EQ(result->adapter.summary.digest, from_file->adapter.summary.digest);
  EXPECT_EQ(result->adapter.summary.num_parameters, from_file->adapter.summary.num_parameters);
}

TEST_F(AdapterLoaderOnDeviceTest, RefusesWhatAFileWouldBeRefusedFor) {
  const Json config = MakeConfig(true, {"q_proj"});
  const PeerTensors good = OnDevice(MakeTensors(modules_, {"q_proj"}, 2, true));
  PeerTensors twice = good, fewer = good;
  twice.tensors.push_back(good.tensors.front());
  fewer.tensors.pop_back();
  EXPECT_EQ(ReasonOf(PublishPeer(config, twice).status()), "SAFETENSORS_DUPLICATE_KEY");
  EXPECT_EQ(ReasonOf(PublishPeer(config, fewer).status()), "ADAPTER_MAGNITUDE_MISSING");
  EXPECT_EQ(ReasonOf(PublishPeer(MakeConfig(false, {"q_proj"}), good).status()),
            "ADAPTER_TENSOR_UNEXPECTED");
  EXPECT_EQ(gpu_.builds, 0);
}

TEST_F(AdapterLoaderOnDeviceTest, NamesEveryTensorThatIsNotWhatItsOwnerHashed) {
  PeerTensors peer = OnDevice(MakeTensors(modules_, {"q_proj"}, 2, true));
  peer.tensors[1].digest = peer.tensors[4].digest = std::string(32, 'x');
  const auto refused = PublishPeer(MakeConfig(true, {"q_proj"}), peer);
  EXPECT_EQ(ReasonOf(refused.status()), "HANDOVER_DIGEST_MISMATCH");
  EXPECT_EQ(ViolationsOf(refused.status()).size(), 2u);
  for (PeerTensor& tensor : peer.tensors) tensor.digest.clear();
  peer.expected_digest = std::string(64, '0');
  EXPECT_EQ(ReasonOf(PublishPeer(MakeConfig(true, {"q_proj"}), peer).status()),
            "HANDOVER_DIGEST_MISMATCH");
  EXPECT_EQ(Bytes(), 0);
}

TEST_F(AdapterLoaderOnDeviceTest, ComparesACopyOfTheBaseOnTheHost) {
  Tensors tensors = MakeTensors(modules_, {"lm_head"}, 2, true);
  const at::Tensor base = base_.weights_[static_cast<size_t>(modules_.Find("lm_head"))];
  std::vector<float> values(base.const_data_ptr<float>(),
                            base.const_data_ptr<float>() + base.numel());
  const std::string key = "base_model.model.lm_head.base_layer.weight";
  tensors[key] = MakeTensor("F32", {base.size(0), base.size(1)}, values);
  EXPECT_TRUE(PublishPeer(MakeConfig(true, {"lm_head"}), OnDevice(tensors)).ok());
  values[3] += 1;
  tensors[key] = MakeTensor("F32", {base.size(0), base.size(1)}, values);
  EXPECT_EQ(ReasonOf(PublishPeer(MakeConfig(true, {"lm_head"}), OnDevice(tensors)).status()),
            "ADAPTER_BASE_DIFFERS");
}

TEST_F(AdapterLoaderTest, RetiringGivesAllMemoryBack) {
  for (int i = 0; i < 5; ++i) {
    const auto result =
        Publish(MakeConfig(true, {"q_proj"}), MakeTensors(modules_, {"q_proj"}, 2, true));
    ASSERT_TRUE(result.ok());
    AdapterLease lease = *registry_->Acquire({"a", 0});
    ASSERT_TRUE(registry_->Retire("a", result->adapter.version).ok());
    EXPECT_GT(Bytes(), 0);
    lease.Reset();
    EXPECT_EQ(Bytes(), 0);
  }
}

}  // namespace
}  // namespace dorad::adapter
