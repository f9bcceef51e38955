// Gemma 3's text: both spellings of its configuration, and what is refused by name.

#include "absl/strings/str_cat.h"
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

// Of 4B, 12B and 27B.
json Siglip() {
  return {{"model_type", "siglip_vision_model"},
          {"hidden_size", 1152},
          {"image_size", 896},
          {"intermediate_size", 4304},
          {"num_attention_heads", 16},
          {"num_hidden_layers", 27},
          {"patch_size", 14},
          {"vision_use_head", false}};
}

json Whole(const json& text) {
  return {{"model_type", "gemma3"},      {"architectures", {"Gemma3ForConditionalGeneration"}},
          {"text_config", text},         {"vision_config", Siglip()},
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

TEST(GemmaTest, HasATowerOfOneImageSize) {
  const ModelConfig config = MustRead(Whole(Published()));
  ASSERT_TRUE(config.vision.has_value());
  const VisionConfig& vision = *config.vision;
  EXPECT_EQ(vision.head_dim(), 72);
  EXPECT_EQ(vision.output, 5376);
  EXPECT_EQ(vision.fixed_side, 64);
  EXPECT_EQ(vision.table_side, 64);
  EXPECT_EQ(vision.merge, 4);
  EXPECT_EQ(vision.tokens({1, 64, 64}), 256);
  EXPECT_EQ(vision.patch_elements(), 3 * 14 * 14);
  EXPECT_TRUE(vision.bidirectional);
  const adapter::BaseModules modules = MakeModules(config);
  EXPECT_EQ(vision.num_modules(), 162);
  EXPECT_EQ(modules.size(), config.head + 1 + 162);
  const int last = modules.Find("model.vision_tower.encoder.layers.26.mlp.fc2");
  EXPECT_EQ(last, modules.size() - 1);
  EXPECT_TRUE(vision.has_bias(last));
  ASSERT_EQ(modules.spellings().size(), 5u);
  const char* const older = "vision_tower.vision_model.encoder.layers.26.mlp.fc2";
  EXPECT_EQ(modules.spellings()[2].Find(absl::StrCat("model.", older)), last);
  EXPECT_EQ(modules.spellings()[3].Find(older), last);
  EXPECT_TRUE(config.IsOfOtherPart("vision_tower.head.probe"));
  EXPECT_FALSE(config.IsOfOtherPart("vision_tower.post_layernorm.weight"));
}

TEST(GemmaTest, ATowerWithoutRotaryPositionsTurnsNothing) {
  const ModelConfig config = MustRead(Whole(Published()));
  std::vector<float> cos(36), sin(36, 1.0f);
  FillPatchAngles(*config.vision, {5, 60}, cos.data(), sin.data());
  EXPECT_THAT(cos, ::testing::Each(1.0f));
  EXPECT_THAT(sin, ::testing::Each(0.0f));
  const TableTaps taps = TapsOf(*config.vision, {1, 64, 64}, {5, 60});
  EXPECT_EQ(taps.rows[0], 5 * 64 + 60);
  EXPECT_THAT(taps.weights, ElementsAre(1.0f, 0.0f, 0.0f, 0.0f));
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

TEST(GemmaTest, RefusesTowersByName) {
  struct Case {
    const char* key;
    json value;
    const char* reason;
  };
  for (const Case& c : {Case{"model_type", "pixtral", "MODEL_UNSUPPORTED"},
                        Case{"hidden_act", "gelu", "MODEL_UNSUPPORTED"},
                        Case{"num_attention_heads", 7, "MODEL_CONFIG_INVALID"},
                        Case{"image_size", 897, "MODEL_CONFIG_INVALID"},
                        Case{"layer_norm_eps", 1.0, "MODEL_CONFIG_INVALID"}}) {
    json config = Whole(Published());
    config["vision_config"][c.key] = c.value;
    const std::vector<Violation> violations = ViolationsOf(Read(config).status());
    EXPECT_THAT(violations,
                ElementsAre(Blames(absl::StrCat("config.json:vision_config.", c.key), c.reason)));
  }
  for (const int tokens : {0, 255, 400}) {
    const json config = With(Whole(Published()), {{"mm_tokens_per_image", tokens}});
    EXPECT_THAT(ViolationsOf(Read(config).status()),
                ElementsAre(Blames("config.json:mm_tokens_per_image", "MODEL_CONFIG_INVALID")));
  }
}

}  // namespace
}  // namespace dorad::model
