// Towers: their configurations, their modules, and the places of patches.

#include "server/model/model_config.h"
#include "server/model/vision_config.h"
#include "tests/unit/support/model_folder.h"

namespace dorad::model {
namespace {

using nlohmann::json;

json Small() {
  return {{"model_type", "qwen3_vl"},
          {"architectures", {"Qwen3VLForConditionalGeneration"}},
          {"image_token_id", 7},
          {"text_config",
           {{"model_type", "qwen3_vl_text"},
            {"vocab_size", 300},
            {"hidden_size", 64},
            {"intermediate_size", 96},
            {"num_hidden_layers", 2},
            {"num_attention_heads", 4},
            {"num_key_value_heads", 2}}},
          {"vision_config",
           {{"model_type", "qwen3_vl_vision"},
            {"depth", 3},
            {"hidden_size", 32},
            {"intermediate_size", 48},
            {"num_heads", 2},
            {"patch_size", 4},
            {"out_hidden_size", 64},
            {"num_position_embeddings", 16},
            {"rope_parameters", {{"rope_type", "axial"}, {"rope_theta", 100.0}}},
            {"deepstack_visual_indexes", {0, 2}}}}};
}

json Qwen25() {
  json config = Small();
  config["model_type"] = "qwen2_5_vl";
  config["architectures"] = {"Qwen2_5_VLForConditionalGeneration"};
  config["text_config"]["model_type"] = "qwen2_5_vl_text";
  config["text_config"]["rope_scaling"] = {{"type", "mrope"}, {"mrope_section", {2, 3, 3}}};
  config["vision_config"] = {
      {"model_type", "qwen2_5_vl"},     {"depth", 3},        {"hidden_size", 32},
      {"intermediate_size", 48},        {"num_heads", 2},    {"patch_size", 4},
      {"out_hidden_size", 64},          {"window_size", 17}, {"in_chans", 3},
      {"fullatt_block_indexes", {1, 7}}};
  return config;
}

json Mistral3() {
  json config = Small();
  config["model_type"] = "mistral3";
  config["architectures"] = {"Mistral3ForConditionalGeneration"};
  config["text_config"]["model_type"] = "mistral";
  config["text_config"]["sliding_window"] = nullptr;
  config["text_config"]["rms_norm_eps"] = 1e-3;
  config["image_token_index"] = 9;
  config["vision_config"] = {{"model_type", "pixtral"},  {"num_hidden_layers", 2},
                             {"hidden_size", 32},        {"intermediate_size", 48},
                             {"num_attention_heads", 2}, {"patch_size", 4},
                             {"head_dim", 16},           {"rope_theta", 100.0},
                             {"hidden_act", "silu"},     {"image_size", 64}};
  return config;
}

absl::StatusOr<ModelConfig> Read(const json& config) {
  const ModelFolder folder;
  folder.Write("config.json", config);
  return ReadModelConfig(folder.path());
}

TEST(VisionConfigTest, TheTowerHasItsOwnFields) {
  const auto config = Read(Small());
  ASSERT_TRUE(config.ok()) << config.status();
  ASSERT_TRUE(config->vision.has_value());
  const VisionConfig& vision = *config->vision;
  EXPECT_EQ(vision.head_dim(), 16);
  EXPECT_EQ(vision.table_side, 4);
  EXPECT_EQ(vision.theta, 100.0);
  EXPECT_EQ(vision.image_token_id, 7);
  EXPECT_EQ(vision.patch_elements(), 3 * 2 * 4 * 4);
  EXPECT_EQ(vision.patches({2, 4, 6}), 48);
  EXPECT_EQ(vision.tokens({2, 4, 6}), 12);
  EXPECT_THAT(vision.deepstack, ElementsAre(0, 2));
}

TEST(VisionConfigTest, AbsentKeysHaveTheDefaultsOfTransformers) {
  json config = Small();
  config["text_config"]["hidden_size"] = 3584;
  config["text_config"]["num_hidden_layers"] = 3;
  config["vision_config"] = json::object();
  const auto read = Read(config);
  ASSERT_TRUE(read.ok()) << read.status();
  const VisionConfig& vision = *read->vision;
  EXPECT_THAT((std::vector<int64_t>{vision.width, vision.inner, vision.heads, vision.channels,
                                    vision.patch, vision.temporal_patch, vision.merge,
                                    vision.table_side, static_cast<int64_t>(vision.blocks.size())}),
              ElementsAre(1152, 4304, 16, 3, 16, 2, 2, 48, 27));
  EXPECT_THAT(vision.deepstack, ElementsAre(8, 16, 24));
  EXPECT_EQ(vision.theta, 10000.0);
}

TEST(VisionConfigTest, WithoutVisionConfigTheTextAloneIsServed) {
  json config = Small();
  config.erase("vision_config");
  const auto read = Read(config);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_FALSE(read->vision.has_value());
  EXPECT_TRUE(read->IsOfOtherPart("model.visual.pos_embed.weight"));
}

TEST(VisionConfigTest, RefusesByName) {
  struct Case {
    const char* key;
    json value;
    const char* reason;
  };
  for (const Case& c :
       {Case{"model_type", "siglip", "MODEL_UNSUPPORTED"},
        Case{"hidden_act", "silu", "MODEL_UNSUPPORTED"}, Case{"head_dim", 8, "MODEL_UNSUPPORTED"},
        Case{"num_heads", 3, "MODEL_CONFIG_INVALID"}, Case{"num_heads", 16, "MODEL_CONFIG_INVALID"},
        Case{"hidden_size", 0, "MODEL_CONFIG_INVALID"},
        Case{"intermediate_size", -1, "MODEL_CONFIG_INVALID"},
        Case{"in_channels", 0, "MODEL_CONFIG_INVALID"},
        Case{"patch_size", {4, 4}, "MODEL_CONFIG_INVALID"},
        Case{"temporal_patch_size", 0, "MODEL_CONFIG_INVALID"},
        Case{"spatial_merge_size", 0, "MODEL_CONFIG_INVALID"},
        Case{"out_hidden_size", 63, "MODEL_CONFIG_INVALID"},
        Case{"num_position_embeddings", 15, "MODEL_CONFIG_INVALID"},
        Case{"depth", 0, "MODEL_CONFIG_INVALID"},
        Case{"deepstack_visual_indexes", {0, 3}, "MODEL_CONFIG_INVALID"},
        Case{"deepstack_visual_indexes", {1, 1}, "MODEL_CONFIG_INVALID"},
        Case{"deepstack_visual_indexes", {-1, 1}, "MODEL_CONFIG_INVALID"},
        Case{"deepstack_visual_indexes", {0, 1, 2}, "MODEL_CONFIG_INVALID"},
        Case{"deepstack_visual_indexes", 1, "MODEL_CONFIG_INVALID"}}) {
    json config = Small();
    config["vision_config"][c.key] = c.value;
    const std::vector<Violation> violations = ViolationsOf(Read(config).status());
    const std::string field = std::string("config.json:vision_config.") + c.key;
    const bool found = std::any_of(violations.begin(), violations.end(), [&](const auto& each) {
      return each.field == field && each.reason == c.reason;
    });
    EXPECT_TRUE(found) << c.key << " " << c.value;
  }
  json rope = Small();
  rope["vision_config"]["rope_parameters"]["rope_type"] = "linear";
  const std::vector<Violation> violations = ViolationsOf(Read(rope).status());
  ASSERT_EQ(violations.size(), 1u);
  EXPECT_EQ(violations[0].field, "config.json:vision_config.rope_parameters.rope_type");
}

TEST(VisionConfigTest, ABackendTellsQwen3sTowerByItsStyle) {
  EXPECT_TRUE(Read(Small())->vision->style == TowerStyle{});
  EXPECT_FALSE(Read(Qwen25())->vision->style == TowerStyle{});
  EXPECT_FALSE(Read(Mistral3())->vision->style == TowerStyle{});
}

TEST(VisionConfigTest, Qwen25HasWindowsAndGates) {
  const auto config = Read(Qwen25());
  ASSERT_TRUE(config.ok()) << config.status();
  const VisionConfig& vision = *config->vision;
  EXPECT_EQ(vision.window, 2);  // 17 / 2 / 4
  EXPECT_TRUE(vision.blocks[0].windowed);
  EXPECT_FALSE(vision.blocks[1].windowed);
  const adapter::BaseModules modules = MakeModules(*config);
  EXPECT_EQ(modules.size(), config->head + 1 + 5 * 3 + 2);
  const auto find = [&](const char* name) { return modules.Find(name); };
  EXPECT_EQ(find("model.visual.blocks.1.mlp.gate_proj"), vision.blocks[1].fc1);
  EXPECT_EQ(find("model.visual.blocks.1.mlp.up_proj"), vision.blocks[1].fc1 + 1);
  EXPECT_EQ(find("model.visual.blocks.2.mlp.down_proj"), vision.blocks[2].fc2);
  EXPECT_EQ(find("model.visual.merger.mlp.2"), modules.size() - 1);
  EXPECT_EQ(modules.all()[vision.blocks[0].fc2].cols, 48);
  EXPECT_THAT(modules.not_served(), ElementsAre(::testing::Field(&adapter::BaseModule::name,
                                                                 "model.visual.patch_embed.proj")));
  EXPECT_THAT(config->ropes[0].axes, ElementsAre(0, 0, 1, 1, 1, 2, 2, 2));
}

TEST(VisionConfigTest, Qwen25sAbsentKeysHaveTheDefaultsOfTransformers) {
  json config = Qwen25();
  config["text_config"]["hidden_size"] = 3584;
  config["text_config"].erase("rope_scaling");
  config["text_config"]["num_attention_heads"] = 28;
  config["vision_config"] = json::object();
  const auto read = Read(config);
  ASSERT_TRUE(read.ok()) << read.status();
  const VisionConfig& vision = *read->vision;
  EXPECT_THAT((std::vector<int64_t>{vision.width, vision.inner, vision.heads, vision.channels,
                                    vision.patch, vision.temporal_patch, vision.merge,
                                    vision.window, static_cast<int64_t>(vision.blocks.size())}),
              ElementsAre(3584, 3420, 16, 3, 14, 2, 2, 4, 32));
  for (size_t i = 0; i < 32; ++i) EXPECT_EQ(vision.blocks[i].windowed, i % 8 != 7);
}

TEST(VisionConfigTest, RefusesQwen25sByName) {
  struct Case {
    const char* key;
    json value;
  };
  for (const Case& c :
       {Case{"window_size", 7}, Case{"window_size", 0}, Case{"fullatt_block_indexes", 1},
        Case{"fullatt_block_indexes", {-1}}, Case{"fullatt_block_indexes", {"all"}}}) {
    json config = Qwen25();
    config["vision_config"][c.key] = c.value;
    const std::vector<Violation> violations = ViolationsOf(Read(config).status());
    ASSERT_EQ(violations.size(), 1u) << c.key << " " << c.value;
    EXPECT_EQ(violations[0].field, std::string("config.json:vision_config.") + c.key);
    EXPECT_EQ(violations[0].reason, "MODEL_CONFIG_INVALID");
  }
  for (const json& sections : {json{2, 3, 4}, json{2, 3, 2}, json{8}, json{9, 0, -1}}) {
    json config = Qwen25();
    config["text_config"]["rope_scaling"]["mrope_section"] = sections;
    const std::vector<Violation> violations = ViolationsOf(Read(config).status());
    ASSERT_FALSE(violations.empty()) << sections;
    EXPECT_EQ(violations[0].field, "config.json:text_config.rope_scaling.mrope_section");
  }
}

TEST(VisionConfigTest, Mistral3HasATowerAndAProjector) {
  const auto config = Read(Mistral3());
  ASSERT_TRUE(config.ok()) << config.status();
  const VisionConfig& vision = *config->vision;
  EXPECT_EQ(vision.patch_elements(), 3 * 4 * 4);
  EXPECT_EQ(vision.image_token_id, 9);
  EXPECT_EQ(vision.theta, 100.0);
  EXPECT_EQ(vision.norm_eps, 1e-5);
  EXPECT_EQ(vision.merger_eps, 1e-3);
  EXPECT_EQ(vision.style.mlp, TowerStyle::kSiluGate);
  EXPECT_TRUE(vision.row_breaks);
  const adapter::BaseModules modules = MakeModules(*config);
  EXPECT_EQ(modules.size(), config->head + 1 + 7 * 2 + 3);
  const auto find = [&](const char* name) { return modules.Find(name); };
  EXPECT_EQ(find("model.vision_tower.transformer.layers.1.attention.q_proj"), vision.blocks[1].qkv);
  EXPECT_EQ(find("model.vision_tower.transformer.layers.1.attention.v_proj"),
            vision.blocks[1].qkv + 2);
  EXPECT_EQ(find("model.vision_tower.transformer.layers.1.feed_forward.down_proj"),
            vision.blocks[1].fc2);
  const int join = find("model.multi_modal_projector.patch_merger.merging_layer");
  EXPECT_EQ(join, vision.merger.join);
  EXPECT_EQ(modules.all()[join].rows, 32);
  EXPECT_EQ(modules.all()[join].cols, 128);
  EXPECT_EQ(modules.all()[vision.merger.fc1].cols, 32);
  EXPECT_EQ(modules.all()[vision.merger.fc2].cols, 64);
  for (int id = config->head + 1; id < modules.size(); ++id) EXPECT_FALSE(vision.has_bias(id));
  ASSERT_EQ(modules.spellings().size(), 2u);
  EXPECT_EQ(modules.spellings()[0].Find("multi_modal_projector.linear_2"), modules.size() - 1);
  EXPECT_THAT(modules.not_served(), ElementsAre(::testing::Field(&adapter::BaseModule::name,
                                                                 "model.vision_tower.patch_conv")));
}

TEST(VisionConfigTest, Mistral3sAbsentKeysHaveTheDefaultsOfTransformers) {
  json config = Mistral3();
  config.erase("image_token_index");
  config["multimodal_projector_bias"] = true;
  config["vision_config"] = json::object();
  const auto read = Read(config);
  ASSERT_TRUE(read.ok()) << read.status();
  const VisionConfig& vision = *read->vision;
  EXPECT_THAT((std::vector<int64_t>{vision.width, vision.inner, vision.heads, vision.channels,
                                    vision.patch, vision.merge, vision.image_token_id,
                                    static_cast<int64_t>(vision.blocks.size())}),
              ElementsAre(1024, 4096, 16, 3, 16, 2, 10, 24));
  EXPECT_EQ(vision.style.mlp, TowerStyle::kGeluGate);
  EXPECT_TRUE(vision.has_bias(vision.merger.fc2));
  EXPECT_FALSE(vision.has_bias(vision.merger.join));
}

TEST(VisionConfigTest, PublishedConfigurationsAreRead) {
  // Qwen2.5-VL-32B-Instruct.
  const json qwen = json::parse(R"({
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
    "hidden_act": "silu", "hidden_size": 5120, "image_token_id": 151655,
    "intermediate_size": 27648, "max_position_embeddings": 128000, "max_window_layers": 64,
    "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    "tie_word_embeddings": false, "use_sliding_window": false, "video_token_id": 151656,
    "vision_start_token_id": 151652, "vocab_size": 152064,
    "vision_config": {"hidden_size": 1280, "in_chans": 3, "intermediate_size": 3456,
      "model_type": "qwen2_5_vl", "out_hidden_size": 5120, "spatial_patch_size": 14,
      "tokens_per_second": 2, "torch_dtype": "bfloat16"}})");
  // Mistral-Small-3.1-24B-Instruct-2503.
  const json mistral = json::parse(R"({
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
    "image_token_index": 10, "multimodal_projector_bias": false,
    "projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_feature_layer": -1,
    "text_config": {"attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu",
      "hidden_size": 5120, "intermediate_size": 32768, "max_position_embeddings": 131072,
      "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40,
      "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0,
      "sliding_window": null, "use_cache": true, "vocab_size": 131072},
    "vision_config": {"attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu",
      "hidden_size": 1024, "image_size": 1540, "initializer_range": 0.02,
      "intermediate_size": 4096, "model_type": "pixtral", "num_attention_heads": 16,
      "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10000.0}})");
  for (const json& config : {qwen, mistral}) {
    const auto read = Read(config);
    ASSERT_TRUE(read.ok()) << read.status();
    const VisionConfig& vision = *read->vision;
    const bool is_qwen = read->model_type == "qwen2_5_vl";
    EXPECT_EQ(vision.patch, 14);
    EXPECT_EQ(vision.output, 5120);
    EXPECT_EQ(vision.head_dim(), is_qwen ? 80 : 64);
    EXPECT_EQ(vision.patch_elements(), 14 * 14 * 3 * (is_qwen ? 2 : 1));
    EXPECT_EQ(vision.style.mlp, TowerStyle::kSiluGate);
    EXPECT_EQ(vision.num_modules(), is_qwen ? 162 : 171);
  }
}

TEST(VisionConfigTest, RefusesMistral3sByName) {
  struct Case {
    const char* key;
    json value;
    const char* reason;
  };
  for (const Case& c : {Case{"vision_config.model_type", "siglip", "MODEL_UNSUPPORTED"},
                        Case{"vision_config.hidden_act", "relu", "MODEL_UNSUPPORTED"},
                        Case{"vision_config.head_dim", 8, "MODEL_UNSUPPORTED"},
                        Case{"vision_config.num_attention_heads", 3, "MODEL_CONFIG_INVALID"},
                        Case{"vision_config.num_hidden_layers", 0, "MODEL_CONFIG_INVALID"},
                        Case{"spatial_merge_size", 0, "MODEL_CONFIG_INVALID"},
                        Case{"projector_hidden_act", "relu", "MODEL_UNSUPPORTED"},
                        Case{"vision_feature_layer", -2, "MODEL_UNSUPPORTED"},
                        Case{"vision_feature_layer", {-1, -2}, "MODEL_UNSUPPORTED"}}) {
    json config = Mistral3();
    const std::string key = c.key;
    const size_t dot = key.find('.');
    (dot == std::string::npos ? config[key] : config["vision_config"][key.substr(dot + 1)]) =
        c.value;
    const std::vector<Violation> violations = ViolationsOf(Read(config).status());
    ASSERT_EQ(violations.size(), 1u) << c.key << " " << c.value;
    EXPECT_EQ(violations[0].field, "config.json:" + key);
    EXPECT_EQ(violations[0].reason, c.reason);
  }
}

TEST(VisionConfigTest, ModulesOfTheTowerFollowTheDecoders) {
  const auto config = Read(Small());
  ASSERT_TRUE(config.ok()) << config.status();
  const VisionConfig& vision = *config->vision;
  const adapter::BaseModules modules = MakeModules(*config);
  EXPECT_EQ(modules.size(), config->head + 1 + 4 * 3 + 2 * 3);
  const auto find = [&](const char* name) { return modules.Find(name); };
  EXPECT_EQ(find("model.visual.blocks.0.attn.qkv"), config->head + 1);
  EXPECT_EQ(find("model.visual.blocks.2.attn.proj"), vision.blocks[2].proj);
  EXPECT_EQ(find("model.visual.blocks.2.mlp.linear_fc1"), vision.blocks[2].fc1);
  EXPECT_EQ(find("model.visual.merger.linear_fc2"), vision.merger.fc2);
  const int last = find("model.visual.deepstack_merger_list.1.linear_fc2");
  EXPECT_EQ(last, modules.size() - 1);
  EXPECT_EQ(modules.all()[last].rows, 64);
  EXPECT_EQ(modules.all()[last].cols, 128);
  EXPECT_EQ(modules.all()[last].layer, 1);
  EXPECT_EQ(modules.all()[vision.blocks[2].qkv].rows, 96);
  ASSERT_EQ(modules.spellings().size(), 2u);
  for (const adapter::BaseModules& spelling : modules.spellings()) {
    EXPECT_EQ(spelling.Find("visual.deepstack_merger_list.1.linear_fc2"), last);
  }
  ASSERT_EQ(modules.not_served().size(), 2u);
  for (const adapter::BaseModule& module : modules.not_served()) {
    EXPECT_EQ(module.kind, adapter::ModuleKind::kEmbedding);
  }
  EXPECT_FALSE(config->IsOfOtherPart("model.visual.pos_embed.weight"));
}

TEST(VisionConfigTest, ADroppedTowerIsAPartThatIsNotServed) {
  auto config = Read(Small());
  ASSERT_TRUE(config.ok()) << config.status();
  config->DropVision();
  const adapter::BaseModules modules = MakeModules(*config);
  EXPECT_EQ(modules.size(), config->head + 1);
  EXPECT_EQ(modules.not_served().size(), 4u * 3 + 2 * 3 + 2);
  for (const adapter::BaseModule& module : modules.not_served()) {
    EXPECT_EQ(module.kind, adapter::ModuleKind::kLinear);
  }
  for (const char* const tensor : {"visual.pos_embed.weight", "model.visual.pos_embed.weight"}) {
    EXPECT_TRUE(config->IsOfOtherPart(tensor));
  }
}

TEST(VisionConfigTest, ADroppedProjectorIsAPartThatIsNotServed) {
  auto config = Read(Mistral3());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_FALSE(config->IsOfOtherPart("multi_modal_projector.linear_1.weight"));
  config->DropVision();
  EXPECT_EQ(MakeModules(*config).not_served().size(), 7u * 2 + 3 + 1);
  for (const char* const tensor :
       {"vision_tower.patch_conv.weight", "model.multi_modal_projector.linear_1.weight"}) {
    EXPECT_TRUE(config->IsOfOtherPart(tensor));
  }
}

TEST(VisionPlacesTest, PatchesOfATokenFollowEachOther) {
  VisionConfig vision;
  vision.merge = 2;
  std::vector<std::pair<int64_t, int64_t>> places;
  for (const PatchPlace& place : PatchPlaces(vision, {1, 2, 4})) {
    places.emplace_back(place.row, place.column);
  }
  EXPECT_THAT(places, ElementsAre(Pair(0, 0), Pair(0, 1), Pair(1, 0), Pair(1, 1), Pair(0, 2),
                                  Pair(0, 3), Pair(1, 2), Pair(1, 3)));
}

TEST(VisionPlacesTest, WindowsAreCutAtTheFramesEdges) {
  VisionConfig vision;
  vision.merge = 2;
  vision.style.windows = true;
  vision.window = 2;
  // Tokens 0 to 14 in 3 rows of 5.
  const FrameWindows windows = WindowsOf(vision, {1, 6, 10});
  EXPECT_THAT(windows.tokens, ElementsAre(0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14));
  EXPECT_THAT(windows.patches, ElementsAre(16, 16, 8, 8, 8, 4));
  // A whole number of windows has no empty ones.
  EXPECT_THAT(WindowsOf(vision, {1, 4, 4}).patches, ElementsAre(16));
  vision.style.windows = false;
  EXPECT_THAT(WindowsOf(vision, {1, 4, 4}).tokens, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(WindowsOf(vision, {1, 4, 6}).patches, ElementsAre(24));
}

TEST(VisionPlacesTest, TheTablesCornersLieOnTheFrames) {
  VisionConfig vision;
  vision.table_side = 4;
  const ImageGrid grid{1, 3, 5};
  // Row 1 of 3 is 1.5 of the table's 4, column 1 of 5 is 0.75.
  const TableTaps inside = TapsOf(vision, grid, {1, 1});
  EXPECT_THAT(inside.rows, ElementsAre(4, 5, 8, 9));
  EXPECT_THAT(inside.weights, ElementsAre(0.125f, 0.375f, 0.125f, 0.375f));
  const TableTaps corner = TapsOf(vision, grid, {2, 4});
  EXPECT_EQ(corner.rows[0], 15);
  EXPECT_THAT(corner.weights, ElementsAre(1.0f, 0.0f, 0.0f, 0.0f));
  EXPECT_LT(corner.rows[3], 16);
  EXPECT_EQ(TapsOf(vision, {1, 1, 1}, {0, 0}).rows[0], 0);
}

TEST(VisionPlacesTest, HalfOfTheAnglesTurnByTheRow) {
  VisionConfig vision;
  vision.width = 16;
  vision.heads = 2;
  vision.theta = 100.0;
  float cos[4], sin[4];
  FillPatchAngles(vision, {2, 3}, cos, sin);
  const float angles[] = {2.0f, 0.2f, 3.0f, 0.3f};
  for (int i = 0; i < 4; ++i) {
    EXPECT_NEAR(cos[i], std::cos(angles[i]), 1e-6);
    EXPECT_NEAR(sin[i], std::sin(angles[i]), 1e-6);
  }
}

TEST(VisionPlacesTest, RowsAndColumnsMayTakeFrequenciesByTurns) {
  VisionConfig vision;
  vision.width = 8;
  vision.heads = 1;
  vision.theta = 10000.0;
  vision.style.axes_by_turns = true;
  float cos[4], sin[4];
  FillPatchAngles(vision, {2, 3}, cos, sin);
  const float angles[] = {2.0f, 0.02f, 0.3f, 0.003f};
  for (int i = 0; i < 4; ++i) {
    EXPECT_NEAR(cos[i], std::cos(angles[i]), 1e-6);
    EXPECT_NEAR(sin[i], std::sin(angles[i]), 1e-6);
  }
}

}  // namespace
}  // namespace dorad::model
