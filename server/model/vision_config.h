// A vision tower as data: its sizes, its modules, and the places of an image's patches. Torch-free.
// Plain values and pure functions and therefore thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/adapter/peft/base_modules.h"

namespace dorad::model {

// Patches of an image, as transformers' image_grid_thw.
struct ImageGrid {
  int64_t frames = 1;
  int64_t height = 0;
  int64_t width = 0;
};

// The differences between towers. The defaults are Qwen3-VL's: a backend whose tower is that one
// serves a VisionConfig whose style is TowerStyle{}.
struct TowerStyle {
  bool rms_norms = false;      // of blocks and merger; else layer norms
  bool gated_mlp = false;      // silu(gate) * up; else the tanh form of gelu
  bool patch_bias = true;      // of the patches' projection
  bool position_table = true;  // is added to the patches
  bool windows = false;        // VisionBlockSpec::windowed

  bool operator==(const TowerStyle&) const = default;
};

// Names after the tower's prefix; those that begin with a dot follow that of the block.
struct TowerNames {
  const char* patch = "patch_embed.proj";
  const char* table = "pos_embed";
  const char* fc1 = ".mlp.linear_fc1";
  const char* up = "";
  const char* fc2 = ".mlp.linear_fc2";
  const char* merger_norm = "merger.norm";
  const char* merger_fc1 = "merger.linear_fc1";
  const char* merger_fc2 = "merger.linear_fc2";
};

// Modules by their ids, as in LayerSpec. All have biases.
struct VisionBlockSpec {
  int qkv = 0, proj = 0, fc1 = 0, fc2 = 0;
  int up = 0;             // with gated_mlp, where fc1 is the gate
  bool windowed = false;  // a patch sees its window only, not its frame
};

// Makes one token of merge x merge patches: norm, linear, gelu, linear.
struct MergerSpec {
  int fc1 = 0, fc2 = 0;
};

// x += attention(norm(x)), then x += mlp(norm(x)) in each block.
struct VisionConfig {
  TowerStyle style;
  TowerNames names;
  int64_t width = 0;  // of a patch's row
  int64_t inner = 0;  // of the blocks' MLP
  int64_t heads = 0;
  int64_t output = 0;  // of a token: the decoder's hidden_size
  int64_t channels = 0;
  int64_t patch = 0;           // pixels on a side
  int64_t temporal_patch = 0;  // frames of pixels in a patch
  int64_t merge = 0;           // patches on a side of a token
  int64_t window = 0;          // tokens on a side of a window
  int64_t table_side = 0;      // the position table is square
  double norm_eps = 1e-6;
  double theta = 10000.0;
  int32_t image_token_id = 0;
  std::vector<int> deepstack;  // blocks whose output is merged too, ascending
  std::vector<VisionBlockSpec> blocks;
  MergerSpec merger;
  std::vector<MergerSpec> deepstack_mergers;  // as deepstack

  int64_t head_dim() const { return width / heads; }
  int64_t merged_width() const { return width * merge * merge; }
  // Of one row of pixel_values.
  int64_t patch_elements() const { return channels * temporal_patch * patch * patch; }
  int64_t patches(const ImageGrid& grid) const { return grid.frames * grid.height * grid.width; }
  int64_t tokens(const ImageGrid& grid) const { return patches(grid) / (merge * merge); }

  int num_modules() const {
    const size_t of_block = style.gated_mlp ? 5 : 4;
    return static_cast<int>(of_block * blocks.size() + 2 * (1 + deepstack_mergers.size()));
  }
  // Gives every module its id, the first of them `next`.
  void NumberModules(int next);
  // Writes the names and shapes of all modules to their places. prefix: "model.visual.".
  void ListModules(const std::string& prefix, std::vector<adapter::BaseModule>* modules) const;
};

// What a patch takes from the position table: a weighted sum of four of its rows.
struct TableTaps {
  int64_t rows[4] = {};
  float weights[4] = {};
};

// The place of a patch in its frame.
struct PatchPlace {
  int64_t row = 0;
  int64_t column = 0;
};

// Of one frame, in the order of pixel_values: the merge x merge patches of a token follow each
// other. REQUIRES: merge divides height and width.
std::vector<PatchPlace> PatchPlaces(const VisionConfig& vision, const ImageGrid& grid);

// The order in which the tower computes a frame's tokens: window by window.
struct FrameWindows {
  std::vector<int64_t> tokens;   // by their number in the processor's order
  std::vector<int64_t> patches;  // of each window
};
// Without windows: the processor's order, and one window.
FrameWindows WindowsOf(const VisionConfig& vision, const ImageGrid& grid);

// The table stretched over the frame: its corners lie on the frame's.
TableTaps TapsOf(const VisionConfig& vision, const ImageGrid& grid, const PatchPlace& place);
// cos and sin of one patch, [head_dim / 2] each: the first half turns by the row, the second by
// the column.
void FillPatchAngles(const VisionConfig& vision, const PatchPlace& place, float* cos, float* sin);

}  // namespace dorad::model
