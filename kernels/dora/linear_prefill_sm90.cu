#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>

#include "kernels/common/status.h"
#include "kernels/dora/linear_plan.h"
#include "kernels/dora/linear_prefill_kernel.cuh"
#include "kernels/dora/linear_prefill_launch.h"
#include "kernels/isa/launch.h"
#include "kernels/isa/sm90/tensor_map.h"

namespace dorad::kernels {
namespace {

constexpr int kCluster = 2;  // blocks

static_assert(kPrefillMostSlicedRows == kPrefillSlicedBands * kPrefillBandRows);
static_assert(kPrefillSharesBytes == kPrefillSlicedPanels * kLinearSlices * kPrefillShareBytes);

struct Maps {
  CUtensorMap w;
  CUtensorMap x;
  CUtensorMap h = {};
};

template <int kN>
cudaError_t Launch(PrefillArgs args, cudaStream_t stream) {
  using Config = PrefillConfig<kN>;
  const DoraLinearPrefillParams& p = args.p;
  const int in = p.shape.in;
  const int out = OutFeatures(p.shape);
  const int box_rows = args.shares_rows ? kPrefillTileRows / 2 : kPrefillTileRows;
  Maps maps;
  DORAD_CUDA_RETURN_IF_ERROR(EncodeMatrix(p.w, out, in, in, kN / 2, &maps.w));
  DORAD_CUDA_RETURN_IF_ERROR(EncodeMatrix(p.x, p.rows, in, in, box_rows, &maps.x));
  if (args.ldh > 0) {
    const int columns = p.shape.parts * args.ldh;
    DORAD_CUDA_RETURN_IF_ERROR(EncodeMatrix(args.h, p.rows, columns, columns, box_rows, &maps.h));
  }
  // Blocks wait for each other, so a launch may have only as many as run at once.
  static std::atomic<int> known = 0;
  int clusters = known;
  if (clusters == 0) {
    DORAD_CUDA_RETURN_IF_ERROR(
        MostClustersAtOnce(PrefillKernel<kN>, kCluster, kPrefillThreads, &clusters));
    known = clusters;
  }
  return LaunchEarlyInClusters(PrefillKernel<kN>, kCluster, kCluster * clusters, kPrefillThreads,
                               Config::kDynamicBytes, stream, maps.w, maps.x, maps.h, args);
}

// How tiles of panels of `columns` rows of W are divided over clusters.
struct Division {
  int columns;
  bool shares_rows;
  int bands;
  int panels;
};

Division Divide(const PrefillArgs& args, int columns, bool shares_rows) {
  const int panels = CeilDiv(OutFeatures(args.p.shape), columns);
  return {columns, shares_rows,
          CeilDiv(args.p.rows, shares_rows ? kPrefillTileRows : kPrefillBandRows),
          shares_rows ? CeilDiv(panels, 2) : panels};
}

// Estimated time.
int64_t Cost(const Division& division, int clusters) {
  const int64_t tiles = int64_t{division.bands} * division.panels;
  return (tiles + clusters - 1) / clusters * (division.columns + kPrefillStageCost);
}

}  // namespace

cudaError_t LaunchPrefillSm90(const PrefillProblem& problem, int processors, float* shares,
                              cudaStream_t stream) {
  PrefillArgs args = {problem};
  args.bands = CeilDiv(problem.p.rows, kPrefillBandRows);
  args.shares = shares;
  // The first of the cheapest.
  Division best = Divide(args, 192, false);
  for (const bool shares_rows : {false, true}) {
    for (const int columns : {192, 176, 128, 256, 144, 96}) {
      const Division division = Divide(args, columns, shares_rows);
      if (Cost(division, processors / 2) < Cost(best, processors / 2)) best = division;
    }
  }
  args.shares_rows = best.shares_rows;
  args.tile_bands = best.bands;
  args.tile_panels = best.panels;
  args.group = std::min(args.tile_bands, 8);
  switch (best.columns) {
    case 96:
      return Launch<96>(args, stream);
    case 128:
      return Launch<128>(args, stream);
    case 144:
      return Launch<144>(args, stream);
    case 176:
      return Launch<176>(args, stream);
    case 192:
      return Launch<192>(args, stream);
    default:
      return Launch<256>(args, stream);
  }
}

}  // namespace dorad::kernels
