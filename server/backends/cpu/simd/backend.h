// CPU side of the ops that need more than a loop over one kernel. Arguments have been checked.
// Thread-safe.
#pragma once

#include "server/backends/cpu/ops/attention.h"
#include "server/backends/cpu/ops/dora_linear.h"

namespace dorad::ops::cpu {

void DoraLinear(const at::Tensor& x_TI, absl::Span<const Projection> projections,
                ComputeDType compute);

void PagedAttention(const at::Tensor& q_THD, const PagedKv& kv,
                    absl::Span<const SequenceRows> sequences, float softmax_scale, int64_t window,
                    at::Tensor& out_THD);

}  // namespace dorad::ops::cpu
