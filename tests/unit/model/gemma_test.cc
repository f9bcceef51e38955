// Gemma 3's text: both spellings of its configuration, and what is refused by name.

#include "server/model/model_config.h"
#include "tests/unit/support/model_folder.h"

namespace dorad::model {
namespace {

using nlohmann::json;

absl::StatusOr<ModelConfig> Read(const json& config) {
  const ModelFolder folder;
  folder.Write("config.json", config);
  return ReadModelConfig(folder.path());
}

ModelConfig MustRead(const json& config) {
  const absl::StatusOr<ModelConfig> read = Read(config);
  EXPECT_TRUE(read.ok()) << read.status();
  return read.value_or(ModelConfig());
}

json With(json config, const json& changes) {
  config.update(changes);
  return config;
}

// What the published configurations of 27B have in text_config.
json Published() {
  return {{"model_type", "gemma3_text"},
          {"hidden_size", 5376},
          {"intermediate_size", 21504},
          {"num_hidden_layers", 8},
          {"num_attention_heads", 32},
          {"num_key_value_heads", 16},
          {"head_dim", 128},
          {"query_pre_attn_scalar", 168},
          {"rope_scaling", {{"factor", 8.0}, {"rope_type", "linear"}}},
          {"sliding_window", 1024}};
}

json Whole(const json& text) {
  return {{"model_type", "gemma3"},      {"architectures", {"Gemma3ForConditionalGeneration"}},
          {"text_config", text},         {"vision_config", {{"depth", 2}}},
          {"image_token_index", 262144}, {"eos_token_id", {1, 106}}};
}

// As transformers 5 writes the same.
json Current() {
  json text = Published();
  text.erase("rope_scaling");
  text["rope_parameters"] = {
      {"full_attention", {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 1e6}}},
      {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 10000.0}}}};
  for (int i = 0; i < 8; ++i) {
    text["layer_types"].push_back(i == 5 ? "full_attention" : "sliding_attention");
  }
  return text;
}

MATCHER_P2(Blames, field, reason, "") { return arg.field == field && arg.reason == reason; }

void ExpectGemma(const ModelConfig& config) {
  EXPECT_EQ(config.vocab_size, 262208);
  EXPECT_EQ(config.context_length, 131072);
  EXPECT_EQ(config.rms_norm_eps, 1e-6);
  EXPECT_TRUE(config.tied_embeddings);
  EXPECT_TRUE(config.norms_add_one);
  EXPECT_FLOAT_EQ(static_cast<float>(config.embedding_scale), 73.321205f);
  ASSERT_EQ(config.ropes.size(), 2u);
  EXPECT_EQ(config.ropes[0].kind, RopeKind::kLinear);
  EXPECT_EQ(config.ropes[0].factor, 8.0);
  EXPECT_EQ(config.ropes[0].theta, 1e6);
  EXPECT_EQ(config.ropes[1].kind, RopeKind::kDefault);
  EXPECT_EQ(config.ropes[1].theta, 10000.0);
  ASSERT_EQ(config.num_layers(), 8);
  for (int i = 0; i < 8; ++i) {
    const LayerSpec& layer = config.layers[i];
    EXPECT_EQ(layer.attention.window, i == 5 ? 0 : 1024) << i;
    EXPECT_EQ(layer.attention.rope, i == 5 ? 0 : 1) << i;
    EXPECT_EQ(layer.attention.query_scalar, 168.0);
    EXPECT_TRUE(layer.attention.qk_norm && layer.output_norms);
    EXPECT_EQ(layer.mlp.activation, Activation::kGeluTanh);
  }
}

TEST(GemmaTest, BothSpellingsAreTheSameModel) {
  for (const json& text : {Published(), Current()}) {
    ExpectGemma(MustRead(text));
    const ModelConfig whole = MustRead(Whole(text));
    ExpectGemma(whole);
    EXPECT_THAT(whole.image_token_ids, ElementsAre(262144));
    EXPECT_THAT(whole.eos_token_ids, ElementsAre(1, 106));
  }
}

TEST(GemmaTest, AbsentKeysHaveTransformersDefaults) {
  json text = Published();
  for (const char* key : {"num_attention_heads", "num_key_value_heads", "head_dim",
                          "query_pre_attn_scalar", "rope_scaling", "sliding_window"}) {
    text.erase(key);
  }
  const ModelConfig config = MustRead(text);
  EXPECT_EQ(config.num_heads, 8);
  EXPECT_EQ(config.num_kv_heads, 4);
  EXPECT_EQ(config.head_dim, 256);
  EXPECT_EQ(config.layers[0].attention.query_scalar, 256.0);
  EXPECT_EQ(config.layers[0].attention.window, 4096);
  EXPECT_EQ(config.ropes[0].kind, RopeKind::kDefault);
  EXPECT_EQ(config.ropes[0].theta, 1e6);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(1));
}

TEST(GemmaTest, Transformers4NamesBothBasesAndThePattern) {
  const ModelConfig config = MustRead(
      With(Published(),
           {{"rope_theta", 2e6}, {"rope_local_base_freq", 500.0}, {"sliding_window_pattern", 2}}));
  EXPECT_EQ(config.ropes[0].theta, 2e6);
  EXPECT_EQ(config.ropes[1].theta, 500.0);
  EXPECT_EQ(config.layers[0].attention.window, 1024);
  EXPECT_EQ(config.layers[1].attention.window, 0);
}

struct Refused {
  const char* name;
  json changes;
  const char* field;
  const char* reason;
};

class RefusedGemmaTest : public testing::TestWithParam<Refused> {};

TEST_P(RefusedGemmaTest, IsNamed) {
  const Refused& refused = GetParam();
  const absl::Status status = Read(With(Published(), refused.changes)).status();
  EXPECT_THAT(ViolationsOf(status),
              ElementsAre(Blames(std::string("config.json:") + refused.field, refused.reason)))
      << status;
}

constexpr char kInvalid[] = "MODEL_CONFIG_INVALID";
constexpr char kUnsupported[] = "MODEL_UNSUPPORTED";

INSTANTIATE_TEST_SUITE_P(
    , RefusedGemmaTest,
    testing::Values(
        Refused{"CappedLogits",
                {{"final_logit_softcapping", 30.0}},
                "final_logit_softcapping",
                kUnsupported},
        Refused{"CappedScores",
                {{"attn_logit_softcapping", 50.0}},
                "attn_logit_softcapping",
                kUnsupported},
        Refused{"BothDirections",
                {{"use_bidirectional_attention", true}},
                "use_bidirectional_attention",
                kUnsupported},
        Refused{
            "OtherActivation", {{"hidden_activation", "gelu"}}, "hidden_activation", kUnsupported},
        Refused{"ZeroScalar", {{"query_pre_attn_scalar", 0}}, "query_pre_attn_scalar", kInvalid},
        Refused{"ZeroPattern", {{"sliding_window_pattern", 0}}, "sliding_window_pattern", kInvalid},
        Refused{"NoWindow", {{"sliding_window", nullptr}}, "layer_types", kInvalid},
        Refused{"OldKindOfScaling",
                {{"rope_scaling", {{"type", "linear"}, {"factor", 8.0}}}},
                "rope_scaling.type",
                kUnsupported},
        Refused{"ScalingsOfNoKind",
                {{"rope_scaling", nullptr}, {"rope_parameters", {{"rope_type", "default"}}}},
                "rope_parameters.rope_type",
                kUnsupported},
        Refused{"OtherKindOfRope",
                {{"rope_scaling", nullptr},
                 {"rope_parameters", {{"sliding_attention", {{"rope_type", "own"}}}}}},
                "rope_parameters.sliding_attention.rope_type",
                kUnsupported}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace dorad::model
