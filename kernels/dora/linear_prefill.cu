#include <algorithm>
#include <cstdint>

#include "kernels/common/host.h"
#include "kernels/common/status.h"
#include "kernels/dora/linear_plan.h"
#include "kernels/dora/linear_prefill.h"
#include "kernels/dora/linear_prefill_launch.h"
#include "kernels/isa/device.h"

namespace dorad::kernels {
namespace {

constexpr size_t kAlignment = 256;

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

// What each set keeps: Sm90Isa of divided tiles, MmaIsa of a sum's first piece.
size_t GivenBytes(const DoraLinearShape& shape) {
  return OutFeatures(shape) > kLinearMostSplitOut
             ? kPrefillGivenBytes
             : std::max(kPrefillGivenBytes, kPrefillMmaKeptBytes);
}

}  // namespace

size_t DoraLinearPrefillWorkspaceBytes(const DoraLinearShape& shape, int rows, int max_rank) {
  if (!Valid(shape, rows, max_rank)) return 0;
  if (max_rank == 0) return kDoraLinearSignalBytes + GivenBytes(shape);
  const int sliced_rows = std::min(rows, kPrefillMostSlicedRows);
  return kDoraLinearSignalBytes + GivenBytes(shape) +
         std::max(HBytes(shape, rows, max_rank),
                  HBytes(shape, sliced_rows, max_rank) + kPrefillSharesBytes);
}

PrefillLaunch LayOutPrefill(const DoraLinearPrefillParams& params, const LinearPlan& plan) {
  const DoraLinearShape& shape = params.shape;
  PrefillLaunch launch = {};
  PrefillProblem& problem = launch.problem;
  problem.p = params;
  problem.plan = plan;
  for (int p = 0; p < kDoraLinearMaxParts; ++p) {
    problem.part_begin[p + 1] = problem.part_begin[p] + (p < shape.parts ? shape.out[p] : 0);
  }
  problem.ldh = RankRoom(params.max_rank);
  problem.counters = static_cast<PrefillCounters*>(params.workspace);
  auto* given = static_cast<uint8_t*>(params.workspace) + kDoraLinearSignalBytes;
  uint8_t* h = given + GivenBytes(shape);
  problem.h = reinterpret_cast<__nv_bfloat16*>(h);
  launch.given = reinterpret_cast<float*>(given);
  if (params.max_rank > 0 && params.rows <= kPrefillMostSlicedRows) {
    launch.shares = reinterpret_cast<float*>(h + HBytes(shape, params.rows, params.max_rank));
  }
  return launch;
}

cudaError_t DoraLinearPrefill(const DoraLinearPrefillParams& params, cudaStream_t stream) {
  const DoraLinearShape& shape = params.shape;
  const bool is_sm90 = params.isa == KernelIsa::kSm90;
  if (!Valid(shape, params.rows, params.max_rank) || params.num_segments < 1 ||
      params.num_segments > kPrefillMaxSegments || params.segments == nullptr ||
      !IsThere(params.x, 16) || !IsThere(params.w, 16) || !IsThere(params.y, 16) ||
      !IsAligned(params.bias, 8) || !IsThere(params.workspace, kAlignment) ||
      params.workspace_bytes <
          DoraLinearPrefillWorkspaceBytes(shape, params.rows, params.max_rank) ||
      (is_sm90 && params.max_rank > 0 && !IsThere(params.maps, 64))) {
    return cudaErrorInvalidValue;
  }
  int processors = 0;
  DORAD_CUDA_RETURN_IF_ERROR(Multiprocessors(&processors));
  PrefillLaunch launch =
      LayOutPrefill(params, is_sm90 ? PlanLinear(shape, processors)
                                    : PlanMmaLinear(shape, kDoraLinearMaxRows, false, processors));
  launch.processors = processors;
  launch.stream = stream;
  return is_sm90 ? LaunchPrefillSm90(launch) : LaunchPrefillMma(launch);
}

}  // namespace dorad::kernels
