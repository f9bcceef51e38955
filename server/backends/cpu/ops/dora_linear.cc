#include "server/backends/cpu/ops/dora_linear.h"

#include <ATen/core/Tensor.h>

#include "server/backends/cpu/simd/backend.h"
#include "server/platform/check.h"

namespace dorad::ops {
namespace {

bool IsMatrix(const at::Tensor& t, int64_t rows, int64_t cols) {
  return t.dim() == 2 && t.size(0) == rows && t.size(1) == cols && t.is_contiguous();
}

bool IsStored(const at::Tensor& t) {
  return t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16;
}

bool IsVector(const at::Tensor& t, int64_t size) {
  return t.scalar_type() == at::kFloat && t.dim() == 1 && t.size(0) == size && t.is_contiguous();
}

void CheckFactors(const AdapterFactors& f, int64_t in, int64_t out) {
  const int64_t rank = f.rank();
  DORAD_CHECK(rank >= 1);
  DORAD_CHECK(IsStored(f.a_RI) && f.a_RI.scalar_type() == f.b_OR.scalar_type());
  DORAD_CHECK(IsMatrix(f.a_RI, rank, in));
  DORAD_CHECK(IsMatrix(f.b_OR, out, rank));
  DORAD_CHECK(!f.g_O.defined() || IsVector(f.g_O, out));
}

void CheckProjection(const Projection& p, int64_t rows, int64_t in) {
  DORAD_CHECK(p.base != nullptr);
  const at::Tensor& weight = p.base->weight_OI;
  const int64_t out = weight.size(0);
  DORAD_CHECK(IsStored(weight) && IsMatrix(weight, out, in));
  DORAD_CHECK(!p.base->bias_O.defined() || IsVector(p.base->bias_O, out));
  DORAD_CHECK(p.y_TO.scalar_type() == at::kFloat && IsMatrix(p.y_TO, rows, out));
  int64_t next = 0;
  for (const RowSegment& s : p.segments) {
    DORAD_CHECK(s.begin == next && s.end >= s.begin);
    next = s.end;
    if (s.factors != nullptr) CheckFactors(*s.factors, in, out);
  }
  DORAD_CHECK(next == rows);
}

void CheckArguments(const at::Tensor& x, absl::Span<const Projection> projections) {
  DORAD_CHECK(x.scalar_type() == at::kFloat && x.dim() == 2 && x.is_contiguous());
  for (const Projection& p : projections) CheckProjection(p, x.size(0), x.size(1));
}

}  // namespace

void DoraLinear(const at::Tensor& x_TI, absl::Span<const Projection> projections,
                ComputeDType compute) {
  CheckArguments(x_TI, projections);
  cpu::DoraLinear(x_TI, projections, compute);
}

}  // namespace dorad::ops
