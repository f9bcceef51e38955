// What a launch of the K-extended projection passes to its kernel.
#pragma once

#include <cuda_bf16.h>
#include <vector_types.h>

#include <cstdint>

#include "kernels/dora/linear.h"
#include "kernels/dora/linear_plan.h"

namespace dorad::kernels {

// Waiting counters at the head of the workspace; all are zero between launches.
struct LinearCounters {
  uint32_t shrunk;   // blocks done with their pieces of the shrink
  uint32_t reduced;  // blocks done with their share of h
  uint32_t left;     // blocks that need the two above no longer
  uint32_t unused[61];
  uint32_t split[kDoraLinearCounterBytes / sizeof(uint32_t) - 64];  // of each 16 rows of W
};
static_assert(sizeof(LinearCounters) == kDoraLinearCounterBytes);

struct LinearArgs {
  DoraLinearParams p;
  LinearPlan plan;
  bool clusters;                                // the splits of a panel are one cluster of blocks
  int32_t part_begin[kDoraLinearMaxParts + 1];  // in rows of W
  int32_t ldh;                                  // max_rank, rounded up to 8
  LinearCounters* counters;
  __nv_bfloat16* h;   // [parts, rows, ldh]
  float* h_partial;   // [a_splits, parts, rows, ldh]
  float4* y_partial;  // [splits, panels, consumer warps, N / 8, 32]
};

}  // namespace dorad::kernels
