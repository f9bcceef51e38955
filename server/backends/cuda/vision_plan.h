// An image as the tower's kernels read it: the places of its patches, and the tiles of its
// attention. Rows are in the order of model::WindowsOf. A pure function and plain values, and
// therefore thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/vision/attention.h"
#include "kernels/vision/pointwise.h"
#include "server/model/vision_config.h"

namespace dorad::cuda {

// Tiles in the order of rows; no tile has rows of two chunks.
struct SegmentTiles {
  std::vector<kernels::SegmentTile> tiles;
  std::vector<int32_t> begins;  // of each chunk's tiles, and their end
};

struct VisionPlan {
  std::vector<kernels::PatchTaps> taps;  // of rows
  // [places, head_dim / 2] each: of patches whose row and column are equal. Empty: nothing turns.
  std::vector<float> cos, sin;
  SegmentTiles frame;
  SegmentTiles windows;         // empty: the tower has none
  std::vector<int32_t> tokens;  // of rows: the token's number in the processor's order
};

// REQUIRES: one frame; merge divides height and width.
VisionPlan PlanImage(const model::VisionConfig& vision, const model::ImageGrid& grid,
                     int64_t chunk_rows);

}  // namespace dorad::cuda
