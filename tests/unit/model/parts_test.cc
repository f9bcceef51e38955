// Models of several parts, whose text is served: where their configurations and files keep what.

#include "server/model/model_config.h"
#include "tests/unit/support/model_folder.h"
#include "tests/unit/support/safetensors_writer.h"

namespace dorad::model {
namespace {

using nlohmann::json;

json Text(const std::string& type) {
  return {{"model_type", type},       {"vocab_size", 300},
          {"hidden_size", 64},        {"intermediate_size", 96},
          {"num_hidden_layers", 2},   {"num_attention_heads", 4},
          {"num_key_value_heads", 2}, {"sliding_window", nullptr},
          {"rope_theta", 20000.0},    {"max_position_embeddings", 512}};
}

json Whole(const std::string& type, const std::string& architecture, json text) {
  return {{"model_type", type},
          {"architectures", {architecture}},
          {"text_config", std::move(text)},
          {"vision_config", {{"depth", 2}}}};
}

json Mistral() { return Whole("mistral3", "Mistral3ForConditionalGeneration", Text("mistral")); }
json Qwen3() {
  json config = Whole("qwen3_vl", "Qwen3VLForConditionalGeneration", Text("qwen3_vl_text"));
  config["vision_config"] = {
      {"depth", 2}, {"out_hidden_size", 64}, {"deepstack_visual_indexes", json::array()}};
  return config;
}

// A folder with these tensors, each of one element.
absl::StatusOr<ModelConfig> Read(const json& config, const std::vector<std::string>& tensors = {}) {
  const ModelFolder folder;
  folder.Write("config.json", config);
  if (!tensors.empty()) {
    std::map<std::string, test::TestTensor> stored;
    for (const std::string& name : tensors) stored[name] = test::MakeTensor("F32", {1, 1}, {1.0f});
    folder.Write("model.safetensors", test::WriteSafetensors(stored));
  }
  return ReadModelConfig(folder.path());
}

TEST(PartsTest, TheTextHasItsOwnFields) {
  const auto config = Read(Qwen3());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->model_type, "qwen3_vl");
  EXPECT_EQ(config->hidden_size, 64);
  EXPECT_EQ(config->head_dim, 128);
  EXPECT_TRUE(config->layers[1].attention.qk_norm);
  EXPECT_EQ(config->ropes[0].theta, 20000.0);
}

TEST(PartsTest, Transformers4WroteTheTextsFieldsBesideTheVisions) {
  json config = Text("qwen2_5_vl");
  config["architectures"] = {"Qwen2_5_VLForConditionalGeneration"};
  config["vision_config"] = {{"depth", 2}, {"out_hidden_size", 64}};
  config["rope_scaling"] = {{"type", "mrope"}, {"mrope_section", {2, 3, 3}}};
  config["image_token_id"] = 299;
  const auto read = Read(config);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE(read->layers[1].attention.qkv_bias);
  EXPECT_EQ(read->ropes[0].kind, RopeKind::kDefault);
  EXPECT_EQ(read->ropes[0].theta, 20000.0);
  EXPECT_EQ(read->rms_norm_eps, 1e-5);
  EXPECT_THAT(read->image_token_ids, ElementsAre(299));
}

TEST(PartsTest, Transformers4LeftOutTheTextsDefaults) {
  struct Known {
    const char* type;
    const char* architecture;
    const char* text;
    std::vector<int64_t> sizes;
  };
  for (const Known& known : {Known{"mistral3",
                                   "Mistral3ForConditionalGeneration",
                                   "mistral",
                                   {32000, 4096, 14336, 32, 32, 8, 128}},
                             Known{"qwen2_5_vl",
                                   "Qwen2_5_VLForConditionalGeneration",
                                   "qwen2_5_vl_text",
                                   {152064, 8192, 29568, 80, 64, 8, 128}},
                             Known{"qwen3_vl",
                                   "Qwen3VLForConditionalGeneration",
                                   "qwen3_vl_text",
                                   {151936, 4096, 22016, 32, 32, 32, 128}}}) {
    json whole = Whole(known.type, known.architecture, {{"model_type", known.text}});
    whole["vision_config"] = {{"depth", 25}, {"out_hidden_size", known.sizes[1]}};
    const auto config = Read(whole);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_THAT((std::vector<int64_t>{config->vocab_size, config->hidden_size,
                                      config->intermediate_size, config->num_layers(),
                                      config->num_heads, config->num_kv_heads, config->head_dim}),
                ElementsAreArray(known.sizes))
        << known.type;
  }
}

TEST(PartsTest, ATextOfAnotherTypeIsRefused) {
  const json config = Whole("mistral3", "Mistral3ForConditionalGeneration", Text("llama"));
  const std::vector<Violation> violations = ViolationsOf(Read(config).status());
  ASSERT_EQ(violations.size(), 1u);
  EXPECT_EQ(violations[0].field, "config.json:text_config.model_type");
  EXPECT_EQ(violations[0].reason, "MODEL_UNSUPPORTED");
}

TEST(PartsTest, KeysOfTheTextAreRefusedByNameToo) {
  json config = Qwen3();
  config["text_config"]["num_experts"] = 8;
  const std::vector<Violation> violations = ViolationsOf(Read(config).status());
  ASSERT_EQ(violations.size(), 1u);
  EXPECT_EQ(violations[0].field, "config.json:text_config.num_experts");
}

TEST(PartsTest, AStoredHeadIsTheHeadWhereTyingIsOnlyTheDefault) {
  const std::string embedding = "language_model.model.embed_tokens.weight";
  const std::string head = "language_model.lm_head.weight";
  EXPECT_TRUE(Read(Mistral(), {embedding})->tied_embeddings);
  EXPECT_FALSE(Read(Mistral(), {embedding, head})->tied_embeddings);
  json told = Mistral();
  told["tie_word_embeddings"] = true;
  EXPECT_TRUE(Read(told, {embedding, head})->tied_embeddings);
}

TEST(PartsTest, ModulesHaveTheirNamesInMemoryAndThoseOfFiles) {
  const auto config = Read(Mistral());
  ASSERT_TRUE(config.ok()) << config.status();
  const adapter::BaseModules modules = MakeModules(*config);
  const int id = config->layers[1].mlp.up;
  EXPECT_EQ(modules.Find("model.language_model.layers.1.mlp.up_proj"), id);
  ASSERT_EQ(modules.spellings().size(), 2u);
  EXPECT_EQ(modules.spellings()[0].Find("language_model.model.layers.1.mlp.up_proj"), id);
  EXPECT_EQ(modules.spellings()[0].Find("language_model.lm_head"), config->head);
  EXPECT_EQ(modules.spellings()[1].Find("model.layers.1.mlp.up_proj"), id);
}

TEST(PartsTest, TheCheckpointTellsWhichModulesAreNotServed) {
  json gemma = Whole("gemma3", "Gemma3ForConditionalGeneration", Text("gemma3_text"));
  gemma["text_config"]["sliding_window"] = 16;
  gemma.erase("vision_config");
  const auto config = Read(
      gemma, {"vision_tower.layers.0.attention.q_proj.weight",
              "multi_modal_projector.linear_1.weight", "language_model.model.embed_tokens.weight"});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(MakeModules(*config).not_served(),
              ElementsAre(::testing::Field(&adapter::BaseModule::name,
                                           "model.multi_modal_projector.linear_1"),
                          ::testing::Field(&adapter::BaseModule::name,
                                           "model.vision_tower.layers.0.attention.q_proj")));
}

}  // namespace
}  // namespace dorad::model
