// What the launches of a K-extended projection pass to their kernels.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/dora/linear.h"
#include "kernels/dora/linear_plan.h"

namespace dorad::kernels {

// By which the blocks of the projection follow the shrink. All are zero between launches; but a
// projection may begin while the one before it still runs, and must not take its signals for its
// own.
struct LinearSignals {
  uint32_t x_ready;  // the launch before whose shrink all kernels are complete
  uint32_t h_ready;  // blocks of the shrink that are done
  uint32_t left;     // blocks of the projection that need the two above no longer
};
static_assert(sizeof(LinearSignals) <= kDoraLinearSignalBytes);

struct LinearArgs {
  DoraLinearParams p;
  LinearPlan plan;
  int32_t part_begin[kDoraLinearMaxParts + 1];  // in rows of W
  int32_t x_rows;                               // of the batch, padded, in a stage
  int32_t siblings;   // blocks of a cluster that share x: panels next to each other
  int32_t stages;     // of the ring
  int32_t flight;     // stages of weights on their way at once
  int32_t ldh;        // max_rank, rounded up to 8
  int32_t shrinkers;  // blocks of the shrink; 0: there is none
  uint32_t launch;    // not 0, and another one than that of the launches around it
  LinearSignals* signals;
  __nv_bfloat16* h;  // [parts, rows, ldh]; of a row, its own adapter's s·(A x)
};

}  // namespace dorad::kernels
