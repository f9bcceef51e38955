#include "server/model/vision_readers.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

namespace dorad::model {
namespace {

using Json = nlohmann::json;

constexpr IntRange kWidths{1, 1 << 16};
constexpr IntRange kSides{1, 1 << 10};
constexpr IntRange kCounts{1, 1 << 10};

// The values of absent keys, and the names that transformers 4 and 5 give to the tower's type.
struct QwenDefaults {
  absl::Span<const char* const> types;
  const char* activation;
  int64_t width, inner, patch, depth;
  int32_t image_token_id = 151655;
};

void CheckType(Fields& fields, absl::Span<const char* const> types) {
  const Json* type = fields.Find("model_type");
  const auto is_type = [type](const char* name) { return *type == name; };
  if (type != nullptr && std::none_of(types.begin(), types.end(), is_type)) {
    fields.Unsupported("model_type",
                       absl::StrCat("must be \"", types.front(), "\" here, not ", Shown(*type)));
  }
}

void CheckActivation(Fields& fields, const char* key, const char* activation) {
  if (fields.Text(key, activation) == activation) return;
  fields.Unsupported(key, absl::StrCat("only ", activation, " is supported in this tower, not ",
                                       Shown(*fields.Find(key))));
}

void ReadHeads(Fields& fields, const char* key, VisionConfig* vision) {
  vision->heads = fields.Int(key, 16, kCounts);
  if (vision->width == 0 || vision->heads == 0) return;
  if (vision->width % vision->heads != 0 || vision->head_dim() % 4 != 0) {
    fields.Invalid(key, absl::StrCat("must divide hidden_size (", vision->width,
                                     ") into multiples of 4, not be ", vision->heads));
  } else if (const Json* size = fields.Find("head_dim"); size && *size != vision->head_dim()) {
    fields.Unsupported("head_dim",
                       absl::StrCat("must be hidden_size / ", key, ", not ", Shown(*size)));
  }
}

void ReadRope(Fields& fields, VisionConfig* vision) {
  vision->theta = fields.Number("rope_theta", vision->theta, {1.0, 1e12});  // of transformers 4
  if (!fields.Has("rope_parameters")) return;
  Fields rope = fields.Child("rope_parameters");
  if (rope.Text("rope_type", "axial") != "axial") {
    rope.Unsupported("rope_type", absl::StrCat("only axial is supported in a tower, not ",
                                               Shown(*rope.Find("rope_type"))));
  }
  vision->theta = rope.Number("rope_theta", vision->theta, {1.0, 1e12});
}

// What the towers of Mistral and Gemma have in common.
VisionConfig ReadPlain(Fields& fields, absl::Span<const char* const> types, int64_t width,
                       int64_t inner, int64_t depth, const ModelConfig& text) {
  VisionConfig vision;
  CheckType(fields, types);
  vision.width = fields.Int("hidden_size", width, kWidths);
  vision.inner = fields.Int("intermediate_size", inner, kWidths);
  ReadHeads(fields, "num_attention_heads", &vision);
  vision.channels = fields.Int("num_channels", 3, kSides);
  vision.patch = fields.Int("patch_size", 16, kSides);
  vision.temporal_patch = 1;
  vision.output = text.hidden_size;
  vision.blocks.resize(fields.Int("num_hidden_layers", depth, kCounts));
  return vision;
}

// What the towers of Qwen have in common.
VisionConfig ReadQwen(Fields& root, Fields& fields, const QwenDefaults& defaults,
                      const ModelConfig& text) {
  VisionConfig vision;
  CheckType(fields, defaults.types);
  CheckActivation(fields, "hidden_act", defaults.activation);
  vision.width = fields.Int("hidden_size", defaults.width, kWidths);
  vision.inner = fields.Int("intermediate_size", defaults.inner, kWidths);
  ReadHeads(fields, "num_heads", &vision);
  vision.channels = fields.Int("in_channels", 3, kSides);
  vision.patch = fields.Int("patch_size", defaults.patch, kSides);
  vision.temporal_patch = fields.Int("temporal_patch_size", 2, kSides);
  vision.merge = fields.Int("spatial_merge_size", 2, {1, 64});
  vision.output = fields.Int("out_hidden_size", 3584, kWidths);
  if (vision.output > 0 && text.hidden_size > 0 && vision.output != text.hidden_size) {
    fields.Invalid("out_hidden_size", absl::StrCat("must be the text's hidden_size (",
                                                   text.hidden_size, "), not ", vision.output));
  }
  vision.blocks.resize(fields.Int("depth", defaults.depth, kCounts));
  ReadRope(fields, &vision);
  vision.image_token_id =
      static_cast<int32_t>(root.Int("image_token_id", defaults.image_token_id, {0, INT32_MAX}));
  return vision;
}

void ReadTable(Fields& fields, VisionConfig* vision) {
  const int64_t positions = fields.Int("num_position_embeddings", 2304, {1, 1 << 20});
  vision->table_side = std::llround(std::sqrt(static_cast<double>(positions)));
  if (vision->table_side * vision->table_side != positions) {
    fields.Invalid("num_position_embeddings", absl::StrCat("must be a square, not ", positions));
  }
}

void ReadDeepstack(Fields& fields, int64_t decoder_layers, VisionConfig* vision) {
  constexpr char kKey[] = "deepstack_visual_indexes";
  static const Json* const kDefault = new Json({8, 16, 24});
  const auto depth = static_cast<int64_t>(vision->blocks.size());
  const Json* stored = fields.Find(kKey);
  const Json& indexes = stored == nullptr ? *kDefault : *stored;
  const auto invalid = [&](const std::string& description) {
    fields.Invalid(kKey, description);
    vision->deepstack.clear();
  };
  if (!indexes.is_array()) return invalid("must be a list of blocks");
  if (indexes.size() > static_cast<size_t>(decoder_layers)) {
    return invalid(absl::StrCat("must not be longer than num_hidden_layers (", decoder_layers,
                                ") of the text, not ", indexes.size()));
  }
  int64_t last = -1;
  for (const Json& index : indexes) {
    const bool ok = index.is_number_integer() && index > last && index < depth;
    if (!ok) {
      return invalid(
          absl::StrCat("must ascend and be below depth (", depth, "), not have ", Shown(index)));
    }
    last = index.get<int64_t>();
    vision->deepstack.push_back(static_cast<int>(last));
  }
}

// The key names the blocks without windows; numbers of other blocks are idle.
void ReadWindows(Fields& fields, VisionConfig* vision) {
  constexpr char kKey[] = "fullatt_block_indexes";
  static const Json* const kDefault = new Json({7, 15, 23, 31});
  vision->style.windows = true;
  const int64_t pixels = fields.Int("window_size", 112, {1, 1 << 20});
  if (vision->merge > 0 && vision->patch > 0) {
    vision->window = pixels / vision->merge / vision->patch;
    if (vision->window == 0 && pixels > 0) {
      fields.Invalid("window_size",
                     absl::StrCat("must hold one token, of ", vision->merge * vision->patch,
                                  " pixels, not be ", pixels));
    }
  }
  const Json* stored = fields.Find(kKey);
  const Json& full = stored == nullptr ? *kDefault : *stored;
  if (!full.is_array() || !std::all_of(full.begin(), full.end(), [](const Json& index) {
        return index.is_number_integer() && index >= 0;
      })) {
    return fields.Invalid(kKey, absl::StrCat("must be a list of blocks, not ", Shown(full)));
  }
  for (size_t i = 0; i < vision->blocks.size(); ++i) {
    vision->blocks[i].windowed = std::count(full.begin(), full.end(), i) == 0;
  }
}

// Images have one size: a square of patches, and a square of tokens.
void ReadPool(Fields& root, Fields& fields, VisionConfig* vision) {
  const int64_t pixels = fields.Int("image_size", 224, {1, 1 << 20});
  const int64_t tokens = root.Int("mm_tokens_per_image", 256, {1, 1 << 20});
  if (vision->patch == 0 || pixels == 0 || tokens == 0) return;
  vision->fixed_side = vision->table_side = pixels / vision->patch;
  const int64_t side = std::llround(std::sqrt(static_cast<double>(tokens)));
  vision->merge = std::max<int64_t>(1, vision->fixed_side / side);
  if (vision->fixed_side * vision->patch != pixels) {
    fields.Invalid("image_size", absl::StrCat("must be a multiple of patch_size (", vision->patch,
                                              "), not ", pixels));
  } else if (side * side != tokens || vision->merge * side != vision->fixed_side) {
    root.Invalid("mm_tokens_per_image", absl::StrCat("must be a square whose side divides ",
                                                     vision->fixed_side, " patches, not ", tokens));
  }
}

}  // namespace

VisionConfig ReadQwen3Vision(Fields& root, const ModelConfig& text) {
  static constexpr const char* kTypes[] = {"qwen3_vl_vision", "qwen3_vl"};
  Fields fields = root.Child("vision_config");
  VisionConfig vision =
      ReadQwen(root, fields, {kTypes, "gelu_pytorch_tanh", 1152, 4304, 16, 27}, text);
  ReadTable(fields, &vision);
  ReadDeepstack(fields, text.num_layers(), &vision);
  vision.deepstack_mergers.resize(vision.deepstack.size());
  return vision;
}

// Qwen3-VL's without DeepStack.
VisionConfig ReadQwen35Vision(Fields& root, const ModelConfig& text) {
  static constexpr const char* kTypes[] = {"qwen3_5_vision", "qwen3_5"};
  Fields fields = root.Child("vision_config");
  VisionConfig vision =
      ReadQwen(root, fields, {kTypes, "gelu_pytorch_tanh", 1152, 4304, 16, 27, 248056}, text);
  ReadTable(fields, &vision);
  return vision;
}

VisionConfig ReadQwen25Vision(Fields& root, const ModelConfig& text) {
  static constexpr const char* kTypes[] = {"qwen2_5_vl_vision", "qwen2_5_vl"};
  Fields fields = root.Child("vision_config");
  VisionConfig vision = ReadQwen(root, fields, {kTypes, "silu", 3584, 3420, 14, 32}, text);
  vision.style.rms_norms = true;
  vision.style.mlp = TowerStyle::kSiluGate;
  vision.style.patch_bias = false;
  vision.style.position_table = false;
  vision.names.fc1 = ".mlp.gate_proj";
  vision.names.up = ".mlp.up_proj";
  vision.names.fc2 = ".mlp.down_proj";
  vision.names.merger_norm = "merger.ln_q";
  vision.names.merger_fc1 = "merger.mlp.0";
  vision.names.merger_fc2 = "merger.mlp.2";
  ReadWindows(fields, &vision);
  return vision;
}

VisionConfig ReadMistral3Vision(Fields& root, const ModelConfig& text) {
  static constexpr const char* kTypes[] = {"pixtral"};
  Fields fields = root.Child("vision_config");
  VisionConfig vision = ReadPlain(fields, kTypes, 1024, 4096, 24, text);
  vision.merge = root.Int("spatial_merge_size", 2, {1, 64});
  ReadRope(fields, &vision);
  vision.norm_eps = 1e-5;
  vision.merger_eps = text.rms_norm_eps;
  vision.merger_bias = root.Bool("multimodal_projector_bias", false);
  vision.row_breaks = true;
  vision.image_token_id = static_cast<int32_t>(root.Int("image_token_index", 10, {0, INT32_MAX}));
  CheckActivation(root, "projector_hidden_act", "gelu");
  const Json* layer = root.Find("vision_feature_layer");
  if (layer != nullptr && *layer != -1 && *layer != vision.blocks.size()) {
    root.Unsupported(
        "vision_feature_layer",
        absl::StrCat("only the last layer's output (-1) is supported, not ", Shown(*layer)));
  }
  vision.style = {.rms_norms = true,
                  .split_qkv = true,
                  .mlp = TowerStyle::kGeluGate,
                  .block_bias = false,
                  .flat_patches = true,
                  .patch_bias = false,
                  .patch_norm = true,
                  .position_table = false,
                  .axes_by_turns = true,
                  .joins_patches = true};
  if (fields.Text("hidden_act", "gelu") != "gelu") {
    CheckActivation(fields, "hidden_act", "silu");
    vision.style.mlp = TowerStyle::kSiluGate;
  }
  vision.names = {.part = "",
                  .patch = "vision_tower.patch_conv",
                  .patch_norm = "vision_tower.ln_pre",
                  .blocks = "vision_tower.transformer.layers.",
                  .norm1 = ".attention_norm",
                  .qkv = ".attention.q_proj",
                  .k = ".attention.k_proj",
                  .v = ".attention.v_proj",
                  .proj = ".attention.o_proj",
                  .norm2 = ".ffn_norm",
                  .fc1 = ".feed_forward.gate_proj",
                  .up = ".feed_forward.up_proj",
                  .fc2 = ".feed_forward.down_proj",
                  .merger_norm = "multi_modal_projector.norm",
                  .merger_join = "multi_modal_projector.patch_merger.merging_layer",
                  .merger_fc1 = "multi_modal_projector.linear_1",
                  .merger_fc2 = "multi_modal_projector.linear_2"};
  return vision;
}

VisionConfig ReadGemma3Vision(Fields& root, const ModelConfig& text) {
  static constexpr const char* kTypes[] = {"siglip_vision_model"};
  Fields fields = root.Child("vision_config");
  VisionConfig vision = ReadPlain(fields, kTypes, 768, 3072, 12, text);
  CheckActivation(fields, "hidden_act", "gelu_pytorch_tanh");
  vision.norm_eps = vision.merger_eps = fields.Number("layer_norm_eps", 1e-6, {0.0, 0.1});
  ReadPool(root, fields, &vision);
  vision.bidirectional = true;
  vision.image_token_id =
      static_cast<int32_t>(root.Int("image_token_index", 262144, {0, INT32_MAX}));
  vision.style = {.split_qkv = true, .flat_patches = true, .rotary = false, .pools_patches = true};
  vision.names = {.part = "vision_tower.",
                  .patch = "embeddings.patch_embedding",
                  .table = "embeddings.position_embedding",
                  .blocks = "encoder.layers.",
                  .norm1 = ".layer_norm1",
                  .qkv = ".self_attn.q_proj",
                  .k = ".self_attn.k_proj",
                  .v = ".self_attn.v_proj",
                  .proj = ".self_attn.out_proj",
                  .norm2 = ".layer_norm2",
                  .fc1 = ".mlp.fc1",
                  .fc2 = ".mlp.fc2",
                  .merger_norm = "post_layernorm",
                  .pooled_norm = "mm_soft_emb_norm",
                  .projection = "mm_input_projection_weight",
                  .other_part = "vision_tower.vision_model.",
                  .projector = "multi_modal_projector."};
  return vision;
}

}  // namespace dorad::model
