// What both instruction sets' kernels behind DoraLinearPrefill have in common: their arguments, and
// how they find an adapter's factors and store rows.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/dora/linear_plan.h"
#include "kernels/dora/linear_prefill.h"

namespace dorad::kernels {

inline constexpr int kPrefillTileRows = 128;  // of the batch, of a block

// Waiting counters at the head of the workspace; zero between launches.
struct PrefillCounters {
  uint32_t shares;  // blocks done with their slices of the shrink
  uint32_t shrunk;  // blocks done with their part of h
  uint32_t left;    // blocks that need the ones above no longer
  uint32_t given;   // blocks whose sums of divided tiles are there
  uint32_t taken;   // blocks that have seen all of these
};
static_assert(sizeof(PrefillCounters) <= kDoraLinearSignalBytes);

struct PrefillProblem {
  DoraLinearPrefillParams p;
  LinearPlan plan;                              // DoraLinear's: for the order of sums
  int32_t part_begin[kDoraLinearMaxParts + 1];  // in rows of W
  int32_t tile_bands;                           // tiles of y: of rows
  int32_t tile_panels;                          // and of W
  int32_t group;                                // bands whose tiles are walked together
  int32_t ldh;                                  // max_rank, rounded up to kLinearStageK
  PrefillCounters* counters;
  __nv_bfloat16* h;  // [rows, parts, ldh]
};

// Where a part's factors are in the table.
__device__ inline int64_t FactorsAt(const PrefillProblem& args, int slot, int part) {
  return static_cast<int64_t>(slot) * args.p.table.modules + args.p.first_module + part;
}

__device__ inline const DoraFactors* FactorsOf(const PrefillProblem& args, int slot, int part) {
  return args.p.table.factors + FactorsAt(args, slot, part);
}

// Of a row of W.
__device__ inline int PartOf(const PrefillProblem& args, int row) {
  return (row >= args.part_begin[1]) + (row >= args.part_begin[2]);
}

struct PrefillTile {
  int band;
  int panel;
};

// The tiles of a few bands are walked together, panel after panel.
__device__ inline PrefillTile TileAt(const PrefillProblem& args, int tile) {
  const int group_tiles = args.group * args.tile_panels;
  const int group = tile / group_tiles;
  const int rest = tile - group * group_tiles;
  const int bands = min(args.group, args.tile_bands - group * args.group);
  return {group * args.group + rest % bands, rest / bands};
}

__device__ inline uint32_t PackPair(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Lane q of every four gets what lane i of them has at q, as its i-th. Whole warp.
__device__ inline void TransposeInFours(uint32_t (&values)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool is_upper = (threadIdx.x & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & step) != 0) continue;
      const uint32_t other =
          __shfl_xor_sync(0xFFFFFFFF, is_upper ? values[i] : values[i + step], step);
      if (is_upper) {
        values[i] = other;
      } else {
        values[i + step] = other;
      }
    }
  }
}

__device__ inline float2 LoadPair(const float* address) {
  return __ldg(reinterpret_cast<const float2*>(address));
}

}  // namespace dorad::kernels
