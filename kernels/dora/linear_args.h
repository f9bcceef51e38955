// What the launches of a K-extended projection pass to their kernels.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/dora/linear.h"
#include "kernels/dora/linear_plan.h"

namespace dorad::kernels {

// By which the blocks of a launch wait for each other. All are zero between launches.
struct LinearSignals {
  uint32_t shares;  // blocks whose shares of the shrink are there
  uint32_t h;       // blocks that have added up their part of h
  uint32_t left;    // warps that need the two above no longer
};
static_assert(sizeof(LinearSignals) <= kDoraLinearSignalBytes);

struct LinearArgs {
  DoraLinearParams p;
  LinearPlan plan;
  int32_t part_begin[kDoraLinearMaxParts + 1];  // in rows of W
  int32_t x_rows;                               // of the batch, padded, in a stage
  int32_t siblings;  // blocks of a cluster that share x: panels next to each other
  int32_t stages;    // of the ring
  int32_t flight;    // stages of weights on their way at once
  int32_t ldh;       // max_rank, rounded up to 8
  LinearSignals* signals;
  float* shares;     // [parts, rows, kLinearSlices, ldh]; sums of A x over a slice of K
  __nv_bfloat16* h;  // [parts, rows, ldh]; of a row, its own adapter's s·(A x)
};

}  // namespace dorad::kernels
