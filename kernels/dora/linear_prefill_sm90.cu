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
// Half of a tile of 256 columns, of two blocks of two clusters.
static_assert(kPrefillGivenBytes ==
              sizeof(float) * kPrefillMostDivided * 2 * 2 * kPrefillTileRows * 128);

struct Maps {
  CUtensorMap w;
  CUtensorMap x;
  CUtensorMap h = {};
};

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

int64_t TileCost(const PrefillArgs& args, const Division& division) {
  return int64_t{args.plan.chunks} * StageCost(args, division.columns);
}

// Whether two clusters share a tile: half of them would have none, and the plan has two pieces of
// K, long enough.
bool Divides(const PrefillArgs& args, const Division& division, int clusters) {
  const int tiles = division.bands * division.panels;
  return args.plan.splits == 2 && 2 * tiles <= clusters && tiles <= kPrefillMostDivided &&
         TileCost(args, division) > 2 * kPrefillExchangeCost;
}

// Estimated time.
int64_t Cost(const PrefillArgs& args, const Division& division, int clusters) {
  const int64_t tile = TileCost(args, division);
  if (Divides(args, division, clusters)) return tile / 2 + kPrefillExchangeCost;
  return CeilDiv(division.bands * division.panels, clusters) * tile;
}

template <int kN>
cudaError_t Launch(PrefillArgs args, const Division& division, cudaStream_t stream) {
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
  args.divides = Divides(args, division, clusters);
  return LaunchEarlyInClusters(PrefillKernel<kN>, kCluster, kCluster * clusters, kPrefillThreads,
                               Config::kDynamicBytes, stream, maps.w, maps.x, maps.h, args);
}

}  // namespace

cudaError_t LaunchPrefillSm90(const PrefillProblem& problem, int processors, float* shares,
                              float* given, cudaStream_t stream) {
  PrefillArgs args = {problem};
  args.bands = CeilDiv(problem.p.rows, kPrefillBandRows);
  args.shares = shares;
  args.given = given;
  // The first of the cheapest.
  const int clusters = processors / kCluster;
  Division best = Divide(args, 192, false);
  for (const bool shares_rows : {false, true}) {
    for (const int columns : {192, 176, 128, 256, 144, 96}) {
      const Division division = Divide(args, columns, shares_rows);
      if (Cost(args, division, clusters) < Cost(args, best, clusters)) best = division;
    }
  }
  args.shares_rows = best.shares_rows;
  args.tile_bands = best.bands;
  args.tile_panels = best.panels;
  args.group = std::min(args.tile_bands, 8);
  switch (best.columns) {
    case 96:
      return Launch<96>(args, best, stream);
    case 128:
      return Launch<128>(args, best, stream);
    case 144:
      return Launch<144>(args, best, stream);
    case 176:
      return Launch<176>(args, best, stream);
    case 192:
      return Launch<192>(args, best, stream);
    default:
      return Launch<256>(args, best, stream);
  }
}

}  // namespace dorad::kernels
