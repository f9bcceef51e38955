// CPU side of the ops that need more than a loop over one kernel. Arguments have been checked.
// Thread-safe.
#pragma once

#include "server/backends/cpu/ops/attention.h"
#include "server/backends/cpu/ops/dora_linear.h"

namespace dorad::ops::cpu {

void DoraLinear(const at::Tensor& x_TI, absl::Span<const Projection> projections,
                ComputeDType compute);

// The positions that a row sees of its sequence: the last `window` (0: all) up to its own, or all
// up to the sequence's last row.
struct Visible {
  int64_t window = 0;
  bool causal = true;
};

void PagedAttention(const at::Tensor& q_THD, const PagedKv& kv,
                    absl::Span<const SequenceRows> sequences, float softmax_scale, Visible visible,
                    at::Tensor& out_THD);

}  // namespace dorad::ops::cpu
