// What is accepted, and what it is taken to mean: ranks, scales, targets, keys and dtypes.

#include "server/adapter/peft/module_key.h"
#include "server/adapter/peft/pattern.h"
#include "server/adapter/peft/peft_config.h"
#include "server/adapter/peft/targets.h"
#include "server/adapter/peft/validate.h"
#include "tests/unit/support/adapter_fixture.h"
#include "tests/unit/support/test.h"

namespace dorad::adapter {
namespace {

using Json = nlohmann::ordered_json;
using test::MakeConfig;
using test::MakeModules;

constexpr int kMaxRank = 1024;

// Names of the targeted modules with rank and scale; empty and a test failure when refused.
std::map<std::string, Target> Resolve(const Json& config) {
  const BaseModules modules = MakeModules();
  std::map<std::string, Target> by_name;
  Violations violations;
  const auto parsed = ParsePeftConfig(config.dump(), kMaxRank, violations);
  EXPECT_TRUE(violations.empty()) << violations.ToStatus("adapter");
  if (!violations.empty()) return by_name;
  const Targets targets = ResolveTargets(*parsed, modules, violations);
  EXPECT_TRUE(violations.empty() && targets.complete) << violations.ToStatus("adapter");
  if (!violations.empty()) return by_name;
  for (const Target& target : targets.list) by_name[modules.all()[target.module_id].name] = target;
  return by_name;
}

std::vector<std::string> Names(const Json& config) {
  std::vector<std::string> names;
  for (const auto& [name, target] : Resolve(config)) names.push_back(name);
  return names;
}

TEST(AdapterAcceptanceTest, MatchesListEntriesByLastComponents) {
  EXPECT_THAT(Names(MakeConfig(true, {"1.self_attn.q_proj", "lm_head", "up_proj"})),
              ElementsAre("lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj",
                          "model.layers.1.self_attn.q_proj", "model.layers.2.mlp.up_proj"));
}

TEST(AdapterAcceptanceTest, MatchesARegexAgainstWholeNames) {
  Json config = MakeConfig(true, {});
  config["target_modules"] = R"(model\.layers\.[02]\.(mlp|self_attn)\.(up|q)_proj)";
  EXPECT_THAT(Names(config),
              ElementsAre("model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj",
                          "model.layers.2.mlp.up_proj", "model.layers.2.self_attn.q_proj"));
}

TEST(AdapterAcceptanceTest, AllLinearLeavesOutEmbeddingAndHead) {
  Json config = MakeConfig(true, {});
  config["target_modules"] = "All-Linear";
  const std::vector<std::string> names = Names(config);
  EXPECT_EQ(names.size(), 7u * test::kLayers);
  EXPECT_THAT(names, Not(Contains("lm_head")));
}

TEST(AdapterAcceptanceTest, ExcludesByListAndByRegex) {
  Json config = MakeConfig(true, {"q_proj"});
  config["exclude_modules"] = {"1.self_attn.q_proj"};
  EXPECT_THAT(Names(config),
              ElementsAre("model.layers.0.self_attn.q_proj", "model.layers.2.self_attn.q_proj"));
  config["exclude_modules"] = R"(.*\.[01]\..*)";
  EXPECT_THAT(Names(config), ElementsAre("model.layers.2.self_attn.q_proj"));
}

TEST(AdapterAcceptanceTest, RestrictsToLayers) {
  Json config = MakeConfig(true, {"q_proj", "model.layers.1.self_attn.k_proj"});
  config["layers_to_transform"] = {0, 2};
  // A whole name is taken whatever the layers say.
  const auto expected =
      ElementsAre("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj",
                  "model.layers.2.self_attn.q_proj");
  EXPECT_THAT(Names(config), expected);
  config["layers_pattern"] = {"h", "layers"};
  EXPECT_THAT(Names(config), expected);
  config["layers_to_transform"] = 1;
  config["layers_pattern"] = "layers";
  EXPECT_THAT(Names(config),
              ElementsAre("model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.q_proj"));
}

TEST(AdapterAcceptanceTest, TakesTheFirstPatternThatFits) {
  Json config = MakeConfig(true, {"q_proj", "down_proj"}, 8, 16);
  config["rank_pattern"] = {{R"(layers\.[12]\..*)", 3}, {"layers.1.self_attn.q_proj", 5}};
  config["alpha_pattern"] = {{"layers.1.self_attn.q_proj", 7.5}, {"q_proj", 2}};
  const auto targets = Resolve(config);
  EXPECT_EQ(targets.at("model.layers.0.self_attn.q_proj").rank, 8);
  EXPECT_EQ(targets.at("model.layers.1.self_attn.q_proj").rank, 3);
  EXPECT_EQ(targets.at("model.layers.2.mlp.down_proj").rank, 3);
  EXPECT_EQ(targets.at("model.layers.1.self_attn.q_proj").scale, 7.5 / 3);
  EXPECT_EQ(targets.at("model.layers.2.self_attn.q_proj").scale, 2.0 / 3);
  EXPECT_EQ(targets.at("model.layers.0.mlp.down_proj").scale, 16.0 / 8);
}

TEST(AdapterAcceptanceTest, PatternsFitWholeComponentsOnly) {
  Json config = MakeConfig(true, {"q_proj"}, 8);
  config["rank_pattern"] = {{"_proj", 3},
                            {"ayers.0.self_attn.q_proj", 4},
                            {"q_pro", 5},
                            {"[_]proj", 6},
                            {R"(q_pro\d?)", 7}};
  for (const auto& [name, target] : Resolve(config)) EXPECT_EQ(target.rank, 8) << name;
}

TEST(AdapterAcceptanceTest, NamesOfModulesAsPatternsAreNotCountedAsRegularExpressions) {
  Json config = MakeConfig(true, {"q_proj"}, 8);
  for (int i = 0; i < 4000; ++i) {
    config["rank_pattern"]["model.layers." + std::to_string(i) + ".self_attn.q_proj"] = 2 + i % 100;
  }
  const auto targets = Resolve(config);
  EXPECT_EQ(targets.at("model.layers.0.self_attn.q_proj").rank, 2);
  EXPECT_EQ(targets.at("model.layers.2.self_attn.q_proj").rank, 4);
}

// What ModuleKey answers without a regular expression is what the regular expression answers.
TEST(AdapterAcceptanceTest, PlainKeysFitAsTheRegularExpressionsThatTheyAre) {
  const std::vector<std::string> names = {
      "model.layers.1.self_attn.q_proj", "model.layers.11.mlp.up_proj", "lm_head", "proj", "a.b.c"};
  const std::vector<std::string> keys = {"q_proj",
                                         "_proj",
                                         "self_attn.q_proj",
                                         R"(self_attn\.q_proj)",
                                         "self_attn.q.proj",
                                         R"(self_attn\.q\.proj)",
                                         "layers.1.self_attn.q_proj",
                                         "1.self_attn.q_proj",
                                         "^self_attn.q_proj",
                                         "^model.layers.1.self_attn.q_proj",
                                         "model.layers.1.self_attn.q_proj",
                                         ".model.layers.1.self_attn.q_proj",
                                         "layers.1.mlp.up_proj",
                                         "layers.11.mlp.up_proj",
                                         "layers..1.mlp.up_proj",
                                         "lm_head",
                                         "^lm_head",
                                         ".m_head",
                                         "lm-head",
                                         ".",
                                         R"(\.)",
                                         "^",
                                         "...",
                                         "proj",
                                         "b.c"};
  PatternBudget budget;
  for (const std::string& key : keys) {
    const auto plain = ModuleKey::Parse(key);
    const auto regex = Pattern::Compile(R"((.*\.)?()" + key + ")$", budget);
    ASSERT_TRUE(plain.has_value()) << key;
    ASSERT_TRUE(regex.ok()) << regex.status();
    for (const std::string& name : names) {
      EXPECT_EQ(plain->Fits(name), regex->MatchStart(name)) << key << " on " << name;
    }
  }
  for (const char* key :
       {"q_proj|k_proj", "a*", "[ab]", "(a)", "a$", "a^", "\\d", "a\\", "é", "a{2}"}) {
    EXPECT_FALSE(ModuleKey::Parse(key).has_value()) << key;
  }
}

TEST(AdapterAcceptanceTest, RankStabilisedScaleUsesTheModulesRank) {
  Json config = MakeConfig(true, {"q_proj"}, 16, 8);
  config["use_rslora"] = true;
  config["rank_pattern"] = {{"layers.0.self_attn.q_proj", 4}};
  const auto targets = Resolve(config);
  EXPECT_EQ(targets.at("model.layers.0.self_attn.q_proj").scale, 4.0);
  EXPECT_EQ(targets.at("model.layers.1.self_attn.q_proj").scale, 2.0);
}

TEST(AdapterAcceptanceTest, AcceptsValuesThatChangeNothing) {
  Json config = MakeConfig(true, {"q_proj"});
  config["lora_alpha"] = 0;
  config["lora_dropout"] = 0.1;
  config["fan_in_fan_out"] = true;
  config["init_lora_weights"] = "gaussian";
  config["task_type"] = nullptr;
  config["auto_mapping"] = {{"base_model_class", "LlamaForCausalLM"}};
  config["base_model_name_or_path"] = "somewhere/else";
  config["revision"] = "abc";
  config["eva_config"] = {{"rho", 2.0}};
  config["from_the_future"] = nullptr;
  config["from_the_future_2"] = false;
  config["from_the_future_3"] = Json::array();
  config["from_the_future_4"] = "";
  config["from_the_future_5"] = Json::object();
  EXPECT_EQ(Resolve(config).at("model.layers.0.self_attn.q_proj").scale, 0.0);
}

absl::StatusOr<ValidAdapter> Validate(const Json& config, const test::Tensors& tensors) {
  return ValidateAdapter(config.dump(), Share(test::WriteSafetensors(tensors)), MakeModules(),
                         kMaxRank);
}

TEST(AdapterAcceptanceTest, AcceptsEveryDtypeAndBothMagnitudeKeys) {
  for (const char* dtype : {"F32", "F16", "BF16"}) {
    test::Tensors tensors = test::MakeTensors(MakeModules(), {"q_proj"}, 2, true, dtype);
    const std::string key =
        "base_model.model.model.layers.1.self_attn.q_proj.lora_magnitude_vector";
    tensors[key + ".weight"] = tensors.at(key);
    tensors.erase(key);
    const auto valid = Validate(MakeConfig(true, {"q_proj"}), tensors);
    ASSERT_TRUE(valid.ok()) << dtype << ": " << valid.status();
    ASSERT_EQ(valid->tensors.modules.size(), 3u);
    for (const ModuleTensors& module : valid->tensors.modules) {
      ASSERT_NE(module.magnitude, nullptr);
      EXPECT_THAT(module.magnitude->shape, ElementsAre(test::kHidden));
    }
  }
}

TEST(AdapterAcceptanceTest, MapsEmbeddingAndHeadAndTheCopiesPeftSavesWithThem) {
  const std::vector<std::string> targets = {"embed_tokens", "lm_head"};
  test::Tensors tensors = test::MakeTensors(MakeModules(), targets, 2, true);
  std::mt19937 random(3);
  tensors["base_model.model.lm_head.base_layer.weight"] =
      test::RandomTensor("F32", {test::kVocabulary, test::kHidden}, random);
  tensors["base_model.model.model.embed_tokens.weight"] =
      test::RandomTensor("BF16", {test::kVocabulary, test::kHidden}, random);
  const auto valid = Validate(MakeConfig(true, targets), tensors);
  ASSERT_TRUE(valid.ok()) << valid.status();
  ASSERT_EQ(valid->tensors.modules.size(), 2u);
  EXPECT_THAT(valid->tensors.modules[0].a.shape, ElementsAre(2, test::kVocabulary));
  EXPECT_THAT(valid->tensors.modules[0].b.shape, ElementsAre(test::kHidden, 2));
  EXPECT_THAT(valid->tensors.modules[0].magnitude->shape, ElementsAre(test::kHidden));
  EXPECT_THAT(valid->tensors.modules[1].a.shape, ElementsAre(2, test::kHidden));
  EXPECT_EQ(valid->tensors.base_copies.size(), 2u);
}

// The scan works on blocks; every position of a few blocks must count.
TEST(AdapterAcceptanceTest, FiniteScanSeesEveryPosition) {
  for (const char* dtype : {"F32", "BF16"}) {
    const size_t count = 2048 * 2 + 3;
    for (size_t position = 0; position < count; position += 37) {
      std::vector<float> values(count, -1.0f);
      const test::TestTensor fine = test::MakeTensor(dtype, {static_cast<int64_t>(count)}, values);
      values[position] = std::numeric_limits<float>::infinity();
      const test::TestTensor bad = test::MakeTensor(dtype, {static_cast<int64_t>(count)}, values);
      const DType type = dtype == std::string("F32") ? DType::kF32 : DType::kBF16;
      EXPECT_TRUE(AllFinite({type, fine.shape, absl::MakeConstSpan(fine.bytes)}));
      EXPECT_FALSE(AllFinite({type, bad.shape, absl::MakeConstSpan(bad.bytes)})) << position;
    }
  }
}

// A model of several parts: the modules of the fixture under two names, and a tower.
BaseModules WithParts() {
  std::vector<BaseModule> in_memory = MakeModules().all();
  for (BaseModule& module : in_memory) {
    if (module.name != "lm_head") module.name.insert(6, "language_model.");
  }
  return BaseModules(std::move(in_memory), {MakeModules().all()},
                     {{"model.visual.blocks.0.attn.qkv"},
                      {"model.visual.blocks.0.mlp.up_proj"},
                      {"model.visual.pos_embed", ModuleKind::kEmbedding}});
}

TEST(AdapterAcceptanceTest, AnAdapterMayHaveTheNamesOfAnOlderVersion) {
  Json config = MakeConfig(true, {});
  config["target_modules"] = R"(model\.layers\.1\.mlp\..*)";
  const test::Tensors tensors = test::MakeTensors(
      MakeModules(), {"1.mlp.gate_proj", "1.mlp.up_proj", "1.mlp.down_proj"}, 2, true);
  const auto valid =
      ValidateAdapter(config.dump(), Share(test::WriteSafetensors(tensors)), WithParts(), kMaxRank);
  ASSERT_TRUE(valid.ok()) << valid.status();
  ASSERT_EQ(valid->tensors.modules.size(), 3u);
  EXPECT_EQ(valid->tensors.modules[0].target.module_id,
            MakeModules().Find("model.layers.1.mlp.gate_proj"));
}

TEST(AdapterAcceptanceTest, ATargetOfAPartThatIsNotServedMustBeExcluded) {
  Json config = MakeConfig(true, {"up_proj", "qkv"});
  Violations violations;
  auto parsed = ParsePeftConfig(config.dump(), kMaxRank, violations);
  ResolveTargets(*parsed, WithParts(), violations);
  const std::vector<Violation> found = ViolationsOf(violations.ToStatus("adapter"));
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].reason, "ADAPTER_PART_NOT_SERVED");
  EXPECT_THAT(found[0].description, HasSubstr("selects 2 modules"));

  config["target_modules"] = "all-linear";
  Violations of_linears;
  parsed = ParsePeftConfig(config.dump(), kMaxRank, of_linears);
  ResolveTargets(*parsed, WithParts(), of_linears);
  EXPECT_THAT(ViolationsOf(of_linears.ToStatus("adapter"))[0].description,
              HasSubstr("selects 2 modules"));

  config["target_modules"] = {"up_proj", "qkv"};
  config["exclude_modules"] = R"(.*visual.*)";
  Violations none;
  parsed = ParsePeftConfig(config.dump(), kMaxRank, none);
  const Targets targets = ResolveTargets(*parsed, WithParts(), none);
  EXPECT_TRUE(none.empty()) << none.ToStatus("adapter");
  EXPECT_EQ(targets.list.size(), static_cast<size_t>(test::kLayers));
}

}  // namespace
}  // namespace dorad::adapter
