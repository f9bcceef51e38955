#include <algorithm>
#include <atomic>
#include <cstdint>

#include "kernels/common/status.h"
#include "kernels/dora/linear_plan.h"
#include "kernels/dora/linear_prefill_launch.h"
#include "kernels/dora/linear_prefill_mma.cuh"
#include "kernels/isa/launch.h"

namespace dorad::kernels {
namespace {

constexpr int kAlignBytes = 128;

// The rows of the batch whose tiles are walked together: with as many rows of W they are what all
// blocks read at the same time.
constexpr int kGroupRows = 2048;

static_assert(kPrefillSharesBytes ==
              size_t{kPrefillMmaSlicedPanels} * kLinearSlices * kPrefillMmaShareBytes);
static_assert(sizeof(PrefillCounters) + kPrefillMmaSlicedPanels * sizeof(uint32_t) <=
              kDoraLinearSignalBytes);

static_assert(kPrefillMmaKeptBytes % (sizeof(float) * kPrefillTileRows * 256) == 0);

// What the current device takes of a kernel.
struct Room {
  int blocks;  // at once
  int stages;
};

template <int kN>
constexpr int Stages(int shared_bytes) {
  return std::min((shared_bytes - kAlignBytes) / PrefillMmaBlock<kN>::kStageBytes,
                  kPrefillMmaMostStages);
}

template <int kN>
cudaError_t RoomOf(Room* room) {
  static_assert(Stages<kN>(MmaIsa<4>::kSharedBytes -
                           static_cast<int>(sizeof(typename PrefillMmaBlock<kN>::Shared))) >= 2);
  static std::atomic<int> known_stages = 0;
  static std::atomic<int> known_blocks = 0;
  if (known_blocks == 0) {
    cudaFuncAttributes attributes;
    int blocks = 0;
    // Blocks wait for each other, so a launch may have only as many as run at once.
    DORAD_CUDA_RETURN_IF_ERROR(MostBlocksAtOnce(PrefillMmaKernel<kN>, kPrefillMmaThreads, &blocks));
    DORAD_CUDA_RETURN_IF_ERROR(cudaFuncGetAttributes(&attributes, PrefillMmaKernel<kN>));
    known_stages = Stages<kN>(attributes.maxDynamicSharedSizeBytes);
    known_blocks = blocks;
  }
  *room = {known_blocks, known_stages};
  return cudaSuccess;
}

template <int kN>
cudaError_t Launch(PrefillMmaArgs args, cudaStream_t stream) {
  Room room;
  DORAD_CUDA_RETURN_IF_ERROR(RoomOf<kN>(&room));
  args.tile_panels = CeilDiv(OutFeatures(args.p.shape), kN);
  args.stages = room.stages;
  // With sums to keep, as many as there is room for.
  const int most = kPrefillMmaKeptBytes / (sizeof(float) * kPrefillTileRows * kN);
  const int blocks = args.plan.splits > 1 ? std::min(room.blocks, most) : room.blocks;
  return LaunchEarly(PrefillMmaKernel<kN>, blocks, kPrefillMmaThreads,
                     kAlignBytes + room.stages * PrefillMmaBlock<kN>::kStageBytes, stream, args);
}

}  // namespace

cudaError_t LaunchPrefillMma(const PrefillProblem& problem, int processors, float* shares,
                             float4* kept, cudaStream_t stream) {
  PrefillMmaArgs args = {problem};
  args.shares = shares;
  args.kept = kept;
  args.summed = reinterpret_cast<uint32_t*>(problem.counters + 1);
  args.tile_bands = CeilDiv(problem.p.rows, kPrefillTileRows);
  args.group = std::min(args.tile_bands, kGroupRows / kPrefillTileRows);
  // Estimated time. Narrow tiles read more shared memory for each product.
  const auto cost = [&](int columns, int stage) {
    const int tiles = args.tile_bands * CeilDiv(OutFeatures(problem.p.shape), columns);
    return CeilDiv(tiles, processors) * stage;
  };
  return cost(256, 8) <= cost(128, 5) ? Launch<256>(args, stream) : Launch<128>(args, stream);
}

}  // namespace dorad::kernels
