#include "server/backends/cuda/vision_plan.h"

#include <algorithm>

namespace dorad::cuda {
namespace {

SegmentTiles TilesOf(const std::vector<int64_t>& segments, int64_t chunk_rows) {
  SegmentTiles to;
  int64_t begin = 0;
  for (const int64_t length : segments) {
    const int64_t end = begin + length;
    for (int64_t row = begin; row < end;) {
      if (row % chunk_rows == 0) to.begins.push_back(static_cast<int32_t>(to.tiles.size()));
      const int64_t chunk_end = (row / chunk_rows + 1) * chunk_rows;
      const int64_t rows =
          std::min({int64_t{kernels::kSegmentTileRows}, end - row, chunk_end - row});
      to.tiles.push_back({static_cast<int32_t>(row), static_cast<int32_t>(rows),
                          static_cast<int32_t>(begin), static_cast<int32_t>(end)});
      row += rows;
    }
    begin = end;
  }
  to.begins.push_back(static_cast<int32_t>(to.tiles.size()));
  return to;
}

kernels::PatchTaps PatchTapsOf(const model::VisionConfig& vision, const model::ImageGrid& grid,
                               const model::PatchPlace& place) {
  kernels::PatchTaps taps;
  taps.row = static_cast<int32_t>(place.row);
  taps.column = static_cast<int32_t>(place.column);
  if (!vision.style.position_table) return taps;
  const model::TableTaps table = model::TapsOf(vision, grid, place);
  std::copy(std::begin(table.rows), std::end(table.rows), taps.rows);
  std::copy(std::begin(table.weights), std::end(table.weights), taps.weights);
  return taps;
}

}  // namespace

VisionPlan PlanImages(const model::VisionConfig& vision, absl::Span<const model::ImageGrid> grids,
                      int64_t chunk_rows) {
  VisionPlan plan;
  std::vector<int64_t> frames, windows;  // patches of each
  int64_t side = 0;
  for (const model::ImageGrid& grid : grids) {
    const model::FrameWindows of_frame = WindowsOf(vision, grid);
    plan.tokens.insert(plan.tokens.end(), of_frame.tokens.begin(), of_frame.tokens.end());
    for (const model::PatchPlace& place : PatchPlaces(vision, grid)) {
      plan.taps.push_back(PatchTapsOf(vision, grid, place));
    }
    frames.push_back(vision.patches(grid));
    windows.insert(windows.end(), of_frame.patches.begin(), of_frame.patches.end());
    if (vision.style.rotary) side = std::max({side, grid.height, grid.width});
  }
  const int64_t half = vision.head_dim() / 2;
  plan.cos.resize(side * half);
  plan.sin.resize(side * half);
  for (int64_t p = 0; p < side; ++p) {
    FillPatchAngles(vision, {p, p}, &plan.cos[p * half], &plan.sin[p * half]);
  }
  plan.frame = TilesOf(frames, chunk_rows);
  if (vision.style.windows) plan.windows = TilesOf(windows, chunk_rows);
  return plan;
}

}  // namespace dorad::cuda
