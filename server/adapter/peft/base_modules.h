// The modules of a base model that an adapter may target: the adapter room's view of the model.
// Filled by model/ (names as in Hugging Face, without a leading "base_model.model."). Immutable
// after construction and therefore thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace dorad::adapter {

enum class ModuleKind { kLinear, kEmbedding };

struct BaseModule {
  // "model.layers.3.self_attn.q_proj", "model.embed_tokens", "lm_head".
  std::string name;
  ModuleKind kind = ModuleKind::kLinear;
  // Linear: weight [rows = out_features, cols = in_features].
  // Embedding: weight [rows = vocabulary, cols = embedding dimension].
  int64_t rows = 0;
  int64_t cols = 0;
  // The output head: PEFT's "all-linear" leaves it out.
  bool is_output_head = false;
  // Number of the layer or block, -1 outside the layers (layers_to_transform).
  int layer = -1;

  // Length of DoRA's magnitude and of g.
  int64_t magnitude_size() const { return kind == ModuleKind::kLinear ? rows : cols; }
};

class BaseModules {
 public:
  // spellings: the same modules under other names that adapters have for them. not_served: names
  // and kinds of modules of the model that no adapter can change here.
  explicit BaseModules(std::vector<BaseModule> modules,
                       std::vector<std::vector<BaseModule>> spellings = {},
                       std::vector<BaseModule> not_served = {})
      : modules_(std::move(modules)), not_served_(std::move(not_served)) {
    for (size_t i = 0; i < modules_.size(); ++i) index_[modules_[i].name] = static_cast<int>(i);
    for (auto& spelling : spellings) {
      spellings_.push_back(BaseModules(std::move(spelling), {}, not_served_));
    }
  }

  // The position of a module in this list is its ModuleId everywhere in the server.
  const std::vector<BaseModule>& all() const { return modules_; }
  int size() const { return static_cast<int>(modules_.size()); }
  // -1: no such module.
  int Find(std::string_view name) const {
    const auto it = index_.find(std::string(name));
    return it == index_.end() ? -1 : it->second;
  }
  // The same modules, with the same ids, under other names.
  const std::vector<BaseModules>& spellings() const { return spellings_; }
  const std::vector<BaseModule>& not_served() const { return not_served_; }

 private:
  std::vector<BaseModule> modules_;
  absl::flat_hash_map<std::string, int> index_;
  std::vector<BaseModules> spellings_;
  std::vector<BaseModule> not_served_;
};

}  // namespace dorad::adapter
