#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>

#include "kernels/common/host.h"
#include "kernels/common/status.h"
#include "kernels/dora/linear_plan.h"
#include "kernels/dora/linear_prefill.h"
#include "kernels/dora/linear_prefill_kernel.cuh"
#include "kernels/isa/launch.h"
#include "kernels/isa/sm90/tensor_map.h"

namespace dorad::kernels {
namespace {

constexpr size_t kAlignment = 256;
constexpr int kCluster = 2;  // blocks

int RankRoom(int max_rank) { return RoundUp(max_rank, kLinearStageK); }

bool Valid(const DoraLinearShape& shape, int rows, int max_rank) {
  if (rows < 1 || max_rank < 0 || max_rank > INT16_MAX - kLinearStageK) return false;
  if (shape.in < 8 || shape.in % 8 != 0) return false;
  if (shape.parts < 1 || shape.parts > kDoraLinearMaxParts) return false;
  for (int p = 0; p < shape.parts; ++p) {
    if (shape.out[p] < 1 || (p + 1 < shape.parts && shape.out[p] % 64 != 0)) return false;
  }
  return OutFeatures(shape) % 8 == 0;
}

size_t HBytes(const DoraLinearShape& shape, int rows, int max_rank) {
  const size_t bytes = size_t{1} * shape.parts * rows * RankRoom(max_rank) * sizeof(__nv_bfloat16);
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}
constexpr size_t kSharesBytes = kPrefillSlicedPanels * kLinearSlices * kPrefillShareBytes;

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

size_t DoraLinearPrefillWorkspaceBytes(const DoraLinearShape& shape, int rows, int max_rank) {
  if (!Valid(shape, rows, max_rank)) return 0;
  if (max_rank == 0) return kDoraLinearSignalBytes;
  const int sliced_rows = std::min(rows, kPrefillSlicedBands * kPrefillBandRows);
  return kDoraLinearSignalBytes + std::max(HBytes(shape, rows, max_rank),
                                           HBytes(shape, sliced_rows, max_rank) + kSharesBytes);
}

cudaError_t DoraLinearPrefill(const DoraLinearPrefillParams& params, cudaStream_t stream) {
  const DoraLinearShape& shape = params.shape;
  if (!Valid(shape, params.rows, params.max_rank) || params.num_segments < 1 ||
      params.num_segments > kPrefillMaxSegments || params.segments == nullptr ||
      !IsThere(params.x, 16) || !IsThere(params.w, 16) || !IsThere(params.y, 16) ||
      !IsAligned(params.bias, 8) || !IsThere(params.workspace, kAlignment) ||
      params.workspace_bytes <
          DoraLinearPrefillWorkspaceBytes(shape, params.rows, params.max_rank) ||
      (params.max_rank > 0 && !IsThere(params.maps, 64))) {
    return cudaErrorInvalidValue;
  }
  int processors = 0;
  DORAD_CUDA_RETURN_IF_ERROR(Multiprocessors(&processors));
  PrefillArgs args = {};
  args.p = params;
  args.plan = PlanLinear(shape, processors);
  for (int p = 0; p < kDoraLinearMaxParts; ++p) {
    args.part_begin[p + 1] = args.part_begin[p] + (p < shape.parts ? shape.out[p] : 0);
  }
  args.bands = CeilDiv(params.rows, kPrefillBandRows);
  args.ldh = RankRoom(params.max_rank);
  args.counters = static_cast<PrefillCounters*>(params.workspace);
  auto* h = static_cast<uint8_t*>(params.workspace) + kDoraLinearSignalBytes;
  args.h = reinterpret_cast<__nv_bfloat16*>(h);
  if (params.max_rank > 0 && args.bands <= kPrefillSlicedBands) {
    args.shares = reinterpret_cast<float*>(h + HBytes(shape, params.rows, params.max_rank));
  }
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
