#include "tests/unit/cpu/loader_fixture.h"

namespace dorad::adapter {
namespace {

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
  EXPECT_EQ(result->generation, 2) << "published, and activated";
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
  EXPECT_THAT(internal.message(), Not(HasSubstr("secret")));
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
