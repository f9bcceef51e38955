// A table of adapters that must be refused, each with the reason and a message that names the
// culprit. docs/guides/adapters.md lists the reasons.
#include <sys/resource.h>

#include "server/adapter/peft/validate.h"
#include "tests/unit/support/adapter_fixture.h"
#include "tests/unit/support/test.h"

namespace dorad::adapter {
namespace {

using Json = nlohmann::ordered_json;
using test::MakeConfig;
using test::MakeModules;
using test::MakeTensor;
using test::MakeTensors;
using test::Tensors;
using test::WriteSafetensors;

constexpr int kMaxRank = 64;
constexpr char kQ0[] = "base_model.model.model.layers.0.self_attn.q_proj";

// A sound DoRA adapter on q_proj and down_proj of every layer, which a case then damages.
struct Adapter {
  Json config = MakeConfig(true, {"q_proj", "down_proj"});
  Tensors tensors = MakeTensors(MakeModules(), {"q_proj", "down_proj"}, 2, true);
  std::string text;  // instead of `config`
};

struct Case {
  std::string name;
  std::function<void(Adapter&)> damage;
  std::string reason;
  std::string culprit;  // in a violation's field or description
};

absl::Status Validate(const Adapter& adapter) {
  const BaseModules modules = MakeModules();
  return ValidateAdapter(adapter.text.empty() ? adapter.config.dump() : adapter.text,
                         Share(WriteSafetensors(adapter.tensors)), modules, kMaxRank)
      .status();
}

// A case that sets one field of the configuration.
Case Field(const std::string& key, Json value, const std::string& reason) {
  return {key + "=" + value.dump().substr(0, 60),
          [key, value](Adapter& adapter) { adapter.config[key] = value; }, reason, key};
}

Case Text(const std::string& name, const std::string& text, const std::string& reason,
          const std::string& culprit = "adapter_config.json") {
  return {name, [text](Adapter& adapter) { adapter.text = text; }, reason, culprit};
}

// rank_pattern or alpha_pattern with as many different keys that begin with `expression`.
Json ManyPatterns(const std::string& expression, int count) {
  Json patterns = Json::object();
  for (int i = 0; i < count; ++i) patterns[expression + std::to_string(i)] = 2;
  return patterns;
}

std::vector<Case> JsonCases() {
  std::string wide = "{";
  for (int i = 0; i < 9000; ++i) wide += "\"k" + std::to_string(i) + "\":null,";
  wide.back() = '}';
  return {
      Text("empty text", " ", "ADAPTER_CONFIG_NOT_JSON"),
      Text("truncated", R"({"peft_type": "LORA")", "ADAPTER_CONFIG_NOT_JSON"),
      Text("a list", "[]", "ADAPTER_CONFIG_NOT_JSON"),
      Text("python's NaN", R"({"lora_alpha": NaN})", "ADAPTER_CONFIG_NOT_JSON"),
      Text("number beyond double", R"({"lora_alpha": 1e999})", "ADAPTER_CONFIG_NOT_JSON"),
      Text("invalid UTF-8", "{\"peft_type\": \"\xff\"}", "ADAPTER_CONFIG_NOT_JSON"),
      Text("trailing text", "{} {}", "ADAPTER_CONFIG_NOT_JSON"),
      Text("duplicate key", R"({"r": 8, "r": 9})", "ADAPTER_CONFIG_DUPLICATE_KEY", "\"r\""),
      Text("duplicate nested key", R"({"rank_pattern": {"a": 1, "a": 2}})",
           "ADAPTER_CONFIG_DUPLICATE_KEY", "\"a\""),
      Text("duplicate inside a list", R"({"x": [{"a": 1}, {"a": 1, "a": 2}]})",
           "ADAPTER_CONFIG_DUPLICATE_KEY", "\"a\""),
      Text("deep", R"({"x": )" + std::string(100000, '[') + std::string(100000, ']') + "}",
           "ADAPTER_CONFIG_TOO_DEEP"),
      Text("wide", wide, "ADAPTER_CONFIG_TOO_LARGE"),
      Text("large", "{\"x\": \"" + std::string(1 << 20, 'x') + "\"}", "ADAPTER_CONFIG_TOO_LARGE"),
  };
}

std::vector<Case> FieldCases() {
  const Json object = {{"x", 1}};
  return {
      Field("peft_type", "ADALORA", "ADAPTER_TYPE_UNSUPPORTED"),
      Field("peft_type", nullptr, "ADAPTER_TYPE_UNSUPPORTED"),
      Field("task_type", "SEQ_CLS", "ADAPTER_TASK_UNSUPPORTED"),
      Field("bias", "all", "ADAPTER_BIAS_UNSUPPORTED"),
      Field("bias", "lora_only", "ADAPTER_BIAS_UNSUPPORTED"),
      Field("r", 0, "ADAPTER_CONFIG_INVALID"),
      Field("r", -4, "ADAPTER_CONFIG_INVALID"),
      Field("r", 2.0, "ADAPTER_CONFIG_INVALID"),
      Field("r", "2", "ADAPTER_CONFIG_INVALID"),
      Field("r", true, "ADAPTER_CONFIG_INVALID"),
      Field("r", nullptr, "ADAPTER_CONFIG_INVALID"),
      Field("r", 65, "ADAPTER_RANK_TOO_LARGE"),
      Field("r", 18446744073709551615u, "ADAPTER_RANK_TOO_LARGE"),
      Field("rank_pattern", {{"q_proj", 1000}}, "ADAPTER_RANK_TOO_LARGE"),
      Field("rank_pattern", {{"q_proj", 0}}, "ADAPTER_CONFIG_INVALID"),
      Field("rank_pattern", {"q_proj"}, "ADAPTER_CONFIG_INVALID"),
      Field("rank_pattern", {{"(q_proj", 2}}, "ADAPTER_PATTERN_UNSUPPORTED"),
      Field("alpha_pattern", {{"q_proj", "x"}}, "ADAPTER_CONFIG_INVALID"),
      Field("alpha_pattern", {{"(?=q)q_proj", 2}}, "ADAPTER_PATTERN_UNSUPPORTED"),
      Field("lora_alpha", -1, "ADAPTER_CONFIG_INVALID"),
      Field("lora_alpha", "16", "ADAPTER_CONFIG_INVALID"),
      Field("lora_alpha", 1e300, "ADAPTER_CONFIG_INVALID"),
      Field("use_dora", "yes", "ADAPTER_CONFIG_INVALID"),
      Field("use_dora", nullptr, "ADAPTER_CONFIG_INVALID"),
      Field("use_rslora", 1, "ADAPTER_CONFIG_INVALID"),
      Field("fan_in_fan_out", 3, "ADAPTER_CONFIG_INVALID"),
      Field("target_modules", nullptr, "ADAPTER_NO_TARGETS"),
      Field("target_modules", Json::array(), "ADAPTER_NO_TARGETS"),
      Field("target_modules", "nothing_like_it", "ADAPTER_NO_TARGETS"),
      Field("target_modules", 7, "ADAPTER_CONFIG_INVALID"),
      Field("target_modules", {"q_proj", 7}, "ADAPTER_CONFIG_INVALID"),
      Field("target_modules", {"q_proj", "down_proj", "c_attn"}, "ADAPTER_TARGET_UNKNOWN"),
      Field("target_modules", {"q_proj", "down_proj", "norm"}, "ADAPTER_TARGET_UNKNOWN"),
      Field("target_modules", R"((.*)\.\1)", "ADAPTER_PATTERN_UNSUPPORTED"),
      Field("target_modules", ".*(?<!k)_proj", "ADAPTER_PATTERN_UNSUPPORTED"),
      Field("target_modules", ".*[[:alpha:]]_proj", "ADAPTER_PATTERN_UNSUPPORTED"),
      Field("target_modules", ".{,9}_proj", "ADAPTER_PATTERN_UNSUPPORTED"),
      Field("target_modules", std::string(20000, 'q'), "ADAPTER_PATTERNS_TOO_COSTLY"),
      Field("target_modules", R"((?:\pL){240})", "ADAPTER_PATTERNS_TOO_COSTLY"),
      Field("rank_pattern", ManyPatterns(R"(\d)", 300), "ADAPTER_PATTERNS_TOO_COSTLY"),
      Field("rank_pattern", ManyPatterns(R"((?:\pL){8})", 10), "ADAPTER_PATTERNS_TOO_COSTLY"),
      Field("alpha_pattern", ManyPatterns(R"((?:\pL){240})", 4096), "ADAPTER_PATTERNS_TOO_COSTLY"),
      Field("target_modules", "((a{100}){100}){100}", "ADAPTER_PATTERN_UNSUPPORTED"),
      Field("exclude_modules", "(", "ADAPTER_PATTERN_UNSUPPORTED"),
      Field("exclude_modules", {"q_proj", "down_proj"}, "ADAPTER_NO_TARGETS"),
      Field("exclude_modules", 1, "ADAPTER_CONFIG_INVALID"),
      Field("layers_to_transform", "0", "ADAPTER_CONFIG_INVALID"),
      Field("layers_to_transform", {0, -1}, "ADAPTER_CONFIG_INVALID"),
      Field("layers_to_transform", {17}, "ADAPTER_NO_TARGETS"),
      Field("layers_pattern", "layers", "ADAPTER_CONFIG_INVALID"),
      Field("init_lora_weights", "pissa", "ADAPTER_INIT_CHANGES_BASE"),
      Field("init_lora_weights", "pissa_niter_16", "ADAPTER_INIT_CHANGES_BASE"),
      Field("init_lora_weights", "OLoRA", "ADAPTER_INIT_CHANGES_BASE"),
      Field("init_lora_weights", "corda", "ADAPTER_INIT_CHANGES_BASE"),
      Field("init_lora_weights", "loftq", "ADAPTER_INIT_CHANGES_BASE"),
      Field("init_lora_weights", "lora_ga", "ADAPTER_INIT_CHANGES_BASE"),
      Field("init_lora_weights", "something", "ADAPTER_INIT_UNSUPPORTED"),
      Field("init_lora_weights", 3, "ADAPTER_INIT_UNSUPPORTED"),
      Field("modules_to_save", {"lm_head"}, "ADAPTER_MODULES_TO_SAVE_UNSUPPORTED"),
      Field("trainable_token_indices", {1, 2}, "ADAPTER_TRAINABLE_TOKENS_UNSUPPORTED"),
      Field("layer_replication", {{0, 2}, {1, 3}}, "ADAPTER_LAYER_REPLICATION_UNSUPPORTED"),
      Field("lora_bias", true, "ADAPTER_LORA_BIAS_UNSUPPORTED"),
      Field("megatron_config", object, "ADAPTER_MEGATRON_UNSUPPORTED"),
      Field("alora_invocation_tokens", {5}, "ADAPTER_ALORA_UNSUPPORTED"),
      Field("target_parameters", {"experts.gate"}, "ADAPTER_TARGET_PARAMETERS_UNSUPPORTED"),
      Field("ensure_weight_tying", true, "ADAPTER_WEIGHT_TYING_UNSUPPORTED"),
      Field("quantization_config", object, "ADAPTER_QUANTIZATION_UNSUPPORTED"),
      Field("use_qalora", true, "ADAPTER_VARIANT_UNSUPPORTED"),
      Field("use_bdlora", object, "ADAPTER_VARIANT_UNSUPPORTED"),
      Field("arrow_config", object, "ADAPTER_VARIANT_UNSUPPORTED"),
      Field("velora_config", object, "ADAPTER_VARIANT_UNSUPPORTED"),
      Field("kasa_config", object, "ADAPTER_VARIANT_UNSUPPORTED"),
      Field("monteclora_config", object, "ADAPTER_VARIANT_UNSUPPORTED"),
      Field("use_next_big_thing", true, "ADAPTER_CONFIG_UNKNOWN_KEY"),
      Field("gamma", 0, "ADAPTER_CONFIG_UNKNOWN_KEY"),
      {"missing alpha", [](Adapter& a) { a.config.erase("lora_alpha"); },
       "ADAPTER_CONFIG_MISSING_FIELD", "lora_alpha"},
      {"missing targets", [](Adapter& a) { a.config.erase("target_modules"); },
       "ADAPTER_CONFIG_MISSING_FIELD", "target_modules"},
      {"layers with a regex",
       [](Adapter& a) {
         a.config["target_modules"] = ".*q_proj";
         a.config["layers_to_transform"] = {0};
       },
       "ADAPTER_CONFIG_INVALID", "layers_to_transform"},
  };
}

std::string Q0(const std::string& suffix) { return kQ0 + suffix; }

void Move(Tensors& tensors, const std::string& from, const std::string& to) {
  tensors[to] = tensors.at(from);
  tensors.erase(from);
}

std::vector<float> Floats(size_t count, float value) { return std::vector<float>(count, value); }

std::vector<Case> TensorCases() {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const auto poisoned = [](const std::string& dtype, float value) {
    std::vector<float> values = Floats(16, 0.5f);
    values.back() = value;
    return MakeTensor(dtype, {2, 8}, values);
  };
  return {
      {"A missing", [](Adapter& a) { a.tensors.erase(Q0(".lora_A.weight")); },
       "ADAPTER_TENSOR_MISSING", Q0(".lora_A.weight")},
      {"B missing", [](Adapter& a) { a.tensors.erase(Q0(".lora_B.weight")); },
       "ADAPTER_TENSOR_MISSING", Q0(".lora_B.weight")},
      {"magnitude missing", [](Adapter& a) { a.tensors.erase(Q0(".lora_magnitude_vector")); },
       "ADAPTER_MAGNITUDE_MISSING", Q0(".lora_magnitude_vector")},
      {"no tensors", [](Adapter& a) { a.tensors.clear(); }, "ADAPTER_TENSOR_MISSING", kQ0},
      {"magnitude without use_dora", [](Adapter& a) { a.config["use_dora"] = false; },
       "ADAPTER_TENSOR_UNEXPECTED", "use_dora"},
      {"magnitude twice",
       [](Adapter& a) {
         a.tensors[Q0(".lora_magnitude_vector.weight")] =
             a.tensors.at(Q0(".lora_magnitude_vector"));
       },
       "ADAPTER_TENSOR_DUPLICATE", Q0(".lora_magnitude_vector.weight")},
      {"module not targeted", [](Adapter& a) { a.config["target_modules"] = {"q_proj"}; },
       "ADAPTER_TENSOR_UNEXPECTED", "does not target"},
      {"module unknown",
       [](Adapter& a) {
         Move(a.tensors, Q0(".lora_A.weight"), "base_model.model.visual.q_proj.lora_A.weight");
       },
       "ADAPTER_TENSOR_UNEXPECTED", "visual.q_proj"},
      {"no prefix",
       [](Adapter& a) {
         Move(a.tensors, Q0(".lora_A.weight"), "model.layers.0.self_attn.q_proj.lora_A.weight");
       },
       "ADAPTER_TENSOR_UNEXPECTED", "model.layers.0.self_attn.q_proj.lora_A.weight"},
      {"adapter name in the key",
       [](Adapter& a) { Move(a.tensors, Q0(".lora_A.weight"), Q0(".lora_A.default.weight")); },
       "ADAPTER_TENSOR_UNEXPECTED", "lora_A.default"},
      {"bias of B",
       [](Adapter& a) { a.tensors[Q0(".lora_B.bias")] = MakeTensor("F32", {8}, Floats(8, 1)); },
       "ADAPTER_TENSOR_UNEXPECTED", "lora_B.bias"},
      {"bias of the base",
       [](Adapter& a) { a.tensors[Q0(".bias")] = MakeTensor("F32", {8}, Floats(8, 1)); },
       "ADAPTER_TENSOR_UNEXPECTED", Q0(".bias")},
      {"a full module",
       [](Adapter& a) {
         a.tensors[Q0(".weight")] = MakeTensor("F32", {8, 8}, Floats(64, 1));
       },
       "ADAPTER_TENSOR_UNEXPECTED", Q0(".weight")},
      {"trained tokens",
       [](Adapter& a) {
         a.tensors["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"] =
             MakeTensor("F32", {1, 8}, Floats(8, 1));
       },
       "ADAPTER_TENSOR_UNEXPECTED", "trainable_tokens_delta"},
      {"embedding keys on a linear",
       [](Adapter& a) { Move(a.tensors, Q0(".lora_A.weight"), Q0(".lora_embedding_A")); },
       "ADAPTER_TENSOR_UNEXPECTED", "lora_embedding_A"},
      {"A transposed",
       [](Adapter& a) {
         a.tensors[Q0(".lora_A.weight")] = MakeTensor("F32", {8, 2}, Floats(16, 1));
       },
       "ADAPTER_TENSOR_SHAPE", "expected shape [2, 8], found [8, 2]"},
      {"A of three dimensions",
       [](Adapter& a) {
         a.tensors[Q0(".lora_A.weight")] = MakeTensor("F32", {2, 8, 1}, Floats(16, 1));
       },
       "ADAPTER_TENSOR_SHAPE", "[2, 8, 1]"},
      {"B too long",
       [](Adapter& a) {
         a.tensors[Q0(".lora_B.weight")] = MakeTensor("F32", {9, 2}, Floats(18, 1));
       },
       "ADAPTER_TENSOR_SHAPE", "expected shape [8, 2], found [9, 2]"},
      {"magnitude of a row",
       [](Adapter& a) {
         a.tensors[Q0(".lora_magnitude_vector")] = MakeTensor("F32", {1, 8}, Floats(8, 1));
       },
       "ADAPTER_TENSOR_SHAPE", "expected shape [8], found [1, 8]"},
      {"base copy of another shape",
       [](Adapter& a) {
         a.tensors["base_model.model.lm_head.base_layer.weight"] =
             MakeTensor("F32", {25, 8}, Floats(200, 1));
       },
       "ADAPTER_TENSOR_SHAPE", "lm_head.base_layer.weight"},
      {"rank of the file", [](Adapter& a) { a.config["r"] = 3; }, "ADAPTER_RANK_MISMATCH",
       "have rank 2, the configuration says 3"},
      {"rank_pattern ignored by the file",
       [](Adapter& a) {
         a.config["rank_pattern"] = {{"layers.1.self_attn.q_proj", 5}};
       },
       "ADAPTER_RANK_MISMATCH", "layers.1.self_attn.q_proj"},
      {"NaN in fp32", [=](Adapter& a) { a.tensors[Q0(".lora_A.weight")] = poisoned("F32", nan); },
       "ADAPTER_NOT_FINITE", Q0(".lora_A.weight")},
      {"infinity in bf16",
       [=](Adapter& a) { a.tensors[Q0(".lora_A.weight")] = poisoned("BF16", -inf); },
       "ADAPTER_NOT_FINITE", Q0(".lora_A.weight")},
      {"NaN in fp16", [=](Adapter& a) { a.tensors[Q0(".lora_A.weight")] = poisoned("F16", nan); },
       "ADAPTER_NOT_FINITE", Q0(".lora_A.weight")},
      {"integer tensors", [](Adapter& a) { a.tensors[Q0(".lora_A.weight")].dtype = "I32"; },
       "SAFETENSORS_DTYPE", Q0(".lora_A.weight")},
  };
}

void ExpectRefused(const std::vector<Case>& cases) {
  for (const Case& bad : cases) {
    SCOPED_TRACE(bad.name);
    Adapter adapter;
    bad.damage(adapter);
    const absl::Status status = Validate(adapter);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    const std::vector<Violation> violations = ViolationsOf(status);
    const Violation* found = nullptr;
    for (const Violation& violation : violations) {
      if (violation.reason == bad.reason && found == nullptr) found = &violation;
    }
    ASSERT_NE(found, nullptr) << "no " << bad.reason << " in " << status;
    EXPECT_THAT(found->field + ": " + found->description, HasSubstr(bad.culprit));
    EXPECT_LT(status.message().size(), 4096u);
  }
}

TEST(AdapterRefusalTest, TheUndamagedAdapterIsAccepted) {
  const absl::Status status = Validate(Adapter());
  EXPECT_TRUE(status.ok()) << status;
}

TEST(AdapterRefusalTest, RefusesTextThatIsNotStrictJson) { ExpectRefused(JsonCases()); }

TEST(AdapterRefusalTest, RefusesEveryFieldThatItWouldNotHonour) { ExpectRefused(FieldCases()); }

TEST(AdapterRefusalTest, RefusesTensorsThatDoNotFit) { ExpectRefused(TensorCases()); }

TEST(AdapterRefusalTest, ListsAllProblemsOfBothFilesAtOnce) {
  Adapter adapter;
  adapter.config["bias"] = "all";
  adapter.config["r"] = 0;
  adapter.config["surprise"] = "yes";
  adapter.tensors["stranger"] = MakeTensor("F32", {1}, {1});
  adapter.tensors[Q0(".lora_A.weight")] = MakeTensor("F32", {1}, {std::nanf("")});
  std::vector<std::string> reasons;
  for (const Violation& violation : ViolationsOf(Validate(adapter))) {
    reasons.push_back(violation.reason);
  }
  EXPECT_THAT(reasons,
              UnorderedElementsAre("ADAPTER_BIAS_UNSUPPORTED", "ADAPTER_CONFIG_INVALID",
                                   "ADAPTER_CONFIG_UNKNOWN_KEY", "ADAPTER_TENSOR_UNEXPECTED",
                                   "ADAPTER_TENSOR_SHAPE", "ADAPTER_NOT_FINITE"));
}

std::vector<std::string> Problems(const absl::Status& status) {
  std::vector<std::string> problems;
  for (const Violation& violation : ViolationsOf(status)) {
    problems.push_back(violation.field + " " + violation.reason);
  }
  return problems;
}

// Three rounds of publishing, each with the problems of one stage, would be as many as stages.
TEST(AdapterRefusalTest, ListsProblemsOfConfigurationTargetsAndTensorsInOneRound) {
  Adapter adapter;
  adapter.config["bias"] = "all";
  adapter.config["target_modules"] = {"q_proj", "down_porj"};
  adapter.tensors.erase(Q0(".lora_A.weight"));
  const std::string down = "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight";
  adapter.tensors[down] = MakeTensor("F32", {1, 2}, {1, 2});
  adapter.tensors["stranger"] = MakeTensor("F32", {1}, {1});
  EXPECT_THAT(
      Problems(Validate(adapter)),
      UnorderedElementsAre("adapter_config.json:bias ADAPTER_BIAS_UNSUPPORTED",
                           "adapter_config.json:target_modules ADAPTER_TARGET_UNKNOWN",
                           Q0(".lora_A.weight") + " ADAPTER_TENSOR_MISSING",
                           down + " ADAPTER_TENSOR_SHAPE", "stranger ADAPTER_TENSOR_UNEXPECTED"));
}

// Consequences of a refused value are not problems of their own.
TEST(AdapterRefusalTest, HoldsNoRefusedValueAgainstTheTensors) {
  for (const auto& [field, value] :
       std::vector<std::pair<std::string, Json>>{{"r", 0},
                                                 {"r", 65},
                                                 {"rank_pattern", {{"(q_proj", 1}}},
                                                 {"rank_pattern", {{"q_proj", -1}}},
                                                 {"use_dora", "yes"},
                                                 {"target_modules", {"q_proj", "down_porj"}},
                                                 {"target_modules", "nothing_like_it"},
                                                 {"target_modules", {"q_proj", 7}},
                                                 {"exclude_modules", "(down"},
                                                 {"layers_to_transform", "all"},
                                                 {"layers_pattern", "layers"}}) {
    SCOPED_TRACE(field + value.dump());
    Adapter adapter;
    adapter.config[field] = value;
    const std::vector<Violation> violations = ViolationsOf(Validate(adapter));
    ASSERT_EQ(violations.size(), 1u);
    EXPECT_THAT(violations[0].field, HasSubstr("adapter_config.json:" + field));
  }
}

TEST(AdapterRefusalTest, JudgesShapesWithoutTheRank) {
  Adapter adapter;
  adapter.config["r"] = 0;
  adapter.tensors[Q0(".lora_A.weight")] = MakeTensor("F32", {2, 3}, std::vector<float>(6, 1));
  const std::vector<Violation> violations = ViolationsOf(Validate(adapter));
  ASSERT_EQ(violations.size(), 2u);
  EXPECT_EQ(violations[1].reason, "ADAPTER_TENSOR_SHAPE");
  EXPECT_THAT(violations[1].description, HasSubstr("expected shape [r, "));
}

TEST(AdapterRefusalTest, SuggestsTheModuleThatWasMeant) {
  const std::vector<std::pair<std::string, std::string>> names = {
      {"q_porj", "did you mean q_proj?"},
      {"1.self_attn.q_porj", "did you mean 1.self_attn.q_proj?"},
      {"model.embed_token", "did you mean model.embed_tokens?"}};
  for (const auto& [name, suggestion] : names) {
    Adapter adapter;
    adapter.config["target_modules"] = {"q_proj", "down_proj", name};
    const std::vector<Violation> violations = ViolationsOf(Validate(adapter));
    ASSERT_EQ(violations.size(), 1u);
    EXPECT_THAT(violations[0].description, HasSubstr(suggestion));
  }
  Adapter adapter;
  adapter.config["target_modules"] = {"q_proj", "down_proj", "transformer.wte"};
  EXPECT_THAT(ViolationsOf(Validate(adapter))[0].description, Not(HasSubstr("did you mean")));
}

// Compiled at once they would take minutes and more than a GiB.
TEST(AdapterRefusalTest, CostlyPatternsAreRefusedBeforeTheyCostMuch) {
  Adapter adapter;
  adapter.config["rank_pattern"] = ManyPatterns(R"((?:\pL){240})", 4096);
  adapter.config["alpha_pattern"] = ManyPatterns(R"((?:\pL){240})", 4096);
  const absl::Time start = absl::Now();
  EXPECT_FALSE(Validate(adapter).ok());
  EXPECT_LT(absl::Now() - start, absl::Seconds(30));
  rusage usage;
  ASSERT_EQ(getrusage(RUSAGE_SELF, &usage), 0);
  EXPECT_LT(usage.ru_maxrss, 1 << 20);  // KiB
}

TEST(AdapterRefusalTest, BoundsTheListOfProblems) {
  Adapter adapter;
  for (int i = 0; i < 500; ++i) {
    adapter.tensors["stranger" + std::to_string(i)] = MakeTensor("F32", {1}, {1});
  }
  const absl::Status status = Validate(adapter);
  EXPECT_EQ(ViolationsOf(status).size(), 64u);
  EXPECT_EQ(OmittedViolationsOf(status), 436u);
  EXPECT_THAT(std::string(status.message()), HasSubstr("and 492 more"));
}

// A header's own problems are counted with those of the configuration.
TEST(AdapterRefusalTest, CountsAllProblemsOfAHeader) {
  std::string header = "{";
  for (int i = 0; i < 100; ++i) {
    header += (i ? ",\"t" : "\"t") + std::to_string(i) +
              R"(":{"dtype":"F32","shape":[1],"data_offsets":[0,1]})";
  }
  header += "}";
  ByteBuffer bytes(8 + header.size() + 4);
  const uint64_t length = header.size();
  std::memcpy(bytes.data(), &length, 8);
  std::memcpy(bytes.data() + 8, header.data(), header.size());
  Adapter adapter;
  adapter.config["bias"] = "all";
  const absl::Status status =
      ValidateAdapter(adapter.config.dump(), Share(std::move(bytes)), MakeModules(), kMaxRank)
          .status();
  EXPECT_EQ(ViolationsOf(status).size() + OmittedViolationsOf(status), 101u);
}

}  // namespace
}  // namespace dorad::adapter
