#include "server/model/vision_config.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace dorad::model {
namespace {

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

void VisionConfig::NumberModules(int next) {
  for (VisionBlockSpec& block : blocks) {
    block.qkv = next++;
    if (style.split_qkv) {
      block.k = next++;
      block.v = next++;
    }
    block.proj = next++;
    block.fc1 = next++;
    if (style.gated()) block.up = next++;
    block.fc2 = next++;
  }
  if (style.pools_patches) return;
  if (style.joins_patches) merger.join = next++;
  merger.fc1 = next++;
  merger.fc2 = next++;
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
    const std::string name = absl::StrCat(names.blocks, i);
    linear(blocks[i].qkv, name + names.qkv, i, style.split_qkv ? width : 3 * width, width);
    if (style.split_qkv) {
      linear(blocks[i].k, name + names.k, i, width, width);
      linear(blocks[i].v, name + names.v, i, width, width);
    }
    linear(blocks[i].proj, name + names.proj, i, width, width);
    linear(blocks[i].fc1, name + names.fc1, i, inner, width);
    if (style.gated()) linear(blocks[i].up, name + names.up, i, inner, width);
    linear(blocks[i].fc2, name + names.fc2, i, width, inner);
  }
  if (style.pools_patches) return;
  const auto merging = [&](const MergerSpec& spec, const std::string& fc1, const std::string& fc2,
                           int layer) {
    linear(spec.fc1, fc1, layer, merger_inner(), style.joins_patches ? width : merged_width());
    linear(spec.fc2, fc2, layer, output, merger_inner());
  };
  if (style.joins_patches) linear(merger.join, names.merger_join, -1, width, merged_width());
  merging(merger, names.merger_fc1, names.merger_fc2, -1);
  for (int i = 0; i < static_cast<int>(deepstack_mergers.size()); ++i) {
    const std::string name = absl::StrCat("deepstack_merger_list.", i);
    merging(deepstack_mergers[i], name + ".linear_fc1", name + ".linear_fc2", i);
  }
}

FrameWindows WindowsOf(const VisionConfig& vision, const ImageGrid& grid) {
  const int64_t rows = grid.height / vision.merge;
  const int64_t columns = grid.width / vision.merge;
  const int64_t side = vision.style.windows ? vision.window : std::max(rows, columns);
  FrameWindows windows;
  for (int64_t top = 0; top < rows; top += side) {
    for (int64_t left = 0; left < columns; left += side) {
      const int64_t bottom = std::min(top + side, rows);
      const int64_t right = std::min(left + side, columns);
      for (int64_t row = top; row < bottom; ++row) {
        for (int64_t column = left; column < right; ++column) {
          windows.tokens.push_back(row * columns + column);
        }
      }
      windows.patches.push_back((bottom - top) * (right - left) * vision.merge * vision.merge);
    }
  }
  return windows;
}

std::vector<PatchPlace> PatchPlaces(const VisionConfig& vision, const ImageGrid& grid) {
  std::vector<PatchPlace> places;
  places.reserve(grid.height * grid.width);
  const int64_t columns = grid.width / vision.merge;
  for (const int64_t token : WindowsOf(vision, grid).tokens) {
    const int64_t top = token / columns * vision.merge;
    const int64_t left = token % columns * vision.merge;
    for (int64_t row = top; row < top + vision.merge; ++row) {
      for (int64_t column = left; column < left + vision.merge; ++column) {
        places.push_back({row, column});
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
  const float turns = vision.style.rotary ? 1.0f : 0.0f;
  // theta to the power of -2i / head_dim.
  const auto inverse = [&](int64_t i) {
    const auto exponent = static_cast<float>(i) / static_cast<float>(2 * quarter);
    return 1.0f / std::pow(static_cast<float>(vision.theta), exponent);
  };
  for (int64_t i = 0; i < quarter; ++i) {
    const int64_t column = vision.style.axes_by_turns ? 2 * i + 1 : 2 * i;
    const float by_row = turns * static_cast<float>(place.row) * inverse(2 * i);
    const float by_column = turns * static_cast<float>(place.column) * inverse(column);
    cos[i] = std::cos(by_row);
    sin[i] = std::sin(by_row);
    cos[quarter + i] = std::cos(by_column);
    sin[quarter + i] = std::sin(by_column);
  }
}

}  // namespace dorad::model
