// The modules of model_config.h that adapters may change.

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/model/model_config.h"

namespace dorad::model {

std::vector<adapter::BaseModule> ListModules(const ModelConfig& config, const Spelling& names) {
  using adapter::ModuleKind;
  const int64_t hidden = config.hidden_size;
  const int64_t inner = config.intermediate_size;
  std::vector<adapter::BaseModule> modules(config.num_modules());
  for (int i = 0; i < config.num_layers(); ++i) {
    const auto linear = [&](int id, const char* name, int64_t rows, int64_t cols) {
      modules[id] = {absl::StrCat(names.body, "layers.", i, name),
                     ModuleKind::kLinear,
                     rows,
                     cols,
                     /*is_output_head=*/false,
                     /*layer=*/i};
    };
    if (const auto& delta = config.layers[i].delta) {
      linear(delta->qkv, ".linear_attn.in_proj_qkv", config.delta.qkv_size(), hidden);
      linear(delta->z, ".linear_attn.in_proj_z", config.delta.value_size(), hidden);
      linear(delta->b, ".linear_attn.in_proj_b", config.delta.value_heads, hidden);
      linear(delta->a, ".linear_attn.in_proj_a", config.delta.value_heads, hidden);
      linear(delta->out, ".linear_attn.out_proj", hidden, config.delta.value_size());
    } else {
      const AttentionSpec& attention = config.layers[i].attention;
      const int64_t queries = (attention.output_gate ? 2 : 1) * config.q_size();
      linear(attention.q, ".self_attn.q_proj", queries, hidden);
      linear(attention.k, ".self_attn.k_proj", config.kv_size(), hidden);
      linear(attention.v, ".self_attn.v_proj", config.kv_size(), hidden);
      linear(attention.o, ".self_attn.o_proj", hidden, config.q_size());
    }
    const MlpSpec& mlp = config.layers[i].mlp;
    linear(mlp.gate, ".mlp.gate_proj", inner, hidden);
    linear(mlp.up, ".mlp.up_proj", inner, hidden);
    linear(mlp.down, ".mlp.down_proj", hidden, inner);
  }
  modules[config.embedding] = {names.body + "embed_tokens", ModuleKind::kEmbedding,
                               config.vocab_size,           hidden,
                               /*is_output_head=*/false,    /*layer=*/-1};
  modules[config.head] = {names.head,
                          ModuleKind::kLinear,
                          config.vocab_size,
                          hidden,
                          /*is_output_head=*/true,
                          /*layer=*/-1};
  if (config.vision) config.vision->ListModules(names.tower, &modules);
  return modules;
}

adapter::BaseModules MakeModules(const ModelConfig& config) {
  std::vector<std::vector<adapter::BaseModule>> lists;
  for (const Spelling& names : config.spellings) lists.push_back(ListModules(config, names));
  std::vector<adapter::BaseModule> first = std::move(lists.front());
  lists.erase(lists.begin());
  // A served tower leaves out no linears: all-linear does not select its other modules.
  const auto kind = config.vision ? adapter::ModuleKind::kEmbedding : adapter::ModuleKind::kLinear;
  std::vector<adapter::BaseModule> not_served;
  for (const std::string& name : config.other_modules) not_served.push_back({name, kind});
  // all-linear does not select a convolution.
  for (int64_t i = 0; i < config.num_layers(); ++i) {
    if (!config.layers[i].delta) continue;
    not_served.push_back(
        {absl::StrCat(config.spellings.front().body, "layers.", i, ".linear_attn.conv1d"),
         adapter::ModuleKind::kEmbedding});
  }
  return adapter::BaseModules(std::move(first), std::move(lists), std::move(not_served));
}

}  // namespace dorad::model
