// Arguments of the kernels of a K-extended projection.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/dora/linear.h"
#include "kernels/dora/linear_plan.h"

namespace dorad::kernels {

// Counters for the blocks of a launch, and of a group of rows, to wait for each other. All are zero
// between launches.
struct alignas(128) LinearSignals {
  uint32_t shares;  // blocks whose shares of the shrink are done
  uint32_t h;       // blocks that have added up their part of h
  uint32_t left;    // warps that no longer need the two above
};
// Behind them a counter for each panel, of 32 rows at least, of each group: LinearArgs::given.
inline constexpr int kLinearGivenSignals = kLinearMostRowGroups * kLinearMostSplitOut / 32;
static_assert(kLinearMostRowGroups * sizeof(LinearSignals) +
                  kLinearGivenSignals * sizeof(uint32_t) <=
              kDoraLinearSignalBytes);

struct LinearArgs {
  DoraLinearParams p;
  LinearPlan plan;
  int32_t part_begin[kDoraLinearMaxParts + 1];  // in rows of W
  int32_t x_rows;                               // of a block's batch, padded, in a stage
  int32_t log_siblings;    // log2 of a cluster's blocks that share x, 1 or 2: adjacent panels
  int32_t stages;          // of the ring
  int32_t flight;          // stages of weights in flight at once
  int32_t ldh;             // max_rank, rounded up to 8
  LinearSignals* signals;  // of each group
  float* shares;           // [parts, rows, kLinearSlices, ldh]; sums of A x over a slice of K
  __nv_bfloat16* h;        // [parts, rows, ldh]; of a row, its own adapter's s·(A x)
  // Of MmaIsa with splits: sums of the first pieces, of each group and panel, as threads have
  // them, and whether they are there; these are zero between launches.
  float4* given;
  uint32_t* is_given;
};

}  // namespace dorad::kernels
