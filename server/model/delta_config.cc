#include "server/model/delta_config.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/platform/check.h"

namespace dorad::model {
namespace {

using Json = nlohmann::json;

constexpr IntRange kHeads{1, 1024};
constexpr IntRange kHeadDim{1, 1024};

// For each layer whether it is a delta-net.
std::vector<bool> ReadLayerTypes(Fields& text, int64_t layers) {
  std::vector<bool> deltas(layers);
  const Json* types = text.Find("layer_types");
  if (types == nullptr) {
    const int64_t interval = text.Int("full_attention_interval", 4, {1, INT32_MAX});
    for (int64_t i = 0; i < layers; ++i) deltas[i] = (i + 1) % std::max<int64_t>(1, interval) != 0;
    return deltas;
  }
  if (!types->is_array() || types->size() != static_cast<size_t>(layers)) {
    text.Invalid("layer_types", absl::StrCat("must be a list of ", layers, " names"));
    return deltas;
  }
  for (int64_t i = 0; i < layers; ++i) {
    const Json& type = (*types)[i];
    deltas[i] = type == "linear_attention";
    if (deltas[i] || type == "full_attention") continue;
    text.Unsupported("layer_types",
                     absl::StrCat(Shown(type), " is neither full nor linear attention"));
    return deltas;
  }
  return deltas;
}

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

void ReadDeltaNets(Fields& text, ModelConfig* config) {
  DeltaSizes& sizes = config->delta;
  sizes.key_heads = text.Int("linear_num_key_heads", 16, kHeads);
  sizes.value_heads = text.Int("linear_num_value_heads", 32, kHeads);
  sizes.key_dim = text.Int("linear_key_head_dim", 128, kHeadDim);
  sizes.value_dim = text.Int("linear_value_head_dim", 128, kHeadDim);
  sizes.convolution = text.Int("linear_conv_kernel_dim", 4, {2, 64});
  if (sizes.key_heads > 0 && sizes.value_heads % sizes.key_heads != 0) {
    text.Invalid("linear_num_value_heads",
                 absl::StrCat("must be a multiple of linear_num_key_heads (", sizes.key_heads,
                              "), not ", sizes.value_heads));
  }
  const std::vector<bool> deltas = ReadLayerTypes(text, config->num_layers());
  for (int64_t i = 0; i < config->num_layers(); ++i) {
    if (deltas[i]) config->layers[i].delta.emplace();
  }
  if (config->num_layers() > 0 && config->num_attention_layers() == 0) {
    text.Unsupported("layer_types", "a model without any attention layer is not supported");
  }
  // A column of the state lies in one block of a page of keys or values (DeltaStateLayout).
  const int64_t least_block = config->kv_size() * 16 * 2;
  if (config->kv_size() > 0 && sizes.key_dim * 4 > least_block) {
    text.Unsupported("linear_key_head_dim",
                     absl::StrCat("must not be above 8 times the keys of a token (",
                                  config->kv_size(), "), not ", sizes.key_dim));
  }
}

DeltaStateLayout::DeltaStateLayout(const ModelConfig& config, int64_t block_bytes, int64_t blocks,
                                   int64_t element_bytes) {
  const DeltaSizes& sizes = config.delta;
  if (config.num_delta_layers() == 0) return;
  const int64_t most = block_bytes / (sizes.key_dim * 4);
  DORAD_CHECK(most > 0 && blocks > 0);
  tile_ = std::min(most, sizes.value_dim);
  while (sizes.value_dim % tile_ != 0) --tile_;
  state_blocks_ = sizes.value_heads * (sizes.value_dim / tile_);
  const int64_t row_bytes = (sizes.convolution - 1) * sizes.qkv_size() * element_bytes;
  net_blocks_ = state_blocks_ + DivideUp(row_bytes, block_bytes);
  pages_ = DivideUp(config.num_delta_layers() * net_blocks_, blocks);
}

}  // namespace dorad::model
