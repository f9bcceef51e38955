
#include "server/model/model_config.h"
#include "tests/unit/support/model_folder.h"

namespace dorad::model {
namespace {

using nlohmann::json;

constexpr char kInvalid[] = "MODEL_CONFIG_INVALID";
constexpr char kUnsupported[] = "MODEL_UNSUPPORTED";

json Base(const std::string& type) {
  static const std::map<std::string, std::string> architectures = {
      {"llama", "LlamaForCausalLM"},
      {"mistral", "MistralForCausalLM"},
      {"qwen2", "Qwen2ForCausalLM"},
      {"qwen3", "Qwen3ForCausalLM"}};
  return {{"model_type", type},
          {"architectures", {architectures.at(type)}},
          {"vocab_size", 300},
          {"hidden_size", 64},
          {"intermediate_size", 96},
          {"num_hidden_layers", 4},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"max_position_embeddings", 512},
          {"rms_norm_eps", 1e-5},
          {"rope_theta", 20000.0},
          {"eos_token_id", 2}};
}

json With(json config, const json& changes) {
  config.update(changes);
  return config;
}

absl::StatusOr<ModelConfig> Read(const json& config, const json* generation = nullptr) {
  const ModelFolder folder;
  folder.Write("config.json", config);
  if (generation != nullptr) folder.Write("generation_config.json", *generation);
  return ReadModelConfig(folder.path());
}

ModelConfig MustRead(const json& config, const json* generation = nullptr) {
  const absl::StatusOr<ModelConfig> read = Read(config, generation);
  EXPECT_TRUE(read.ok()) << read.status();
  return read.value_or(ModelConfig());
}

std::vector<int64_t> Windows(const ModelConfig& config) {
  std::vector<int64_t> windows;
  for (const LayerSpec& layer : config.layers) windows.push_back(layer.attention.window);
  return windows;
}

MATCHER_P2(Blames, field, reason, "") { return arg.field == field && arg.reason == reason; }

TEST(ModelConfigTest, ReadsTheSizesOfALlama) {
  const ModelConfig config = MustRead(Base("llama"));
  EXPECT_EQ(config.model_type, "llama");
  EXPECT_EQ(config.vocab_size, 300);
  EXPECT_EQ(config.hidden_size, 64);
  EXPECT_EQ(config.intermediate_size, 96);
  EXPECT_EQ(config.num_layers(), 4);
  EXPECT_EQ(config.num_heads, 4);
  EXPECT_EQ(config.num_kv_heads, 2);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.context_length, 512);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_FALSE(config.tied_embeddings);
  for (const LayerSpec& layer : config.layers) {
    EXPECT_FALSE(layer.attention.qkv_bias || layer.attention.output_bias);
    EXPECT_FALSE(layer.mlp.bias || layer.attention.qk_norm || layer.output_norms);
    EXPECT_EQ(layer.mlp.activation, Activation::kSilu);
    EXPECT_EQ(layer.attention.query_scalar, 16.0);
  }
  EXPECT_EQ(config.embedding_scale, 1.0);
  EXPECT_THAT(Windows(config), ElementsAre(0, 0, 0, 0));
  EXPECT_EQ(config.ropes[0].kind, RopeKind::kDefault);
  EXPECT_EQ(config.ropes[0].theta, 20000.0);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(2));
}

TEST(ModelConfigTest, AbsentKeysHaveTheFamilysDefaults) {
  json llama = Base("llama");
  for (const char* key : {"num_key_value_heads", "max_position_embeddings", "rms_norm_eps",
                          "rope_theta", "eos_token_id", "architectures"}) {
    llama.erase(key);
  }
  const ModelConfig config = MustRead(llama);
  EXPECT_EQ(config.num_kv_heads, 4);
  EXPECT_EQ(config.context_length, 2048);
  EXPECT_EQ(config.rms_norm_eps, 1e-6);
  EXPECT_EQ(config.ropes[0].theta, 10000.0);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(2));

  json qwen3 = Base("qwen3");
  qwen3.erase("eos_token_id");
  EXPECT_EQ(MustRead(qwen3).head_dim, 128);  // not hidden_size / heads
  EXPECT_THAT(MustRead(qwen3).eos_token_ids, IsEmpty());

  json mistral = With(Base("mistral"), {{"num_attention_heads", 16}, {"head_dim", 8}});
  mistral.erase("num_key_value_heads");
  EXPECT_EQ(MustRead(mistral).num_kv_heads, 8);
  EXPECT_THAT(Windows(MustRead(mistral)), ElementsAre(4096, 4096, 4096, 4096));
}

TEST(ModelConfigTest, NullsMeanWhatTransformersSays) {
  const ModelConfig config = MustRead(With(Base("mistral"), {{"head_dim", nullptr},
                                                             {"num_key_value_heads", nullptr},
                                                             {"sliding_window", nullptr},
                                                             {"rope_scaling", nullptr},
                                                             {"eos_token_id", nullptr}}));
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.num_kv_heads, 4);
  EXPECT_THAT(Windows(config), ElementsAre(0, 0, 0, 0));
  EXPECT_THAT(config.eos_token_ids, IsEmpty());
}

TEST(ModelConfigTest, BiasesAndNormsFollowTheFamily) {
  const auto layer = [](const json& config) { return MustRead(config).layers.at(2); };
  const LayerSpec llama =
      layer(With(Base("llama"), {{"attention_bias", true}, {"mlp_bias", true}}));
  EXPECT_TRUE(llama.attention.qkv_bias && llama.attention.output_bias && llama.mlp.bias);
  EXPECT_FALSE(llama.attention.qk_norm);
  const LayerSpec qwen2 = layer(Base("qwen2"));
  EXPECT_TRUE(qwen2.attention.qkv_bias);
  EXPECT_FALSE(qwen2.attention.output_bias || qwen2.mlp.bias || qwen2.attention.qk_norm);
  const LayerSpec qwen3 = layer(Base("qwen3"));
  EXPECT_TRUE(qwen3.attention.qk_norm);
  EXPECT_FALSE(qwen3.attention.qkv_bias || qwen3.attention.output_bias);
  const LayerSpec biased = layer(With(Base("qwen3"), {{"attention_bias", true}}));
  EXPECT_TRUE(biased.attention.qkv_bias && biased.attention.output_bias);
}

TEST(ModelConfigTest, WindowsFollowUseMaxLayersAndTypes) {
  const json windowed = {
      {"use_sliding_window", true}, {"sliding_window", 8}, {"max_window_layers", 2}};
  for (const char* type : {"qwen2", "qwen3"}) {
    EXPECT_THAT(Windows(MustRead(With(Base(type), windowed))), ElementsAre(0, 0, 8, 8));
    json off = With(windowed, {{"use_sliding_window", false}});
    EXPECT_THAT(Windows(MustRead(With(Base(type), off))), ElementsAre(0, 0, 0, 0));
    json types =
        With(windowed,
             {{"layer_types",
               {"sliding_attention", "full_attention", "full_attention", "sliding_attention"}}});
    EXPECT_THAT(Windows(MustRead(With(Base(type), types))), ElementsAre(8, 0, 0, 8));
  }
  EXPECT_THAT(Windows(MustRead(With(Base("mistral"), {{"sliding_window", 7}}))),
              ElementsAre(7, 7, 7, 7));
}

TEST(ModelConfigTest, GenerationConfigSpeaksFirstAboutTheEnd) {
  json generation = {{"eos_token_id", {5, 7}}};
  EXPECT_THAT(MustRead(Base("llama"), &generation).eos_token_ids, ElementsAre(5, 7));
  generation = {{"eos_token_id", json::array()}};
  EXPECT_THAT(MustRead(Base("llama"), &generation).eos_token_ids, ElementsAre(2));
  generation = {{"eos_token_id", 9}};
  EXPECT_THAT(MustRead(Base("llama"), &generation).eos_token_ids, ElementsAre(9));
  generation = {{"temperature", 0.6}};
  EXPECT_THAT(MustRead(Base("llama"), &generation).eos_token_ids, ElementsAre(2));
}

TEST(ModelConfigTest, ReadsEveryFormOfRope) {
  json current = Base("llama");
  current.erase("rope_theta");
  current["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 100000}};
  EXPECT_EQ(MustRead(current).ropes[0].theta, 100000.0);

  const json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 128}};
  ModelConfig config = MustRead(With(Base("llama"), {{"rope_scaling", llama3}}));
  EXPECT_EQ(config.ropes[0].kind, RopeKind::kLlama3);
  EXPECT_EQ(config.ropes[0].theta, 20000.0);
  EXPECT_EQ(config.ropes[0].factor, 8.0);
  EXPECT_EQ(config.ropes[0].original_max_position, 128);

  config = MustRead(With(Base("llama"), {{"rope_scaling", {{"type", "linear"}, {"factor", 2}}}}));
  EXPECT_EQ(config.ropes[0].kind, RopeKind::kLinear);
  config = MustRead(With(Base("llama"), {{"rope_scaling", {{"type", "dynamic"}, {"factor", 2}}}}));
  EXPECT_EQ(config.ropes[0].kind, RopeKind::kDynamicNtk);
  EXPECT_EQ(config.context_length, 512);

  const json yarn = {{"rope_type", "yarn"},
                     {"factor", nullptr},
                     {"beta_fast", 0},
                     {"truncate", false},
                     {"original_max_position_embeddings", 128}};
  config = MustRead(With(Base("qwen2"), {{"rope_scaling", yarn}}));
  EXPECT_EQ(config.ropes[0].kind, RopeKind::kYarn);
  EXPECT_EQ(config.ropes[0].factor, 4.0);
  EXPECT_EQ(config.ropes[0].beta_fast, 32.0);
  EXPECT_FALSE(config.ropes[0].truncate);
  // The key beside the dictionary wins.
  config = MustRead(
      With(Base("qwen2"), {{"rope_scaling", yarn}, {"original_max_position_embeddings", 256}}));
  EXPECT_EQ(config.ropes[0].original_max_position, 256);
  EXPECT_EQ(config.ropes[0].factor, 2.0);
}

TEST(ModelConfigTest, LongRopeIsServedUpToItsOriginalLength) {
  const json longrope = {{"rope_type", "longrope"},
                         {"short_factor", json(8, 1.0)},
                         {"long_factor", json(8, 2.0)},
                         {"original_max_position_embeddings", 64}};
  const ModelConfig config = MustRead(With(Base("llama"), {{"rope_scaling", longrope}}));
  EXPECT_EQ(config.ropes[0].kind, RopeKind::kLongRope);
  EXPECT_EQ(config.ropes[0].factor, 8.0);  // of the whole length
  EXPECT_EQ(config.context_length, 64);
}

TEST(ModelConfigTest, IgnoresKeysWithoutEffect) {
  EXPECT_TRUE(Read(With(Base("llama"), {{"attention_dropout", 0.5},
                                        {"pretraining_tp", 2},
                                        {"initializer_range", 0.1},
                                        {"use_cache", false},
                                        {"torch_dtype", "bfloat16"},
                                        {"transformers_version", "4.40.0"},
                                        {"quantization_config", nullptr},
                                        {"residual_multiplier", 1.0},
                                        {"is_encoder_decoder", false},
                                        {"partial_rotary_factor", 1.0},
                                        {"auto_map", {{"AutoTokenizer", "x--y.Z"}}},
                                        {"some_new_key", 3}}))
                  .ok());
}

struct BadConfig {
  const char* name;
  const char* type;
  json changes;
  const char* field;
  const char* reason;
};

class BadConfigTest : public testing::TestWithParam<BadConfig> {};

TEST_P(BadConfigTest, IsRefusedByName) {
  const BadConfig& bad = GetParam();
  const absl::StatusOr<ModelConfig> read = Read(With(Base(bad.type), bad.changes));
  ASSERT_EQ(read.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(read.status()), bad.reason);
  EXPECT_THAT(ViolationsOf(read.status()),
              ElementsAre(Blames(std::string("config.json:") + bad.field, bad.reason)))
      << read.status();
}

json Rope(json rope) { return {{"rope_scaling", std::move(rope)}}; }

const std::vector<BadConfig>& BadConfigs() {
  static const auto* const configs = new std::vector<BadConfig>{
      {"OtherType", "llama", {{"model_type", "gemma2"}}, "model_type", kUnsupported},
      {"TypeNotText", "llama", {{"model_type", 3}}, "model_type", kInvalid},
      {"Classifier",
       "llama",
       {{"architectures", {"LlamaForSequenceClassification"}}},
       "architectures",
       kUnsupported},
      {"OtherFamilysClass",
       "qwen2",
       {{"architectures", {"Qwen3ForCausalLM"}}},
       "architectures",
       kUnsupported},
      {"Quantised",
       "llama",
       {{"quantization_config", {{"bits", 4}}}},
       "quantization_config",
       kUnsupported},
      {"Experts", "qwen3", {{"num_experts", 8}}, "num_experts", kUnsupported},
      {"Images", "mistral", {{"vision_config", {{"depth", 2}}}}, "vision_config", kUnsupported},
      {"ScaledResidual",
       "llama",
       {{"residual_multiplier", 0.5}},
       "residual_multiplier",
       kUnsupported},
      {"NotCausal", "llama", {{"is_causal", false}}, "is_causal", kUnsupported},
      {"OwnCode",
       "llama",
       {{"auto_map", {{"AutoModelForCausalLM", "m.M"}}}},
       "auto_map",
       kUnsupported},
      {"Gelu", "llama", {{"hidden_act", "gelu"}}, "hidden_act", kUnsupported},
      {"QueryScalar",
       "llama",
       {{"query_pre_attn_scalar", 168}},
       "query_pre_attn_scalar",
       kUnsupported},
      {"LlamaWindow", "llama", {{"sliding_window", 8}}, "sliding_window", kUnsupported},
      {"MistralMixedLayers",
       "mistral",
       {{"sliding_window", 8},
        {"layer_types",
         {"full_attention", "sliding_attention", "full_attention", "sliding_attention"}}},
       "layer_types",
       kUnsupported},
      {"ChunkedLayer",
       "qwen3",
       {{"layer_types",
         {"full_attention", "chunked_attention", "full_attention", "full_attention"}}},
       "layer_types",
       kUnsupported},
      {"TooFewLayerTypes", "qwen3", {{"layer_types", {"full_attention"}}}, "layer_types", kInvalid},
      {"SlidesWithoutWindow",
       "qwen2",
       {{"layer_types",
         {"full_attention", "sliding_attention", "full_attention", "full_attention"}}},
       "layer_types",
       kInvalid},
      {"ZeroWindow", "mistral", {{"sliding_window", 0}}, "sliding_window", kInvalid},
      {"NegativeSize", "llama", {{"intermediate_size", -1}}, "intermediate_size", kInvalid},
      {"FractionalSize", "llama", {{"num_hidden_layers", 4.0}}, "num_hidden_layers", kInvalid},
      {"AbsurdVocabulary", "llama", {{"vocab_size", uint64_t{1} << 63}}, "vocab_size", kInvalid},
      {"HeadsNotDivisible", "llama", {{"num_key_value_heads", 3}}, "num_key_value_heads", kInvalid},
      {"HiddenNotDivisible", "llama", {{"hidden_size", 66}}, "hidden_size", kInvalid},
      {"OddHead", "llama", {{"head_dim", 15}}, "head_dim", kInvalid},
      {"NullHeadOfQwen3", "qwen3", {{"head_dim", nullptr}}, "head_dim", kInvalid},
      {"EpsNotNumber", "llama", {{"rms_norm_eps", "1e-5"}}, "rms_norm_eps", kInvalid},
      {"TiedNotBool", "llama", {{"tie_word_embeddings", 1}}, "tie_word_embeddings", kInvalid},
      {"EosBeyondVocabulary", "llama", {{"eos_token_id", {2, 300}}}, "eos_token_id", kInvalid},
      {"ThetaNull", "llama", {{"rope_theta", nullptr}}, "rope_theta", kInvalid},
      {"PartialRotary",
       "llama",
       {{"partial_rotary_factor", 0.5}},
       "partial_rotary_factor",
       kUnsupported},
      {"UnknownRope", "llama", Rope({{"rope_type", "mrope"}}), "rope_scaling.rope_type",
       kUnsupported},
      {"RopeSections", "qwen2", Rope({{"type", "default"}, {"mrope_section", {4, 2, 2}}}),
       "rope_scaling.mrope_section", kUnsupported},
      {"RopeForEachLayerType",
       "qwen3",
       {{"rope_parameters", {{"full_attention", {{"rope_type", "default"}}}}}},
       "rope_parameters.full_attention",
       kUnsupported},
      {"TwoRopes",
       "llama",
       {{"rope_scaling", {{"type", "linear"}, {"factor", 2}}},
        {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 5e5}}}},
       "rope_scaling",
       kInvalid},
      {"LinearWithoutFactor", "llama", Rope({{"type", "linear"}}), "rope_scaling.factor", kInvalid},
      {"ShrinkingFactor", "llama", Rope({{"type", "dynamic"}, {"factor", 0.5}}),
       "rope_scaling.factor", kInvalid},
      {"Llama3Crossed", "llama",
       Rope({{"rope_type", "llama3"},
             {"factor", 8},
             {"low_freq_factor", 4},
             {"high_freq_factor", 4}}),
       "rope_scaling.high_freq_factor", kInvalid},
      {"YarnCrossed", "llama",
       Rope({{"rope_type", "yarn"}, {"factor", 8}, {"beta_fast", 1}, {"beta_slow", 2}}),
       "rope_scaling.beta_fast", kInvalid},
      {"LongRopeShortList", "llama",
       Rope({{"rope_type", "longrope"},
             {"short_factor", json(8, 1.0)},
             {"long_factor", json(7, 1.0)}}),
       "rope_scaling.long_factor", kInvalid},
      {"RopeNotObject", "llama", Rope("linear"), "rope_scaling", kInvalid},
  };
  return *configs;
}

INSTANTIATE_TEST_SUITE_P(All, BadConfigTest, testing::ValuesIn(BadConfigs()),
                         [](const auto& param) { return param.param.name; });

TEST(ModelConfigTest, ListsEveryProblemAtOnce) {
  json config = With(Base("llama"), {{"hidden_act", "relu"}, {"rms_norm_eps", -1}});
  config.erase("vocab_size");
  const json generation = {{"eos_token_id", "end"}};
  const absl::Status status = Read(config, &generation).status();
  EXPECT_THAT(ViolationsOf(status),
              UnorderedElementsAre(Blames("config.json:vocab_size", kInvalid),
                                   Blames("config.json:hidden_act", kUnsupported),
                                   Blames("config.json:rms_norm_eps", kInvalid),
                                   Blames("generation_config.json:eos_token_id", kInvalid)));
}

TEST(ModelConfigTest, MissingFolderIsNotFound) {
  const absl::Status status = ReadModelConfig("/nonexistent/model").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(status), "MODEL_NOT_FOUND");
}

TEST(ModelConfigTest, RefusesWhatIsNotOneJsonObject) {
  const std::string deep = R"({"a":)" + std::string(200, '[') + std::string(200, ']') + "}";
  for (const std::string& text :
       {std::string("{"), std::string("[1]"), std::string(R"({"model_type": NaN})"), deep,
        std::string(R"({"model_type": "llama", "model_type": "qwen2"})")}) {
    const ModelFolder folder;
    folder.Write("config.json", text);
    const absl::Status status = ReadModelConfig(folder.path()).status();
    EXPECT_EQ(ReasonOf(status), kInvalid) << text << ": " << status;
    EXPECT_THAT(ViolationsOf(status), Contains(Blames("config.json", kInvalid)));
  }
}

TEST(ModelConfigTest, RefusesABrokenGenerationConfig) {
  const ModelFolder folder;
  folder.Write("config.json", Base("llama"));
  folder.Write("generation_config.json", std::string("{,}"));
  EXPECT_THAT(ViolationsOf(ReadModelConfig(folder.path()).status()),
              ElementsAre(Blames("generation_config.json", kInvalid)));
}

TEST(ModelConfigTest, ModulesStandAtTheirIds) {
  const ModelConfig config = MustRead(Base("llama"));
  const std::vector<adapter::BaseModule> modules = MakeModules(config).all();
  ASSERT_EQ(modules.size(), 4 * 7 + 2);
  const adapter::BaseModule& k = modules[config.layers[3].attention.k];
  EXPECT_EQ(k.name, "model.layers.3.self_attn.k_proj");
  EXPECT_EQ(k.rows, 32);
  EXPECT_EQ(k.cols, 64);
  EXPECT_EQ(k.layer, 3);
  const adapter::BaseModule& down = modules[config.layers[0].mlp.down];
  EXPECT_EQ(down.name, "model.layers.0.mlp.down_proj");
  EXPECT_EQ(down.rows, 64);
  EXPECT_EQ(down.cols, 96);
  EXPECT_EQ(modules[config.embedding].name, "model.embed_tokens");
  EXPECT_EQ(modules[config.embedding].magnitude_size(), 64);
  EXPECT_EQ(modules[config.head].name, "lm_head");
  EXPECT_EQ(modules[config.head].magnitude_size(), 300);
  EXPECT_TRUE(modules[config.head].is_output_head);
}

}  // namespace
}  // namespace dorad::model
