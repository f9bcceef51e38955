#include "tests/bench/model_shapes.h"

#include "tests/unit/support/test.h"

namespace dorad::bench {
namespace {

model::ModelConfig MustRead(const std::string& name, int64_t layers = 0) {
  const absl::StatusOr<model::ModelConfig> config = ReadModelShape(name, layers);
  EXPECT_TRUE(config.ok()) << config.status();
  return config.value_or(model::ModelConfig());
}

std::vector<int64_t> Windows(const model::ModelConfig& config) {
  std::vector<int64_t> windows;
  for (const model::LayerSpec& layer : config.layers) windows.push_back(layer.attention.window);
  return windows;
}

// Of a DoRA adapter on every linear of the layers: factors and magnitudes.
int64_t AdapterParameters(const model::ModelConfig& config, int64_t rank) {
  int64_t parameters = 0;
  const adapter::BaseModules modules = MakeModules(config);
  for (const adapter::BaseModule& module : modules.all()) {
    if (module.layer >= 0) parameters += rank * (module.rows + module.cols) + module.rows;
  }
  return parameters;
}

TEST(ModelShapesTest, TheServerReadsEveryShape) {
  for (const std::string& name : ModelShapeNames()) {
    EXPECT_GT(MustRead(name).num_layers(), 1) << name;
    EXPECT_EQ(MustRead(name, 4).num_layers(), 4) << name;
  }
}

// The paper's models: how many linears they have, and how many parameters, in millions, its
// adapters of rank 384 have (Qwen3.5-27B: as transformers has it). Any size of a layer that is
// wrong shows here.
TEST(ModelShapesTest, AdaptersOfThePapersModelsHaveTheSizesItReports) {
  struct Known {
    const char* name;
    int64_t linears;
    int64_t millions;
  };
  for (const Known& known : {Known{"qwen2.5-vl-32b", 448, 3226}, Known{"qwen3-vl-32b", 448, 3226},
                             Known{"gemma3-27b", 434, 2728}, Known{"mistral-small-24b", 280, 2221},
                             Known{"qwen3-vl-8b", 252, 1049}, Known{"qwen3.5-27b", 496, 2805}}) {
    const model::ModelConfig config = MustRead(known.name);
    EXPECT_EQ(config.embedding, known.linears) << known.name;
    EXPECT_EQ((AdapterParameters(config, 384) + 500'000) / 1'000'000, known.millions) << known.name;
  }
}

// Linears as PEFT's all-linear finds them.
TEST(ModelShapesTest, ATowerIsPartOfTheWholeModel) {
  struct Known {
    const char* name;
    int64_t linears;
    int64_t head_dim;
    bool three_positions;
  };
  for (const Known& known :
       {Known{"qwen3-vl-8b", 116, 72, true}, Known{"qwen3-vl-32b", 116, 72, true},
        Known{"qwen2.5-vl-32b", 162, 80, true}, Known{"mistral-small-24b", 171, 64, false},
        Known{"qwen3.5-27b", 110, 72, true}, Known{"gemma3-27b", 162, 72, false}}) {
    SCOPED_TRACE(known.name);
    const absl::StatusOr<model::ModelConfig> config = ReadModelShape(known.name, 4, /*tower=*/true);
    ASSERT_TRUE(config.ok()) << config.status();
    ASSERT_TRUE(config->vision.has_value());
    EXPECT_EQ(config->vision->num_modules(), known.linears);
    EXPECT_EQ(config->vision->head_dim(), known.head_dim);
    EXPECT_EQ(config->ropes[0].axes.empty(), !known.three_positions);
    EXPECT_EQ(config->num_layers(), 4);
  }
  EXPECT_FALSE(ReadModelShape("qwen3-8b", 1, /*tower=*/true).ok());
}

TEST(ModelShapesTest, FamiliesDifferInBiasesNormsAndWindows) {
  EXPECT_TRUE(MustRead("qwen2.5-vl-32b", 1).layers[0].attention.qkv_bias);
  EXPECT_FALSE(MustRead("qwen2.5-vl-32b", 1).layers[0].attention.qk_norm);
  EXPECT_TRUE(MustRead("qwen3-vl-32b", 1).layers[0].attention.qk_norm);
  EXPECT_FALSE(MustRead("mistral-small-24b", 1).layers[0].attention.qkv_bias);
  EXPECT_FALSE(MustRead("mistral-small-24b", 1).layers[0].attention.qk_norm);
  EXPECT_THAT(Windows(MustRead("mistral-small-24b")), Each(0));
  const model::ModelConfig gemma = MustRead("gemma3-27b", 6);
  EXPECT_TRUE(gemma.tied_embeddings && gemma.norms_add_one);
  EXPECT_TRUE(gemma.layers[0].output_norms && gemma.layers[0].attention.qk_norm);
  EXPECT_EQ(gemma.ropes[gemma.layers[0].attention.rope].theta, 10000.0);
  EXPECT_EQ(gemma.ropes[gemma.layers[5].attention.rope].factor, 8.0);
}

TEST(ModelShapesTest, LayerTypesRepeat) {
  EXPECT_THAT(Windows(MustRead("gemma3-27b", 8)),
              ElementsAre(1024, 1024, 1024, 1024, 1024, 0, 1024, 1024));
  const std::vector<int64_t> windows = Windows(MustRead("gemma3-27b"));
  EXPECT_EQ(std::count(windows.begin(), windows.end(), 0), 10);
}

TEST(ModelShapesTest, AnUnknownNameIsAnsweredWithThoseThereAre) {
  const absl::Status status = ReadModelShape("qwen3-9b", 0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("qwen3-8b"));
}

}  // namespace
}  // namespace dorad::bench
