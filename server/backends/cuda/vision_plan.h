// Images as the tower's kernels read them: the places of their patches, and the tiles of their
// attention. Rows are those of one image after the other, each in the order of model::WindowsOf. A
// pure function and plain values, and therefore thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
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
  SegmentTiles windows;  // empty: the tower has none
  // Of rows: the token's number in its image, in the processor's order.
  std::vector<int32_t> tokens;
};

// chunk_rows: of one product. REQUIRES: one frame each; merge divides height and width.
VisionPlan PlanImages(const model::VisionConfig& vision, absl::Span<const model::ImageGrid> grids,
                      int64_t chunk_rows);

}  // namespace dorad::cuda
