#include "server/model/tensor_table.h"

namespace dorad::model {

std::map<std::string, TensorSlot> ListTensorSlots(const ModelConfig& config,
                                                  ModelWeights* weights) {
  std::map<std::string, TensorSlot> slots;
  const std::vector<adapter::BaseModule> modules = ListModules(config);
  const auto linear = [&](int id, ops::BaseLinear* to, bool bias) {
    const adapter::BaseModule& module = modules[id];
    slots[module.name + ".weight"] = {{module.rows, module.cols}, &to->weight_OI, id};
    if (bias) slots[module.name + ".bias"] = {{module.rows}, &to->bias_O};
  };
  const auto norm = [&](const std::string& name, int64_t size, at::Tensor* to) {
    slots[name + ".weight"] = {{size}, to};
  };

  weights->layers.resize(config.num_layers);
  for (int64_t i = 0; i < config.num_layers; ++i) {
    LayerWeights& layer = weights->layers[i];
    const auto id = [i](LayerModule module) { return LayerModuleId(i, module); };
    linear(id(kQ), &layer.q, config.qkv_bias);
    linear(id(kK), &layer.k, config.qkv_bias);
    linear(id(kV), &layer.v, config.qkv_bias);
    linear(id(kO), &layer.o, config.output_bias);
    linear(id(kGate), &layer.gate, config.mlp_bias);
    linear(id(kUp), &layer.up, config.mlp_bias);
    linear(id(kDown), &layer.down, config.mlp_bias);
    const std::string prefix = "model.layers." + std::to_string(i);
    norm(prefix + ".input_layernorm", config.hidden_size, &layer.input_norm);
    norm(prefix + ".post_attention_layernorm", config.hidden_size, &layer.post_attention_norm);
    if (config.qk_norm) {
      norm(prefix + ".self_attn.q_norm", config.head_dim, &layer.q_norm);
      norm(prefix + ".self_attn.k_norm", config.head_dim, &layer.k_norm);
    }
  }
  const adapter::BaseModule& embedding = modules[EmbeddingId(config)];
  slots[embedding.name + ".weight"] = {
      {embedding.rows, embedding.cols}, &weights->embedding_VD, EmbeddingId(config)};
  if (!config.tied_embeddings) linear(HeadId(config), &weights->head, /*bias=*/false);
  norm("model.norm", config.hidden_size, &weights->final_norm);
  return slots;
}

}  // namespace dorad::model
