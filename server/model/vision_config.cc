#include "server/model/vision_config.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace dorad::model {
namespace {

using Json = nlohmann::json;

constexpr IntRange kWidths{1, 1 << 16};
constexpr IntRange kSides{1, 1 << 10};
constexpr IntRange kCounts{1, 1 << 10};

void ReadHeads(Fields& fields, VisionConfig* vision) {
  vision->heads = fields.Int("num_heads", 16, kCounts);
  if (vision->width == 0 || vision->heads == 0) return;
  if (vision->width % vision->heads != 0 || vision->head_dim() % 4 != 0) {
    fields.Invalid("num_heads", absl::StrCat("must divide hidden_size (", vision->width,
                                             ") into multiples of 4, not be ", vision->heads));
  }
}

void ReadTable(Fields& fields, VisionConfig* vision) {
  const int64_t positions = fields.Int("num_position_embeddings", 2304, {1, 1 << 20});
  vision->table_side = std::llround(std::sqrt(static_cast<double>(positions)));
  if (vision->table_side * vision->table_side != positions) {
    fields.Invalid("num_position_embeddings", absl::StrCat("must be a square, not ", positions));
  }
}

void ReadDeepstack(Fields& fields, int64_t depth, int64_t decoder_layers, VisionConfig* vision) {
  constexpr char kKey[] = "deepstack_visual_indexes";
  static const Json* const kDefault = new Json({8, 16, 24});
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

void ReadRope(Fields& fields, VisionConfig* vision) {
  if (!fields.Has("rope_parameters")) return;
  Fields rope = fields.Child("rope_parameters");
  if (rope.Text("rope_type", "axial") != "axial") {
    rope.Unsupported("rope_type", absl::StrCat("only axial is supported in a tower, not ",
                                               Shown(*rope.Find("rope_type"))));
  }
  vision->theta = rope.Number("rope_theta", vision->theta, {1.0, 1e12});
}

void CheckKind(Fields& fields) {
  const Json* type = fields.Find("model_type");
  if (type != nullptr && *type != "qwen3_vl" && *type != "qwen3_vl_vision") {
    fields.Unsupported("model_type",
                       absl::StrCat("must be \"qwen3_vl_vision\" here, not ", Shown(*type)));
  }
  if (fields.Text("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh") {
    fields.Unsupported("hidden_act", absl::StrCat("only gelu_pytorch_tanh is supported in a tower, "
                                                  "not ",
                                                  Shown(*fields.Find("hidden_act"))));
  }
  if (fields.Has("head_dim")) {
    fields.Unsupported("head_dim", "a size of heads of its own is not supported in a tower");
  }
}

// Of one axis: the table's rows on both sides and the weight of the second, in fp32 as transformers
// computes them.
struct AxisTap {
  int64_t first, second;
  float weight;
};

AxisTap TapOf(int64_t place, int64_t length, int64_t side) {
  const float source = static_cast<float>(place) * static_cast<float>(side - 1) /
                       static_cast<float>(std::max<int64_t>(1, length - 1));
  const float floor = std::floor(source);
  const auto first = static_cast<int64_t>(floor);
  return {std::min(first, side - 1), std::min(first + 1, side - 1), source - floor};
}

}  // namespace

VisionConfig ReadVisionConfig(Fields& root, int64_t hidden_size, int64_t decoder_layers) {
  Fields fields = root.Child("vision_config");
  VisionConfig vision;
  CheckKind(fields);
  vision.width = fields.Int("hidden_size", 1152, kWidths);
  vision.inner = fields.Int("intermediate_size", 4304, kWidths);
  ReadHeads(fields, &vision);
  vision.channels = fields.Int("in_channels", 3, kSides);
  vision.patch = fields.Int("patch_size", 16, kSides);
  vision.temporal_patch = fields.Int("temporal_patch_size", 2, kSides);
  vision.merge = fields.Int("spatial_merge_size", 2, {1, 64});
  vision.output = fields.Int("out_hidden_size", 3584, kWidths);
  if (vision.output > 0 && hidden_size > 0 && vision.output != hidden_size) {
    fields.Invalid("out_hidden_size", absl::StrCat("must be the text's hidden_size (", hidden_size,
                                                   "), not ", vision.output));
  }
  const int64_t depth = fields.Int("depth", 27, kCounts);
  vision.blocks.resize(depth);
  ReadTable(fields, &vision);
  ReadDeepstack(fields, depth, decoder_layers, &vision);
  vision.deepstack_mergers.resize(vision.deepstack.size());
  ReadRope(fields, &vision);
  vision.image_token_id = static_cast<int32_t>(root.Int("image_token_id", 151655, {0, INT32_MAX}));
  return vision;
}

void VisionConfig::NumberModules(int next) {
  for (VisionBlockSpec& block : blocks) {
    for (int* id : {&block.qkv, &block.proj, &block.fc1, &block.fc2}) *id = next++;
  }
  merger = {next, next + 1};
  next += 2;
  for (MergerSpec& spec : deepstack_mergers) {
    spec = {next, next + 1};
    next += 2;
  }
}

void VisionConfig::ListModules(const std::string& prefix,
                               std::vector<adapter::BaseModule>* modules) const {
  const auto linear = [&](int id, const std::string& name, int layer, int64_t rows, int64_t cols) {
    (*modules)[id] = {prefix + name,
                      adapter::ModuleKind::kLinear,
                      rows,
                      cols,
                      /*is_output_head=*/false,
                      layer};
  };
  for (int i = 0; i < static_cast<int>(blocks.size()); ++i) {
    const std::string name = absl::StrCat("blocks.", i);
    linear(blocks[i].qkv, name + ".attn.qkv", i, 3 * width, width);
    linear(blocks[i].proj, name + ".attn.proj", i, width, width);
    linear(blocks[i].fc1, name + ".mlp.linear_fc1", i, inner, width);
    linear(blocks[i].fc2, name + ".mlp.linear_fc2", i, width, inner);
  }
  const auto merging = [&](const MergerSpec& spec, const std::string& name, int layer) {
    linear(spec.fc1, name + ".linear_fc1", layer, merged_width(), merged_width());
    linear(spec.fc2, name + ".linear_fc2", layer, output, merged_width());
  };
  merging(merger, "merger", -1);
  for (int i = 0; i < static_cast<int>(deepstack_mergers.size()); ++i) {
    merging(deepstack_mergers[i], absl::StrCat("deepstack_merger_list.", i), i);
  }
}

std::vector<PatchPlace> PatchPlaces(const VisionConfig& vision, const ImageGrid& grid) {
  std::vector<PatchPlace> places;
  places.reserve(grid.height * grid.width);
  for (int64_t top = 0; top < grid.height; top += vision.merge) {
    for (int64_t left = 0; left < grid.width; left += vision.merge) {
      for (int64_t row = top; row < top + vision.merge; ++row) {
        for (int64_t column = left; column < left + vision.merge; ++column) {
          places.push_back({row, column});
        }
      }
    }
  }
  return places;
}

TableTaps TapsOf(const VisionConfig& vision, const ImageGrid& grid, const PatchPlace& place) {
  const int64_t side = vision.table_side;
  const AxisTap row = TapOf(place.row, grid.height, side);
  const AxisTap column = TapOf(place.column, grid.width, side);
  return {{row.first * side + column.first, row.first * side + column.second,
           row.second * side + column.first, row.second * side + column.second},
          {(1.0f - row.weight) * (1.0f - column.weight), (1.0f - row.weight) * column.weight,
           row.weight * (1.0f - column.weight), row.weight * column.weight}};
}

void FillPatchAngles(const VisionConfig& vision, const PatchPlace& place, float* cos, float* sin) {
  const int64_t quarter = vision.head_dim() / 4;
  for (int64_t i = 0; i < quarter; ++i) {
    const auto exponent = static_cast<float>(2 * i) / static_cast<float>(2 * quarter);
    const float inverse = 1.0f / std::pow(static_cast<float>(vision.theta), exponent);
    const float by_row = static_cast<float>(place.row) * inverse;
    const float by_column = static_cast<float>(place.column) * inverse;
    cos[i] = std::cos(by_row);
    sin[i] = std::sin(by_row);
    cos[quarter + i] = std::cos(by_column);
    sin[quarter + i] = std::sin(by_column);
  }
}

}  // namespace dorad::model
