#include "server/backends/cpu/vision_encoder.h"

#include "tests/unit/cpu/model_fixture.h"

namespace dorad::model {
namespace {

// A tower of two blocks, both of which are merged.
ModelConfig WithTower() {
  ModelConfig config = Config();
  config.spellings = {{"model.", "lm_head", "model.visual."}};
  VisionConfig vision;
  vision.width = 16;
  vision.inner = 24;
  vision.heads = 2;
  vision.output = config.hidden_size;
  vision.channels = 1;
  vision.patch = 2;
  vision.temporal_patch = 2;
  vision.merge = 2;
  vision.table_side = 3;
  vision.deepstack = {0, 1};
  vision.blocks.resize(2);
  vision.deepstack_mergers.resize(2);
  config.vision = vision;
  config.NumberModules();
  return config;
}

// The same with windows of one token in the first block, root-mean-square norms and gates.
ModelConfig WithWindows() {
  ModelConfig config = WithTower();
  VisionConfig& vision = *config.vision;
  vision.style = {.rms_norms = true,
                  .mlp = TowerStyle::kSiluGate,
                  .patch_bias = false,
                  .position_table = false,
                  .windows = true};
  vision.names.up = ".mlp.up";
  vision.window = 1;
  vision.deepstack.clear();
  vision.deepstack_mergers.clear();
  vision.blocks[0].windowed = true;
  config.NumberModules();
  return config;
}

TestTensor Random(const std::vector<int64_t>& shape) {
  const at::Tensor values = at::randn(shape) * 0.3;
  const float* data = values.const_data_ptr<float>();
  return MakeTensor("F32", shape, std::vector<float>(data, data + values.numel()));
}

Tensors TowerCheckpoint(const ModelConfig& config) {
  at::manual_seed(1);
  Tensors tensors = Checkpoint(config, "F32");
  const std::string tower = "model.visual.";
  const adapter::BaseModules modules = MakeModules(config);
  for (int id = config.head + 1; id < modules.size(); ++id) {
    const adapter::BaseModule& module = modules.all()[id];
    tensors[module.name + ".weight"] = Random({module.rows, module.cols});
    tensors[module.name + ".bias"] = Random({module.rows});
  }
  tensors[tower + "patch_embed.proj.weight"] = Random({16, 1, 2, 2, 2});
  const TowerStyle& style = config.vision->style;
  if (style.patch_bias) tensors[tower + "patch_embed.proj.bias"] = Random({16});
  if (style.position_table) tensors[tower + "pos_embed.weight"] = Random({9, 16});
  std::map<std::string, int64_t> norms = {{"blocks.0.norm1", 16},
                                          {"blocks.0.norm2", 16},
                                          {"blocks.1.norm1", 16},
                                          {"blocks.1.norm2", 16},
                                          {"merger.norm", 16}};
  for (size_t i = 0; i < config.vision->deepstack.size(); ++i) {
    norms[absl::StrCat("deepstack_merger_list.", i, ".norm")] = 64;
  }
  for (const auto& [name, size] : norms) {
    tensors[tower + name + ".weight"] = Random({size});
    if (!style.rms_norms) tensors[tower + name + ".bias"] = Random({size});
  }
  return tensors;
}

at::Tensor Pixels(const ModelConfig& config, const ImageGrid& grid) {
  return at::randn({config.vision->patches(grid), config.vision->patch_elements()});
}

TEST(VisionEncoderTest, EveryTensorOfTheTowerIsNeeded) {
  const ModelConfig config = WithTower();
  Tensors tensors = TowerCheckpoint(config);
  ASSERT_TRUE(Load(tensors, config).ok());
  for (const char* const name :
       {"model.visual.blocks.1.attn.qkv.bias", "model.visual.merger.norm.bias",
        "model.visual.pos_embed.weight", "model.visual.patch_embed.proj.weight"}) {
    Tensors fewer = tensors;
    fewer.erase(name);
    EXPECT_THAT(ViolationsOf(Load(fewer, config).status()),
                ElementsAre(Blames(name, "MODEL_TENSOR_MISSING")));
  }
}

TEST(VisionEncoderTest, ADroppedTowerIsNotHeld) {
  ModelConfig config = WithTower();
  const Tensors tensors = TowerCheckpoint(config);
  const Loaded whole = Load(tensors, config);
  config.DropVision();
  const Loaded text = Load(tensors, config);
  ASSERT_TRUE(whole.ok() && text.ok()) << text.status();
  EXPECT_GT((*whole)->bytes(), (*text)->bytes());
  EXPECT_EQ((*whole)->digest(), (*text)->digest());
}

TEST(VisionEncoderTest, FramesDoNotSeeEachOther) {
  const ModelConfig config = WithTower();
  const Loaded model = Load(TowerCheckpoint(config), config);
  ASSERT_TRUE(model.ok()) << model.status();
  const VisionEncoder encoder(**model);
  const ImageGrid grid{2, 4, 10};
  const at::Tensor pixels = Pixels(config, grid);
  const at::Tensor both = encoder.Encode(pixels, grid, nullptr);
  ASSERT_EQ(both.sizes(), at::IntArrayRef({3, 20, 8}));
  for (int64_t frame = 0; frame < 2; ++frame) {
    const at::Tensor alone =
        encoder.Encode(pixels.narrow(0, frame * 40, 40).contiguous(), {1, 4, 10}, nullptr);
    EXPECT_TRUE(at::equal(alone, both.narrow(1, frame * 10, 10)));
  }
}

TEST(VisionEncoderTest, ABlockWithWindowsSeesItsWindowOnly) {
  ModelConfig config = WithWindows();
  const Tensors tensors = TowerCheckpoint(config);
  const ImageGrid grid{1, 4, 6};
  const at::Tensor pixels = Pixels(config, grid);
  at::Tensor changed = pixels.clone();
  changed[9].add_(1.0);  // of the third token of six
  const auto differs = [&]() {
    const Loaded model = Load(tensors, config);
    EXPECT_TRUE(model.ok()) << model.status();
    const VisionEncoder encoder(**model);
    const at::Tensor difference =
        encoder.Encode(changed, grid, nullptr) - encoder.Encode(pixels, grid, nullptr);
    const at::Tensor tokens = difference[0].abs().amax(-1).gt(0).to(at::kInt);
    return std::vector<int32_t>(tokens.const_data_ptr<int32_t>(),
                                tokens.const_data_ptr<int32_t>() + tokens.numel());
  };
  EXPECT_THAT(differs(), Each(1));
  config.vision->blocks[1].windowed = true;
  EXPECT_THAT(differs(), ElementsAre(0, 0, 1, 0, 0, 0));
}

TEST(VisionEncoderTest, WindowsOfOneFrameDoNotReachIntoTheNext) {
  const ModelConfig config = WithWindows();
  const Loaded model = Load(TowerCheckpoint(config), config);
  ASSERT_TRUE(model.ok()) << model.status();
  const VisionEncoder encoder(**model);
  const ImageGrid grid{2, 4, 6};
  const at::Tensor pixels = Pixels(config, grid);
  const at::Tensor both = encoder.Encode(pixels, grid, nullptr);
  const at::Tensor second =
      encoder.Encode(pixels.narrow(0, 24, 24).contiguous(), {1, 4, 6}, nullptr);
  EXPECT_TRUE(at::equal(second, both.narrow(1, 6, 6)));
}

TEST(VisionEncoderTest, EveryPatchOfAFrameIsSeenByEveryToken) {
  const ModelConfig config = WithTower();
  const Loaded model = Load(TowerCheckpoint(config), config);
  ASSERT_TRUE(model.ok()) << model.status();
  const VisionEncoder encoder(**model);
  const ImageGrid grid{1, 6, 4};
  const at::Tensor pixels = Pixels(config, grid);
  const at::Tensor before = encoder.Encode(pixels, grid, nullptr);
  for (const int64_t patch : {0, 23}) {
    at::Tensor changed = pixels.clone();
    changed[patch].add_(1.0);
    const at::Tensor after = encoder.Encode(changed, grid, nullptr);
    EXPECT_TRUE((after - before).abs().amax(-1).gt(0).all().item<bool>()) << patch;
  }
}

TEST(VisionEncoderTest, AnAdapterActsOnItsModuleOnly) {
  const ModelConfig config = WithTower();
  const Loaded model = Load(TowerCheckpoint(config), config);
  ASSERT_TRUE(model.ok()) << model.status();
  const VisionEncoder encoder(**model);
  const ImageGrid grid{1, 4, 4};
  const at::Tensor pixels = Pixels(config, grid);
  const at::Tensor base = encoder.Encode(pixels, grid, nullptr);
  adapter::CpuAdapterWeights weights;
  weights.modules.resize((*model)->modules().size());
  EXPECT_TRUE(at::equal(encoder.Encode(pixels, grid, &weights), base));
  weights.modules[config.vision->deepstack_mergers[1].fc2] = ops::AdapterFactors{
      at::randn({2, 64}), at::randn({8, 2}), at::rand({8}) + 0.5, /*scale=*/0.5f};
  const at::Tensor adapted = encoder.Encode(pixels, grid, &weights);
  EXPECT_TRUE(at::equal(adapted.narrow(0, 0, 2), base.narrow(0, 0, 2)));
  EXPECT_GT((adapted[2] - base[2]).abs().max().item<float>(), 0.1f);
}

}  // namespace
}  // namespace dorad::model
