#include <algorithm>
#include <cstdint>

#include "kernels/common/status.h"
#include "kernels/dora/linear_plan.h"
#include "kernels/dora/linear_prefill_launch.h"
#include "kernels/dora/linear_prefill_mma.cuh"
#include "kernels/isa/device.h"
#include "kernels/isa/launch.h"

namespace dorad::kernels {
namespace {

// The rows of the batch whose tiles are walked together: with as many rows of W they are what all
// blocks read at the same time.
constexpr int kGroupRows = 2048;

static_assert(kPrefillSharesBytes ==
              size_t{kPrefillMmaSlicedPanels} * kLinearSlices * kPrefillMmaShareBytes);
static_assert(sizeof(PrefillCounters) + kPrefillMmaSlicedPanels * sizeof(uint32_t) <=
              kDoraLinearSignalBytes);

static_assert(kPrefillMmaKeptBytes % (sizeof(float) * kPrefillTileRows * 256) == 0);

constexpr int kAlignBytes = 128;  // that may be lost before the dynamic shared memory

template <int kN>
cudaError_t LaunchPanels(PrefillMmaArgs args, cudaStream_t stream) {
  using Block = PrefillMmaBlock<kN>;
  static_assert(MmaIsa<4>::kSharedBytes - static_cast<int>(sizeof(typename Block::Shared)) >=
                kAlignBytes + 2 * Block::kStageBytes);
  const auto kernel = PrefillMmaKernel<kN>;
  int room = 0;
  DORAD_CUDA_RETURN_IF_ERROR(MostDynamicBytes(kernel, &room));
  args.stages = std::min((room - kAlignBytes) / Block::kStageBytes, kPrefillMmaMostStages);
  args.tile_panels = CeilDiv(OutFeatures(args.p.shape), kN);
  const int dynamic_bytes = kAlignBytes + args.stages * Block::kStageBytes;
  int blocks = 0;
  // Blocks wait for each other, so a launch may have only as many as run at once.
  DORAD_CUDA_RETURN_IF_ERROR(
      MostClustersAtOnce(kernel, /*cluster=*/1, kPrefillMmaThreads, dynamic_bytes, &blocks));
  if (args.plan.splits > 1) {
    // As many as there is room for sums to keep.
    blocks = std::min(
        blocks, static_cast<int>(kPrefillMmaKeptBytes / (sizeof(float) * kPrefillTileRows * kN)));
  }
  return LaunchEarly(kernel, blocks, kPrefillMmaThreads, dynamic_bytes, stream, args);
}

}  // namespace

cudaError_t LaunchPrefillMma(const PrefillLaunch& launch) {
  PrefillMmaArgs args = {};
  static_cast<PrefillProblem&>(args) = launch.problem;
  args.shares = launch.shares;
  args.kept = reinterpret_cast<float4*>(launch.given);
  args.summed = reinterpret_cast<uint32_t*>(args.counters + 1);
  args.tile_bands = CeilDiv(args.p.rows, kPrefillTileRows);
  args.group = std::min(args.tile_bands, kGroupRows / kPrefillTileRows);
  // Estimated time. Narrow tiles read more shared memory for each product.
  const auto cost = [&](int columns, int stage) {
    const int tiles = args.tile_bands * CeilDiv(OutFeatures(args.p.shape), columns);
    return CeilDiv(tiles, launch.processors) * stage;
  };
  return cost(256, 8) <= cost(128, 5) ? LaunchPanels<256>(args, launch.stream)
                                      : LaunchPanels<128>(args, launch.stream);
}

}  // namespace dorad::kernels
