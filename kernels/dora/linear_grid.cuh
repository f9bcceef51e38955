// The launch of a projection's kernel: its blocks, their shared memory and the rest of LinearArgs.
// Pure: emulated kernels are launched by it, too.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/dora/linear_args.h"
#include "kernels/dora/linear_block.cuh"
#include "kernels/dora/linear_plan.h"

namespace dorad::kernels {

inline constexpr int kAlignBytes = 1024;  // the most that the ring's alignment takes

// Limits on weights in flight to a block. A long launch is faster with more; a short one waits for
// h, whose transfers queue behind the weights. Latency times bandwidth is some 40 KB.
inline constexpr int kFlightBytes = 96 * 1024;
inline constexpr int kShortFlightBytes = 48 * 1024;
inline constexpr int kShortBytes = 512 * 1024;  // of weights, of a block
// With less to fetch, weights counted twice, a block leaves half of the shared memory to the next
// kernel's. Longer ones are faster with more stages (measured with Qwen3-0.6B's shape).
inline constexpr int kTinyBytes = 280 * 1024;
inline constexpr int kHalfSharedBytes = (228 / 2 - 1) * 1024;  // 1 KiB of each is the system's

// The dynamic shared memory of a block: a ring of stages, and the buffers after it.
struct RingFit {
  int stages;
  int dynamic_bytes;
};

// Warpgroups read whole tiles of 64 rows of the batch, and a stage holds x_rows of them: the last
// stage's tiles extend into the buffers after the ring. A warp by itself reads 16 rows.
template <typename Isa, int kM, int kPanel, bool kAdapted>
constexpr RingFit FitRing(int splits, int x_rows, int shared_bytes) {
  using Config = ProjectConfig<Isa, kM, kPanel, kAdapted>;
  constexpr int kRowBytes = 2 * kLinearStageK;
  constexpr int kStaticBytes = sizeof(typename ProjectBlock<Isa, kM, kPanel, kAdapted>::Shared);
  const int stage_bytes = Config::kWeightBytes + Config::kStageChunks * x_rows * kRowBytes;
  const int beyond = Isa::kHasCopyEngine ? 64 * kM - x_rows : 0;
  const int after = std::max(splits > 1 ? Config::kExchangeBytes : 0, beyond * kRowBytes);
  const int room = shared_bytes - kStaticBytes - kAlignBytes - after;
  const int stages = std::min(Config::kMaxStages, room / stage_bytes);
  return {stages, kAlignBytes + stages * stage_bytes + after};
}

// Whether at least two stages fit for any batch.
template <typename Isa, int kM, int kPanel, bool kAdapted>
constexpr bool AlwaysFits() {
  constexpr bool kLeavesRoom = ProjectConfig<Isa, kM, kPanel, kAdapted>::kLeavesRoom;
  constexpr int kSharedBytes = kLeavesRoom ? kHalfSharedBytes : Isa::kSharedBytes;
  for (int x_rows = 8; x_rows <= 64 * kM; x_rows += 8) {
    for (const int splits : {1, 2}) {
      if (FitRing<Isa, kM, kPanel, kAdapted>(splits, x_rows, kSharedBytes).stages < 2) {
        return false;
      }
    }
  }
  return true;
}

// Blocks of a group of rows, those of a cluster, and the dynamic shared memory of each.
struct ProjectGrid {
  int blocks;
  int cluster;
  int dynamic_bytes;
};

// The launch on a device with so many multiprocessors, for blocks of at most so much shared memory,
// static and dynamic. Sets stages and flight of args.
template <typename Isa, int kM, int kPanel, bool kAdapted>
ProjectGrid PlanGrid(int processors, int shared_bytes, LinearArgs* args) {
  using Config = ProjectConfig<Isa, kM, kPanel, kAdapted>;
  static_assert(AlwaysFits<Isa, kM, kPanel, kAdapted>());
  const LinearPlan& plan = args->plan;
  const int chunks = plan.chunks / plan.splits;
  const int weight_bytes = chunks * Config::kChunkBytes;  // of a panel
  const int x_bytes = chunks * args->x_rows * 2 * kLinearStageK;
  if (Config::kLeavesRoom && 2 * weight_bytes + x_bytes <= kTinyBytes) {
    shared_bytes = std::min(shared_bytes, kHalfSharedBytes);
  }
  const RingFit fit = FitRing<Isa, kM, kPanel, kAdapted>(plan.splits, args->x_rows, shared_bytes);
  args->stages = fit.stages;
  const bool is_short = kAdapted && kM == 1 && weight_bytes < kShortBytes;
  const int flight_bytes = is_short ? kShortFlightBytes : kFlightBytes;
  args->flight = std::min(args->stages, std::max(flight_bytes / Config::kWeightBytes, 2));
  const int pieces = plan.splits << args->log_siblings;  // a piece of K of a panel for each block
  const int groups = CeilDiv(plan.panels, 1 << args->log_siblings);
  // With splits in a cluster each block has one panel; else blocks take several.
  processors /= plan.row_groups;
  int clusters = Isa::kHasClusters && plan.splits > 1
                     ? groups
                     : std::min(groups, std::max(processors / pieces, 1));
  if constexpr (kAdapted) {
    // Whole teams for the shrink.
    const int teams = std::max(processors / kLinearSlices, 1);
    clusters = std::max(clusters, teams * kLinearSlices / pieces);
  }
  return {clusters * pieces, Isa::kHasClusters ? pieces : 1, fit.dynamic_bytes};
}

}  // namespace dorad::kernels
