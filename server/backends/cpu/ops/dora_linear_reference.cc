#include <ATen/ATen.h>

#include "server/backends/cpu/ops/dora_linear.h"

namespace dorad::ops {
namespace {

// An operand of a matrix product, in fp32, with the rounding that `compute` asks for. Only inputs
// are rounded; factors and weights keep the value they are stored with.
at::Tensor Input(const at::Tensor& t, ComputeDType compute) {
  return compute == ComputeDType::kBF16 ? t.to(at::kBFloat16).to(at::kFloat) : t;
}

}  // namespace

void DoraLinearReference(const at::Tensor& x_TI, absl::Span<const Projection> projections,
                         ComputeDType compute) {
  const at::Tensor x = Input(x_TI, compute);
  for (const Projection& p : projections) {
    const at::Tensor weight = p.base->weight_OI.to(at::kFloat);
    for (const RowSegment& s : p.segments) {
      const at::Tensor rows = x.slice(0, s.begin, s.end);
      at::Tensor y = at::mm(rows, weight.t());
      if (s.factors != nullptr) {
        const AdapterFactors& f = *s.factors;
        const at::Tensor h = Input(at::mm(rows, f.a_RI.to(at::kFloat).t()) * f.scale, compute);
        y = y + at::mm(h, f.b_OR.to(at::kFloat).t());
        if (f.g_O.defined()) y = y * f.g_O;
      }
      if (p.base->bias_O.defined()) y = y + p.base->bias_O;
      at::Tensor out = p.y_TO.slice(0, s.begin, s.end);
      out.copy_(y);
    }
  }
}

}  // namespace dorad::ops
