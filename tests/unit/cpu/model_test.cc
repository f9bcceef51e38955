#include "server/backends/cpu/model.h"

#include "tests/unit/cpu/model_fixture.h"

namespace dorad::model {
namespace {

TEST(ModelWeightsTest, EveryTensorGoesToItsPlace) {
  ModelConfig config = Config();
  for (LayerSpec& layer : config.layers) {
    layer.attention.qkv_bias = layer.attention.output_bias = layer.attention.qk_norm = true;
    layer.mlp.bias = true;
  }
  const Tensors tensors = Checkpoint(config, "F32");
  const Loaded loaded = Load(tensors, config);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const LoadedModel& model = **loaded;
  const auto expect = [&](const at::Tensor& tensor, const std::string& name) {
    ASSERT_TRUE(tensor.defined()) << name;
    EXPECT_TRUE(at::equal(tensor, Values(tensors.at(name)))) << name;
  };
  for (int i = 0; i < 2; ++i) {
    const LayerWeights& layer = model.weights().layers[i];
    const std::string prefix = "model.layers." + std::to_string(i) + ".";
    const std::pair<const ops::BaseLinear*, const char*> linears[] = {
        {&layer.q, "self_attn.q_proj"}, {&layer.k, "self_attn.k_proj"},
        {&layer.v, "self_attn.v_proj"}, {&layer.o, "self_attn.o_proj"},
        {&layer.gate, "mlp.gate_proj"}, {&layer.up, "mlp.up_proj"},
        {&layer.down, "mlp.down_proj"}};
    for (const auto& [linear, name] : linears) {
      expect(linear->weight_OI, prefix + name + ".weight");
      expect(linear->bias_O, prefix + name + ".bias");
    }
    expect(layer.attention_norm, prefix + "input_layernorm.weight");
    expect(layer.mlp_norm, prefix + "post_attention_layernorm.weight");
    expect(layer.q_norm, prefix + "self_attn.q_norm.weight");
    expect(layer.k_norm, prefix + "self_attn.k_norm.weight");
  }
  expect(model.weights().embedding_VD, kEmbedding);
  expect(model.weights().head.weight_OI, kHead);
  expect(model.weights().final_norm, kNorm);
  for (int id = 0; id < model.modules().size(); ++id) {
    expect(model.Weight(id), model.modules().all()[id].name + ".weight");
  }
}

TEST(ModelWeightsTest, StorageFollowsFileAndComputeDtype) {
  struct Case {
    const char* file;
    ComputeDType compute;
    at::ScalarType matrix, checkpoint;
  };
  for (const Case& c : {Case{"F32", ComputeDType::kF32, at::kFloat, at::kFloat},
                        Case{"F16", ComputeDType::kF32, at::kFloat, at::kHalf},
                        Case{"BF16", ComputeDType::kF32, at::kBFloat16, at::kBFloat16},
                        Case{"F32", ComputeDType::kBF16, at::kBFloat16, at::kFloat},
                        Case{"F16", ComputeDType::kBF16, at::kBFloat16, at::kHalf},
                        Case{"BF16", ComputeDType::kBF16, at::kBFloat16, at::kBFloat16}}) {
    const Tensors tensors = Checkpoint(Config(), c.file);
    const Loaded loaded = Load(tensors, Config(), c.compute);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    const ModelWeights& weights = (*loaded)->weights();
    EXPECT_EQ(weights.layers[1].up.weight_OI.scalar_type(), c.matrix);
    EXPECT_EQ(weights.embedding_VD.scalar_type(), c.matrix);
    EXPECT_EQ(weights.final_norm.scalar_type(), at::kFloat);
    EXPECT_FALSE(weights.layers[0].q.bias_O.defined());
    EXPECT_EQ((*loaded)->CheckpointDtype(Config().embedding), c.checkpoint);
    EXPECT_TRUE(at::equal(weights.layers[1].up.weight_OI.to(at::kFloat), Values(tensors.at(kUp))));
  }
}

TEST(ModelWeightsTest, ConvertsAcrossBlocks) {
  ModelConfig config = Config();
  config.vocab_size = 100003;  // several blocks, the last one not full
  const Tensors tensors = Checkpoint(config, "F16");
  const Loaded loaded = Load(tensors, config);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_TRUE(at::equal((*loaded)->weights().embedding_VD, Values(tensors.at(kEmbedding))));
}

TEST(ModelWeightsTest, TiedHeadSharesStorageAndIsCountedOnce) {
  ModelConfig config = Config();
  config.tied_embeddings = true;
  const Tensors tensors = Checkpoint(config, "BF16");
  const Loaded loaded = Load(tensors, config);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const LoadedModel& model = **loaded;
  EXPECT_EQ(model.weights().head.weight_OI.data_ptr(), model.weights().embedding_VD.data_ptr());
  EXPECT_EQ(model.CheckpointDtype(config.head), at::kBFloat16);
  int64_t elements = 0;
  for (const auto& [name, tensor] : tensors) elements += Values(tensor).numel();
  EXPECT_EQ(model.num_parameters(), elements);
  EXPECT_EQ(model.bytes(), 2 * elements + 2 * 5 * config.hidden_size);  // norms are fp32
}

TEST(ModelWeightsTest, AStoredTiedHeadMustBeTheEmbedding) {
  ModelConfig config = Config();
  config.tied_embeddings = true;
  Tensors tensors = Checkpoint(config, "F32");
  tensors[kHead] = tensors[kEmbedding];
  EXPECT_TRUE(Load(tensors, config).ok());
  tensors[kHead].bytes[5] ^= std::byte{1};
  EXPECT_THAT(ViolationsOf(Load(tensors, config).status()),
              UnorderedElementsAre(Blames(kHead, "MODEL_TENSOR_UNEXPECTED")));
}

TEST(ModelWeightsTest, IgnoresRotaryBuffers) {
  Tensors tensors = Checkpoint(Config(), "F32");
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = Fill("F32", {2}, 1);
  EXPECT_TRUE(Load(tensors).ok());
}

TEST(ModelWeightsTest, ListsEveryWrongTensor) {
  Tensors tensors = Checkpoint(Config(), "F32");
  tensors.erase(kHead);
  tensors.erase(kNorm);
  tensors[kUp] = Fill("F32", {8, 5}, 1);
  tensors["model.layers.1.self_attn.q_proj.bias"] = Fill("F32", {8}, 1);
  tensors["model.layers.2.input_layernorm.weight"] = Fill("F32", {8}, 1);
  const absl::Status status = Load(tensors).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(ViolationsOf(status),
              UnorderedElementsAre(
                  Blames(kHead, "MODEL_TENSOR_MISSING"), Blames(kNorm, "MODEL_TENSOR_MISSING"),
                  Blames(kUp, "MODEL_TENSOR_SHAPE"),
                  Blames("model.layers.1.self_attn.q_proj.bias", "MODEL_TENSOR_UNEXPECTED"),
                  Blames("model.layers.2.input_layernorm.weight", "MODEL_TENSOR_UNEXPECTED")));
}

TEST(ModelWeightsTest, FindsNonFiniteElementsAnywhere) {
  for (const std::string dtype : {"F32", "F16", "BF16"}) {
    // 40 elements in up_proj, 8 in the norm: full words, and with 5 elements a rest.
    for (const size_t position : {0, 1, 38, 39}) {
      for (const float value : {kInf, -kInf, std::numeric_limits<float>::quiet_NaN()}) {
        Tensors tensors = Checkpoint(Config(), dtype);
        std::vector<float> values(40, -1.0f);
        values[position] = value;
        tensors[kUp] = MakeTensor(dtype, {5, 8}, values);
        EXPECT_THAT(ViolationsOf(Load(tensors).status()),
                    UnorderedElementsAre(Blames(kUp, "MODEL_TENSOR_NOT_FINITE")))
            << dtype << " " << position << " " << value;
      }
    }
  }
  ModelConfig biased = Config();
  for (LayerSpec& layer : biased.layers) layer.mlp.bias = true;
  Tensors tensors = Checkpoint(biased, "BF16");
  constexpr char kBias[] = "model.layers.0.mlp.gate_proj.bias";
  tensors[kBias] = MakeTensor("BF16", {5}, {1, 2, 3, 4, kInf});
  EXPECT_THAT(ViolationsOf(Load(tensors, biased).status()),
              UnorderedElementsAre(Blames(kBias, "MODEL_TENSOR_NOT_FINITE")));
}

TEST(ModelWeightsTest, TheLargestFiniteNumbersAreFine) {
  const float largest = std::numeric_limits<float>::max();
  Tensors tensors = Checkpoint(Config(), "F32");
  tensors[kUp] = MakeTensor("F32", {5, 8}, std::vector<float>(40, -largest));
  EXPECT_TRUE(Load(tensors).ok());
  // bf16 has nothing that large.
  EXPECT_THAT(ViolationsOf(Load(tensors, Config(), ComputeDType::kBF16).status()),
              UnorderedElementsAre(Blames(kUp, "MODEL_TENSOR_NOT_FINITE")));
}

TEST(ModelWeightsTest, DigestFollowsContentNotFiles) {
  Tensors tensors = Checkpoint(Config(), "F32");
  const std::string digest = (*Load(tensors))->digest();
  EXPECT_EQ(digest.size(), 64);
  EXPECT_EQ((*Load(tensors, Config(), ComputeDType::kBF16))->digest(), digest);

  const ModelFolder folder;
  Tensors shards[2];
  json weight_map;
  for (const auto& [name, tensor] : tensors) {
    const int shard = static_cast<int>(weight_map.size()) % 2;
    shards[shard][name] = tensor;
    weight_map[name] = shard == 0 ? "a.safetensors" : "b.safetensors";
  }
  folder.Write("a.safetensors", WriteSafetensors(shards[0]));
  folder.Write("b.safetensors", WriteSafetensors(shards[1]));
  folder.Write(kIndex, json{{"weight_map", weight_map}});
  const Loaded sharded = LoadFrom(folder);
  ASSERT_TRUE(sharded.ok()) << sharded.status();
  EXPECT_EQ((*sharded)->digest(), digest);
  EXPECT_TRUE(at::equal((*sharded)->weights().layers[1].up.weight_OI, Values(tensors.at(kUp))));

  tensors[kUp].bytes[0] ^= std::byte{1};
  EXPECT_NE((*Load(tensors))->digest(), digest);
}

TEST(ModelWeightsTest, FolderWithoutWeightsIsNotFound) {
  const ModelFolder folder;
  EXPECT_EQ(ReasonOf(LoadFrom(folder).status()), "MODEL_NOT_FOUND");
  folder.Write("pytorch_model.bin", std::string("pickle"));
  EXPECT_EQ(ReasonOf(LoadFrom(folder).status()), "MODEL_FORMAT_UNSUPPORTED");
}

TEST(ModelWeightsTest, RefusesATruncatedFile) {
  const ModelFolder folder;
  ByteBuffer image = WriteSafetensors(Checkpoint(Config(), "F32"));
  image.pop_back();
  folder.Write(kSingle, image);
  const absl::Status status = LoadFrom(folder).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(ReasonOf(status), StartsWith("SAFETENSORS_"));
  folder.Write(kSingle, std::string("1234"));
  EXPECT_THAT(ReasonOf(LoadFrom(folder).status()), StartsWith("SAFETENSORS_"));
}

TEST(ModelWeightsTest, SquaredNormsAreKeptAndFollowTheModulesAxis) {
  const Tensors tensors = Checkpoint(Config(), "BF16");
  const Loaded loaded = Load(tensors);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  LoadedModel& model = **loaded;
  EXPECT_EQ(model.norm_cache_entries(), 0);
  const int embedding = Config().embedding;
  const int head = Config().head;
  EXPECT_TRUE(
      at::allclose(model.SquaredNorms(embedding), Values(tensors.at(kEmbedding)).square().sum(0)));
  EXPECT_TRUE(at::allclose(model.SquaredNorms(head), Values(tensors.at(kHead)).square().sum(1)));
  EXPECT_EQ(model.SquaredNorms(head).data_ptr(), model.SquaredNorms(head).data_ptr());
  EXPECT_EQ(model.norm_cache_entries(), 2);
  EXPECT_EQ(model.norm_cache_bytes(), 4 * (8 + 6));
}

// The tensor as the layout says it lies in memory, in fp32; undefined where it is not held.
at::Tensor InMemory(const LoadedModel& model, const LaidOutTensor& tensor) {
  if (!tensor.place) return {};
  const auto type = tensor.place->dtype == DType::kF32 ? at::kFloat : at::kBFloat16;
  return at::from_blob(model.memory().data() + tensor.place->offset, tensor.checkpoint.shape,
                       at::TensorOptions(type))
      .to(at::kFloat);
}

TEST(ModelWeightsTest, ShareableWeightsLieWhereTheLayoutSaysAndNowhereElse) {
  ModelConfig config = Config();
  config.tied_embeddings = true;
  for (LayerSpec& layer : config.layers) {
    layer.attention.qkv_bias = layer.attention.qk_norm = true;
  }
  for (const std::string dtype : {"F32", "F16", "BF16"}) {
    for (const ComputeDType compute : {ComputeDType::kF32, ComputeDType::kBF16}) {
      Tensors tensors = Checkpoint(config, dtype);
      tensors[kHead] = tensors.at(kEmbedding);
      const ModelFolder folder;
      folder.Write(kSingle, WriteSafetensors(tensors));
      const Loaded loaded = LoadFrom(folder, config, compute, /*shareable=*/true);
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      const LoadedModel& model = **loaded;
      const WeightLayout& layout = *model.layout();
      EXPECT_EQ(layout.digest, model.digest());
      EXPECT_THAT(layout.piece_bytes, ElementsAre(model.memory().size()));
      ASSERT_EQ(layout.tensors.size(), tensors.size());
      for (const LaidOutTensor& tensor : layout.tensors) {
        const at::Tensor found = InMemory(model, tensor);
        EXPECT_EQ(found.defined(), tensor.name != kHead) << tensor.name;
        EXPECT_EQ(NameOf(tensor.checkpoint.dtype), dtype);
        // The values are exact in each dtype.
        if (!found.defined()) continue;
        EXPECT_TRUE(at::equal(found, Values(tensors.at(tensor.name)))) << tensor.name;
      }
      const auto* begin = model.memory().data();
      const auto* up =
          static_cast<const std::byte*>(model.Weight(config.layers[1].mlp.up).const_data_ptr());
      EXPECT_TRUE(up >= begin && up < begin + model.memory().size()) << "there is another copy";
    }
  }
}

TEST(ModelWeightsTest, NormsThatAddOneAreHeldWithItAndNotShared) {
  ModelConfig config = Config();
  config.norms_add_one = true;
  for (LayerSpec& layer : config.layers) layer.output_norms = layer.attention.qk_norm = true;
  for (const std::string dtype : {"F32", "F16", "BF16"}) {
    const Tensors tensors = Checkpoint(config, dtype);
    const ModelFolder folder;
    folder.Write(kSingle, WriteSafetensors(tensors));
    const Loaded loaded = LoadFrom(folder, config, ComputeDType::kBF16, /*shareable=*/true);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    const LoadedModel& model = **loaded;
    const auto expect = [&](const at::Tensor& norm, const std::string& name) {
      EXPECT_TRUE(at::equal(norm, Values(tensors.at(name + ".weight")) + 1.0f)) << dtype << name;
    };
    for (int i = 0; i < 2; ++i) {
      const LayerWeights& layer = model.weights().layers[i];
      const std::string prefix = "model.layers." + std::to_string(i) + ".";
      expect(layer.attention_norm, prefix + "input_layernorm");
      expect(layer.attention_output_norm, prefix + "post_attention_layernorm");
      expect(layer.mlp_norm, prefix + "pre_feedforward_layernorm");
      expect(layer.mlp_output_norm, prefix + "post_feedforward_layernorm");
      expect(layer.q_norm, prefix + "self_attn.q_norm");
      expect(layer.k_norm, prefix + "self_attn.k_norm");
    }
    expect(model.weights().final_norm, "model.norm");
    for (const LaidOutTensor& tensor : model.layout()->tensors) {
      EXPECT_EQ(tensor.place.has_value(), tensor.checkpoint.shape.size() == 2) << tensor.name;
      if (!tensor.place) continue;
      EXPECT_TRUE(at::equal(InMemory(model, tensor), Values(tensors.at(tensor.name))));
    }
  }
}

TEST(ModelWeightsTest, NormsThatAddOneMustBeFinite) {
  ModelConfig config = Config();
  config.norms_add_one = true;
  Tensors tensors = Checkpoint(config, "BF16");
  tensors[kNorm] = MakeTensor("BF16", {8}, {1, 2, 3, 4, 5, 6, 7, -kInf});
  EXPECT_THAT(ViolationsOf(Load(tensors, config).status()),
              UnorderedElementsAre(Blames(kNorm, "MODEL_TENSOR_NOT_FINITE")));
}

TEST(ModelWeightsTest, WeightsAreNotShareableUnlessAskedFor) {
  const Loaded loaded = Load(Checkpoint(Config(), "F32"));
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ((*loaded)->layout(), nullptr);
}

TEST(ModelWeightsTest, ConcurrentCallersShareOneComputation) {
  const Loaded loaded = Load(Checkpoint(Config(), "F32"));
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  LoadedModel& model = **loaded;
  std::vector<const void*> seen(8);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < seen.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int id = 0; id < model.modules().size(); ++id)
        seen[i] = model.SquaredNorms(id).data_ptr();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const void* data : seen) EXPECT_EQ(data, seen[0]);
  EXPECT_EQ(model.norm_cache_entries(), model.modules().size());
}

}  // namespace
}  // namespace dorad::model
