// Models with gated delta-nets: their configurations, and the place of a state in pages.

#include <set>

#include "server/model/delta_config.h"
#include "tests/unit/support/model_folder.h"

namespace dorad::model {
namespace {

using nlohmann::json;

// Qwen3.5-27B's published text.
json Published() {
  return {{"model_type", "qwen3_5_text"},
          {"architectures", {"Qwen3_5ForCausalLM"}},
          {"vocab_size", 248320},
          {"hidden_size", 5120},
          {"intermediate_size", 17408},
          {"num_hidden_layers", 64},
          {"num_attention_heads", 24},
          {"num_key_value_heads", 4},
          {"head_dim", 256},
          {"linear_num_key_heads", 16},
          {"linear_num_value_heads", 48},
          {"linear_key_head_dim", 128},
          {"linear_value_head_dim", 128},
          {"linear_conv_kernel_dim", 4},
          {"full_attention_interval", 4},
          {"rope_parameters",
           {{"rope_theta", 1e7},
            {"partial_rotary_factor", 0.25},
            {"mrope_section", {11, 11, 10}},
            {"mrope_interleaved", true}}}};
}

absl::StatusOr<ModelConfig> Read(const json& config) {
  const ModelFolder folder;
  folder.Write("config.json", config);
  return ReadModelConfig(folder.path());
}

TEST(DeltaTest, ReadsThePublishedConfiguration) {
  const auto config = Read(Published());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->num_delta_layers(), 48);
  EXPECT_EQ(config->num_attention_layers(), 16);
  EXPECT_FALSE(config->layers[3].delta);
  EXPECT_TRUE(config->layers[3].attention.output_gate);
  EXPECT_EQ(config->ropes[0].width, 64);
  EXPECT_EQ(config->delta.qkv_size(), 2 * 16 * 128 + 48 * 128);
  const auto modules = ListModules(*config, config->spellings.front());
  EXPECT_EQ(modules[config->layers[0].delta->qkv].name, "model.layers.0.linear_attn.in_proj_qkv");
  EXPECT_EQ(modules[config->layers[3].attention.q].rows, 2 * 24 * 256);
}

TEST(DeltaTest, LayersHaveTheKindsThatAreGiven) {
  json config = Published();
  config["num_hidden_layers"] = 3;
  config["layer_types"] = {"full_attention", "linear_attention", "linear_attention"};
  const auto read = Read(config);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_FALSE(read->layers[0].delta);
  EXPECT_TRUE(read->layers[1].delta && read->layers[2].delta);
}

TEST(DeltaTest, RefusesImpossibleSizesByName) {
  struct Case {
    const char* key;
    json value;
    const char* reason;
  };
  for (const Case& c :
       {Case{"linear_num_value_heads", 47, "MODEL_CONFIG_INVALID"},
        Case{"linear_conv_kernel_dim", 1, "MODEL_CONFIG_INVALID"},
        Case{"linear_key_head_dim", 0, "MODEL_CONFIG_INVALID"},
        Case{"layer_types", json::array({"full_attention"}), "MODEL_CONFIG_INVALID"},
        Case{"layer_types", json::array_t(64, "sliding_attention"), "MODEL_UNSUPPORTED"},
        Case{"layer_types", json::array_t(64, "linear_attention"), "MODEL_UNSUPPORTED"}}) {
    json config = Published();
    config[c.key] = c.value;
    const std::vector<Violation> violations = ViolationsOf(Read(config).status());
    ASSERT_EQ(violations.size(), 1u) << c.key;
    EXPECT_EQ(violations[0].field, std::string("config.json:") + c.key);
    EXPECT_EQ(violations[0].reason, c.reason);
  }
}

TEST(DeltaTest, AStateFillsWholeBlocksOfItsPages) {
  const auto config = Read(Published());
  ASSERT_TRUE(config.ok());
  // In bf16: the keys of 16 tokens in a layer are as large as the state of a head.
  const DeltaStateLayout layout(*config, 16 * 4 * 256 * 2, 2 * 16, 2);
  EXPECT_EQ(layout.tile(), 64);
  EXPECT_EQ(layout.state_blocks(), 48 * 2);
  EXPECT_EQ(layout.net_blocks(), 48 * 2 + 2);
  EXPECT_EQ(layout.pages(), 48 * (48 * 2 + 2) / 32);
}

TEST(DeltaTest, NoTwoPartsOfAStateShareABlock) {
  const auto config = Read(Published());
  ASSERT_TRUE(config.ok());
  for (const int64_t block_bytes : {512, 7 * 512, 65536}) {
    for (const int64_t blocks : {2, 32}) {
      const DeltaStateLayout layout(*config, block_bytes, blocks, 4);
      std::set<std::pair<int64_t, int64_t>> seen;
      const auto add = [&](DeltaStateLayout::Block block) {
        EXPECT_LT(block.page, layout.pages());
        EXPECT_LT(block.block, blocks);
        EXPECT_TRUE(seen.emplace(block.page, block.block).second);
      };
      for (int64_t net = 0; net < 48; ++net) {
        for (int64_t i = 0; i < layout.net_blocks(); ++i) add(layout.BlockAt(net, i));
      }
      EXPECT_EQ(layout.tile() * layout.state_blocks(), 48 * 128);
      EXPECT_LE(layout.tile() * 128 * 4, block_bytes);
    }
  }
}

}  // namespace
}  // namespace dorad::model
