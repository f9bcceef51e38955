// Places of patches and tiles of attention, without a GPU.
#include "server/backends/cuda/vision_plan.h"

#include <algorithm>
#include <numeric>

#include "tests/unit/support/test.h"

namespace dorad::cuda {
namespace {

model::VisionConfig Tower(int64_t window) {
  model::VisionConfig vision;
  vision.width = 64;
  vision.heads = 4;
  vision.merge = 2;
  vision.window = window;
  vision.table_side = 4;
  vision.style.windows = window > 0;
  vision.style.position_table = window == 0;
  return vision;
}

// The tiles have every row once, in order, none in two chunks; each sees the whole of its segment.
void ExpectTiles(const SegmentTiles& tiles, const std::vector<int64_t>& segments,
                 int64_t chunk_rows) {
  const int64_t rows = std::accumulate(segments.begin(), segments.end(), int64_t{0});
  ASSERT_EQ(static_cast<int64_t>(tiles.begins.size()), (rows + chunk_rows - 1) / chunk_rows + 1);
  EXPECT_EQ(tiles.begins.back(), static_cast<int32_t>(tiles.tiles.size()));
  std::vector<int64_t> ends(segments.size());
  std::partial_sum(segments.begin(), segments.end(), ends.begin());
  int64_t row = 0;
  for (size_t chunk = 0; chunk + 1 < tiles.begins.size(); ++chunk) {
    for (int32_t i = tiles.begins[chunk]; i < tiles.begins[chunk + 1]; ++i) {
      const kernels::SegmentTile& tile = tiles.tiles[i];
      ASSERT_EQ(tile.row, row);
      ASSERT_GT(tile.rows, 0);
      ASSERT_LE(tile.rows, kernels::kSegmentTileRows);
      ASSERT_EQ(tile.row / chunk_rows, static_cast<int64_t>(chunk));
      ASSERT_EQ((tile.row + tile.rows - 1) / chunk_rows, static_cast<int64_t>(chunk));
      const auto end = std::upper_bound(ends.begin(), ends.end(), row);
      ASSERT_EQ(tile.end, *end);
      ASSERT_EQ(tile.begin, end == ends.begin() ? 0 : *(end - 1));
      ASSERT_LE(tile.row + tile.rows, tile.end);
      row += tile.rows;
    }
  }
  EXPECT_EQ(row, rows);
}

TEST(VisionPlanTest, AFrameIsOneSegmentInTheProcessorsOrder) {
  for (const int64_t chunk_rows : {512, 1024, 4096}) {
    const model::ImageGrid grid{1, 48, 46};
    const VisionPlan plan = PlanImages(Tower(0), {grid}, chunk_rows);
    ExpectTiles(plan.frame, {48 * 46}, chunk_rows);
    EXPECT_TRUE(plan.windows.tiles.empty());
    ASSERT_EQ(plan.taps.size(), 48u * 46u);
    for (size_t i = 0; i < plan.tokens.size(); ++i) {
      ASSERT_EQ(plan.tokens[i], static_cast<int32_t>(i));
    }
    // The first token's patches, then the second's.
    EXPECT_EQ(plan.taps[3].row, 1);
    EXPECT_EQ(plan.taps[3].column, 1);
    EXPECT_EQ(plan.taps[4].row, 0);
    EXPECT_EQ(plan.taps[4].column, 2);
    EXPECT_EQ(plan.cos.size(), 48u * 8u);
  }
}

// Gemma 3's: tokens of 4 x 4 patches, and a table with a row for each patch.
TEST(VisionPlanTest, WithoutRotationPatchesHaveTheirRowsOfTheTable) {
  model::VisionConfig tower = Tower(0);
  tower.merge = 4;
  tower.table_side = tower.fixed_side = 16;
  tower.style.rotary = false;
  const VisionPlan plan = PlanImages(tower, {{1, 16, 16}}, 512);
  EXPECT_TRUE(plan.cos.empty());
  EXPECT_TRUE(plan.sin.empty());
  ExpectTiles(plan.frame, {16 * 16}, 512);
  ASSERT_EQ(plan.taps.size(), 16u * 16u);
  for (int32_t i = 0; i < 16 * 16; ++i) {
    const kernels::PatchTaps& taps = plan.taps[i];
    const int32_t token = i / 16, in_token = i % 16;
    EXPECT_EQ(taps.row, token / 4 * 4 + in_token / 4);
    EXPECT_EQ(taps.column, token % 4 * 4 + in_token % 4);
    EXPECT_EQ(taps.rows[0], 16 * taps.row + taps.column);
    EXPECT_EQ(taps.weights[0], 1.0f);
    for (int t = 1; t < 4; ++t) EXPECT_EQ(taps.weights[t], 0.0f);
  }
}

TEST(VisionPlanTest, WindowsFollowOneAnotherAcrossChunks) {
  const model::VisionConfig tower = Tower(4);
  const model::ImageGrid grid{1, 60, 38};
  const model::FrameWindows windows = WindowsOf(tower, grid);
  const VisionPlan plan = PlanImages(tower, {grid}, 512);
  ExpectTiles(plan.frame, {60 * 38}, 512);
  ExpectTiles(plan.windows, windows.patches, 512);
  ASSERT_EQ(plan.tokens.size(), windows.tokens.size());
  for (size_t i = 0; i < plan.tokens.size(); ++i) {
    ASSERT_EQ(plan.tokens[i], windows.tokens[i]);
    // A token's first patch.
    ASSERT_EQ(plan.taps[4 * i].row, plan.tokens[i] / 19 * 2);
    ASSERT_EQ(plan.taps[4 * i].column, plan.tokens[i] % 19 * 2);
  }
}

TEST(VisionPlanTest, ImagesFollowOneAnotherAndDoNotSeeEachOther) {
  const model::VisionConfig tower = Tower(4);
  const std::vector<model::ImageGrid> grids = {{1, 8, 6}, {1, 60, 38}, {1, 2, 2}, {1, 20, 70}};
  const VisionPlan together = PlanImages(tower, grids, 512);
  std::vector<int64_t> frames, windows;
  size_t row = 0, token = 0;
  for (const model::ImageGrid& grid : grids) {
    const VisionPlan alone = PlanImages(tower, {grid}, 512);
    for (size_t i = 0; i < alone.taps.size(); ++i, ++row) {
      ASSERT_EQ(together.taps[row].row, alone.taps[i].row);
      ASSERT_EQ(together.taps[row].column, alone.taps[i].column);
    }
    for (size_t i = 0; i < alone.tokens.size(); ++i, ++token) {
      ASSERT_EQ(together.tokens[token], alone.tokens[i]);
    }
    // An angle depends on the place alone.
    for (size_t i = 0; i < alone.cos.size(); ++i) {
      ASSERT_EQ(together.cos[i], alone.cos[i]);
      ASSERT_EQ(together.sin[i], alone.sin[i]);
    }
    frames.push_back(grid.height * grid.width);
    const std::vector<int64_t> of_frame = WindowsOf(tower, grid).patches;
    windows.insert(windows.end(), of_frame.begin(), of_frame.end());
  }
  EXPECT_EQ(together.taps.size(), row);
  EXPECT_EQ(together.tokens.size(), token);
  ExpectTiles(together.frame, frames, 512);
  ExpectTiles(together.windows, windows, 512);
}

}  // namespace
}  // namespace dorad::cuda
