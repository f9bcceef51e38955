#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "kernels/common/host.h"
#include "kernels/common/status.h"
#include "kernels/dora/linear.h"
#include "kernels/dora/linear_launch.h"
#include "kernels/dora/linear_plan.h"
#include "kernels/isa/device.h"
#include "kernels/isa/mma/isa.cuh"
#include "kernels/isa/sm90/isa.cuh"
#include "kernels/isa/sm90/tensor_map.h"

namespace dorad::kernels {
namespace {

constexpr size_t kAlignment = 256;

// Tiles of 64 rows of the batch: 1, 2 or 4, as the kernels are built.
int BatchTiles(int rows) { return rows <= 64 ? 1 : rows <= 128 ? 2 : 4; }

// log2 of the panels that share x, 1 or 2: more in a cluster would leave multiprocessors idle.
int LogSiblings(const LinearPlan& plan, int rows) { return plan.splits == 1 && rows > 64 ? 1 : 0; }

bool Valid(const DoraLinearShape& shape, int rows, int max_rank) {
  if (rows < 1 || rows > kDoraLinearMaxRows || max_rank < 0 || max_rank > INT16_MAX - 7) {
    return false;
  }
  if (shape.in < 8 || shape.in % 8 != 0) return false;
  if (shape.parts < 1 || shape.parts > kDoraLinearMaxParts) return false;
  for (int p = 0; p < shape.parts; ++p) {
    if (shape.out[p] < 1 || (p + 1 < shape.parts && shape.out[p] % 16 != 0)) return false;
  }
  // Blocks number the boxes of A in 16 bits; at most one adapter for each row.
  return shape.parts * rows * CeilDiv(max_rank, kLinearBoxRows) <= INT16_MAX;
}

// Values of h.
size_t HSize(const DoraLinearShape& shape, int rows, int max_rank) {
  return static_cast<size_t>(shape.parts) * rows * RoundUp(max_rank, 8);
}
size_t HBytes(const DoraLinearShape& shape, int rows, int max_rank) {
  const size_t bytes = sizeof(__nv_bfloat16) * HSize(shape, rows, max_rank);
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}
size_t SharesBytes(const DoraLinearShape& shape, int rows, int max_rank) {
  return sizeof(float) * kLinearSlices * HSize(shape, rows, max_rank);
}
// Of MmaIsa: whole tiles of the batch, and panels of up to 192 rows of W.
size_t GivenBytes(const DoraLinearShape& shape, int rows) {
  const int out = OutFeatures(shape);
  if (out > kLinearMostSplitOut) return 0;
  return sizeof(float) * 64 * BatchTiles(rows) * (size_t{1} * out + 192);
}

}  // namespace

size_t DoraLinearWorkspaceBytes(const DoraLinearShape& shape, int rows, int max_rank) {
  if (!Valid(shape, rows, max_rank)) return 0;
  return kDoraLinearSignalBytes + HBytes(shape, rows, max_rank) +
         SharesBytes(shape, rows, max_rank) + GivenBytes(shape, rows);
}

cudaError_t EncodeDoraMaps(const DoraFactors& factors, int in, int out, CUtensorMap maps[2]) {
  maps[0] = maps[1] = CUtensorMap{};
  if (factors.rank == 0 || in % 8 != 0) return cudaSuccess;
  DORAD_CUDA_RETURN_IF_ERROR(
      EncodeMatrix(factors.a, factors.rank, in, in, kLinearBoxRows, &maps[0]));
  return EncodeMatrix(factors.b, out, RoundUp(factors.rank, 8), factors.ldb, kLinearBoxRows,
                      &maps[1]);
}

namespace {

// What both instruction sets have in common.
template <typename Isa>
cudaError_t Prepare(const DoraLinearParams& params, const LinearPlan& plan, int log_siblings,
                    int x_rows, LinearLaunch<Isa>* launch) {
  const DoraLinearShape& shape = params.shape;
  LinearArgs& args = launch->args;
  args.p = params;
  args.plan = plan;
  args.log_siblings = log_siblings;
  args.x_rows = x_rows;
  for (int p = 0; p < kDoraLinearMaxParts; ++p) {
    args.part_begin[p + 1] = args.part_begin[p] + (p < shape.parts ? shape.out[p] : 0);
  }
  args.ldh = RoundUp(params.max_rank, 8);
  args.signals = static_cast<LinearSignals*>(params.workspace);
  uint8_t* h = static_cast<uint8_t*>(params.workspace) + kDoraLinearSignalBytes;
  args.h = reinterpret_cast<__nv_bfloat16*>(h);
  uint8_t* shares = h + HBytes(shape, params.rows, params.max_rank);
  args.shares = reinterpret_cast<float*>(shares);
  args.given = reinterpret_cast<float4*>(shares + SharesBytes(shape, params.rows, params.max_rank));
  args.is_given = reinterpret_cast<uint32_t*>(args.signals + kLinearMostRowGroups);
  const auto encode_x = [&](int box_rows, auto* map) {
    return EncodeMatrix(params.x, params.rows, shape.in, shape.in, box_rows, map);
  };
  DORAD_CUDA_RETURN_IF_ERROR(encode_x(x_rows >> log_siblings, &launch->x_map));
  DORAD_CUDA_RETURN_IF_ERROR(encode_x(std::min(x_rows, 64), &launch->x_tile_map));
  return EncodeMatrix(params.w, OutFeatures(shape), shape.in, shape.in, plan.panel_rows,
                      &launch->w_map);
}

template <typename Isa, int kM>
cudaError_t Launch(const LinearLaunch<Isa>& launch) {
  return launch.args.p.max_rank > 0 ? LaunchProject<Isa, kM, true>(launch)
                                    : LaunchProject<Isa, kM, false>(launch);
}

template <typename Isa, int kM>
cudaError_t LaunchMma(const DoraLinearParams& params, const LinearPlan& plan, int processors,
                      cudaStream_t stream) {
  LinearLaunch<Isa> launch = {};
  launch.processors = processors;
  launch.stream = stream;
  // As many as a warp multiplies. The shrink fetches tiles of 64.
  const int x_rows = RoundUp(plan.group_rows, 16 * Isa::kRowBlocks);
  DORAD_CUDA_RETURN_IF_ERROR(Prepare(params, plan, /*log_siblings=*/0, x_rows, &launch));
  return Launch<Isa, kM>(launch);
}

}  // namespace

cudaError_t LaunchLinearSm90(const DoraLinearParams& params, const LinearPlan& plan, int processors,
                             cudaStream_t stream) {
  LinearLaunch<Sm90Isa> launch = {};
  launch.processors = processors;
  launch.stream = stream;
  const int log_siblings = LogSiblings(plan, params.rows);
  // The shrink fetches tiles of 64 rows.
  const int x_rows =
      RoundUp(params.rows, params.rows > 64 && params.max_rank > 0 ? 64 : 8 << log_siblings);
  DORAD_CUDA_RETURN_IF_ERROR(Prepare(params, plan, log_siblings, x_rows, &launch));
  switch (BatchTiles(params.rows)) {
    case 1:
      return Launch<Sm90Isa, 1>(launch);
    case 2:
      return Launch<Sm90Isa, 2>(launch);
    default:
      return Launch<Sm90Isa, 4>(launch);
  }
}

cudaError_t LaunchLinearMma(const DoraLinearParams& params, const LinearPlan& plan, int processors,
                            cudaStream_t stream) {
  if (plan.group_rows > 64) return LaunchMma<MmaIsa<1, 4, 2>, 2>(params, plan, processors, stream);
  if (plan.group_rows > 32) return LaunchMma<MmaIsa<4>, 1>(params, plan, processors, stream);
  return LaunchMma<MmaIsa<2>, 1>(params, plan, processors, stream);
}

cudaError_t DoraLinear(const DoraLinearParams& params, cudaStream_t stream) {
  const DoraLinearShape& shape = params.shape;
  if (!Valid(shape, params.rows, params.max_rank) || !IsThere(params.x, 16) ||
      !IsThere(params.w, 16) || !IsThere(params.workspace, kAlignment) || !IsThere(params.y, 16) ||
      params.segments == nullptr || params.num_segments == nullptr ||
      (params.isa == KernelIsa::kSm90 && params.max_rank > 0 && !IsThere(params.maps, 64))) {
    return cudaErrorInvalidValue;
  }
  if (params.workspace_bytes < DoraLinearWorkspaceBytes(shape, params.rows, params.max_rank)) {
    return cudaErrorInvalidValue;
  }
  int processors = 0;
  DORAD_CUDA_RETURN_IF_ERROR(Multiprocessors(&processors));
  return params.isa == KernelIsa::kSm90
             ? LaunchLinearSm90(params, PlanLinear(shape, processors), processors, stream)
             : LaunchLinearMma(params,
                               PlanMmaLinear(shape, params.rows, params.max_rank > 0, processors),
                               processors, stream);
}

}  // namespace dorad::kernels
