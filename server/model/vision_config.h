// A vision tower as data: its sizes, its modules, and the places of an image's patches. Torch-free.
// Plain values and pure functions and therefore thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/adapter/peft/base_modules.h"
#include "server/model/byte_pixels.h"

namespace dorad::model {

// Patches of an image, as transformers' image_grid_thw.
struct ImageGrid {
  int64_t frames = 1;
  int64_t height = 0;
  int64_t width = 0;
};

// The differences between towers. The defaults are Qwen3-VL's.
struct TowerStyle {
  enum Mlp { kGeluTanh, kSiluGate, kGeluGate };

  bool rms_norms = false;      // root mean square; else layer norms
  bool split_qkv = false;      // q, k and v are modules of their own
  Mlp mlp = kGeluTanh;         // with a gate: act(gate) * up, and the exact gelu
  bool block_bias = true;      // of a block's modules
  bool flat_patches = false;   // their projection has no axis of frames
  bool patch_bias = true;      // of the patches' projection
  bool patch_norm = false;     // after it
  bool position_table = true;  // is added to the patches
  bool windows = false;        // VisionBlockSpec::windowed
  // Rows and columns take the frequencies of a whole head by turns; else each takes those of half.
  bool axes_by_turns = false;
  bool joins_patches = false;  // MergerSpec::join
  bool rotary = true;          // of queries and keys
  // In place of the merger's linears: the mean of a token's normed patches, a root mean square norm
  // (1 + its tensor), and a product that no adapter changes.
  bool pools_patches = false;

  bool gated() const { return mlp != kGeluTanh; }

  bool operator==(const TowerStyle&) const = default;
};

// Names after the tower's prefix (Spelling::tower); those that begin with a dot follow the name of
// the block.
struct TowerNames {
  const char* part = "visual.";  // the prefix, in memory after "model."
  const char* patch = "patch_embed.proj";
  const char* patch_norm = "";
  const char* table = "pos_embed";
  const char* blocks = "blocks.";
  const char* norm1 = ".norm1";
  const char* qkv = ".attn.qkv";
  const char* k = "";
  const char* v = "";
  const char* proj = ".attn.proj";
  const char* norm2 = ".norm2";
  const char* fc1 = ".mlp.linear_fc1";
  const char* up = "";
  const char* fc2 = ".mlp.linear_fc2";
  const char* merger_norm = "merger.norm";
  const char* merger_join = "";
  const char* merger_fc1 = "merger.linear_fc1";
  const char* merger_fc2 = "merger.linear_fc2";
  // With pools_patches, after Spelling::projector.
  const char* pooled_norm = "";
  const char* projection = "";
  // Another prefix that files and adapters have in place of `part`; "": none.
  const char* other_part = "";
  const char* projector = "";  // the prefix of the projector, if it is not the tower's
};

// Modules by their ids, as in LayerSpec.
struct VisionBlockSpec {
  int qkv = 0, proj = 0, fc1 = 0, fc2 = 0;
  int k = 0, v = 0;       // with split_qkv, where qkv is q
  int up = 0;             // with a gate, which is fc1
  bool windowed = false;  // a patch sees its window only, not its frame
};

// Makes one token of merge x merge patches: norm, linear, gelu, linear.
struct MergerSpec {
  int fc1 = 0, fc2 = 0;
  int join = 0;  // with joins_patches: the linear before them, from merged_width() to width
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
  int64_t fixed_side = 0;      // of every image, in patches; 0: any
  double norm_eps = 1e-6;
  double merger_eps = 1e-6;
  bool merger_bias = true;  // of fc1 and fc2
  bool row_breaks = false;  // in prompts a text token stands between the rows of an image's tokens
  // In the decoder the rows of an image see each other.
  bool bidirectional = false;
  double theta = 10000.0;
  int32_t image_token_id = 0;
  BytePixels byte_pixels;
  std::vector<int> deepstack;  // blocks whose output is merged too, ascending
  std::vector<VisionBlockSpec> blocks;
  MergerSpec merger;
  std::vector<MergerSpec> deepstack_mergers;  // as deepstack

  int64_t head_dim() const { return width / heads; }
  int64_t merged_width() const { return width * merge * merge; }
  int64_t merger_inner() const { return style.joins_patches ? output : merged_width(); }
  // Of one row of pixel_values.
  int64_t patch_elements() const { return channels * temporal_patch * patch * patch; }
  int64_t patches(const ImageGrid& grid) const { return grid.frames * grid.height * grid.width; }
  int64_t tokens(const ImageGrid& grid) const { return patches(grid) / (merge * merge); }

  int num_modules() const {
    const size_t of_block = 4 + (style.split_qkv ? 2 : 0) + (style.gated() ? 1 : 0);
    if (style.pools_patches) return static_cast<int>(of_block * blocks.size());
    const size_t of_mergers = 2 * (1 + deepstack_mergers.size()) + (style.joins_patches ? 1 : 0);
    return static_cast<int>(of_block * blocks.size() + of_mergers);
  }
  // Of a module of the tower.
  bool has_bias(int id) const {
    if (style.pools_patches) return style.block_bias;
    if (id < (style.joins_patches ? merger.join : merger.fc1)) return style.block_bias;
    return merger_bias && !(style.joins_patches && id == merger.join);
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

// The order in which the tower computes a frame's tokens: window by window.
struct FrameWindows {
  std::vector<int64_t> tokens;   // by their number in the processor's order
  std::vector<int64_t> patches;  // of each window
};
// Without windows: the processor's order, and one window.
FrameWindows WindowsOf(const VisionConfig& vision, const ImageGrid& grid);

// Of one frame, in the order of WindowsOf: the merge x merge patches of a token follow each other.
// REQUIRES: merge divides height and width.
std::vector<PatchPlace> PatchPlaces(const VisionConfig& vision, const ImageGrid& grid);

// The table stretched over the frame: its corners lie on the frame's.
TableTaps TapsOf(const VisionConfig& vision, const ImageGrid& grid, const PatchPlace& place);
// cos and sin of one patch, [head_dim / 2] each: the first half of them turns by the row, the
// second by the column.
void FillPatchAngles(const VisionConfig& vision, const PatchPlace& place, float* cos, float* sin);

}  // namespace dorad::model
