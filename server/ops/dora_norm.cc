#include "server/ops/dora_norm.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "server/base/check.h"

namespace dorad::ops {
namespace {

constexpr int64_t kChunkAlign = 64;

// The weight as [rows of the result, length of the norm].
at::Tensor Oriented(const at::Tensor& weight, NormAxis axis) {
  DORAD_CHECK(weight.dim() == 2 && weight.is_contiguous());
  return axis == NormAxis::kRows ? weight : weight.t();
}

// How many columns (or rows) of `bytes_each` fit into the budget; a multiple of 64, at least 64.
int64_t ChunkSize(int64_t budget, int64_t bytes_each) {
  const int64_t fitting = std::max<int64_t>(0, budget) / std::max<int64_t>(1, bytes_each);
  return std::max(kChunkAlign, fitting / kChunkAlign * kChunkAlign);
}

at::Tensor Fp32(const at::Tensor& t) { return t.to(at::kFloat); }

// Row sums of a∘b, summed in double: the three terms of the norm may cancel.
at::Tensor RowDots(const at::Tensor& a, const at::Tensor& b) {
  return at::sum(a * b, /*dim=*/1, /*keepdim=*/false, at::kDouble);
}

// u_OR = W Aᵀ and gram_RR = A Aᵀ, chunk by chunk of d_in.
void AccumulateProducts(const at::Tensor& weight_OI, const at::Tensor& a_RI, int64_t chunk,
                        at::Tensor& u_OR, at::Tensor& gram_RR) {
  const int64_t in = weight_OI.size(1);
  for (int64_t begin = 0; begin < in; begin += chunk) {
    const int64_t end = std::min(begin + chunk, in);
    const at::Tensor w = Fp32(weight_OI.slice(1, begin, end));
    const at::Tensor a_t = Fp32(a_RI.slice(1, begin, end)).t();
    u_OR.addmm_(w, a_t);
    gram_RR.addmm_(a_t.t(), a_t);
  }
}

}  // namespace

at::Tensor BaseSquaredNorms(const at::Tensor& weight, NormAxis axis, const NormOptions& options) {
  const at::Tensor w_OI = Oriented(weight, axis);
  const int64_t out = w_OI.size(0);
  const int64_t in = w_OI.size(1);
  at::Tensor sums = at::zeros({out}, at::kDouble);
  // A chunk lives twice: in fp32 and squared.
  const int64_t chunk = ChunkSize(options.chunk_budget_bytes, 8 * out);
  for (int64_t begin = 0; begin < in; begin += chunk) {
    const at::Tensor w = Fp32(w_OI.slice(1, begin, std::min(begin + chunk, in)));
    sums += RowDots(w, w);
  }
  return sums.to(at::kFloat);
}

at::Tensor FactoredNorms(const at::Tensor& weight, const at::Tensor& base_squared,
                         const at::Tensor& a, const at::Tensor& b, double scale, NormAxis axis,
                         const NormOptions& options) {
  const at::Tensor w_OI = Oriented(weight, axis);
  const int64_t out = w_OI.size(0);
  const int64_t in = w_OI.size(1);
  const int64_t rank = a.size(0);
  DORAD_CHECK(a.dim() == 2 && a.size(1) == in);
  DORAD_CHECK(b.dim() == 2 && b.size(0) == out && b.size(1) == rank);
  DORAD_CHECK(base_squared.scalar_type() == at::kFloat && base_squared.dim() == 1);
  DORAD_CHECK(base_squared.size(0) == out);
  at::Tensor squared = base_squared.to(at::kDouble);
  if (scale != 0.0) {
    at::Tensor u_OR = at::zeros({out, rank}, at::kFloat);
    at::Tensor gram_RR = at::zeros({rank, rank}, at::kFloat);
    const int64_t kept = (out + rank) * rank * 4;  // u and gram stay until the end
    AccumulateProducts(w_OI, a, ChunkSize(options.chunk_budget_bytes - kept, 4 * (out + rank)),
                       u_OR, gram_RR);
    // b in fp32, b∘u, b·gram and its product with b for a block of rows.
    const int64_t block = ChunkSize(options.chunk_budget_bytes - kept, 16 * rank);
    for (int64_t begin = 0; begin < out; begin += block) {
      const int64_t end = std::min(begin + block, out);
      const at::Tensor b_block = Fp32(b.slice(0, begin, end));
      at::Tensor target = squared.slice(0, begin, end);
      target += 2.0 * scale * RowDots(b_block, u_OR.slice(0, begin, end));
      target += scale * scale * RowDots(at::mm(b_block, gram_RR), b_block);
    }
  }
  // clamp_min keeps NaN.
  return squared.clamp_min_(0.0).sqrt_().to(at::kFloat);
}

at::Tensor MagnitudeScale(const at::Tensor& magnitude, const at::Tensor& norms, double eps) {
  DORAD_CHECK(norms.scalar_type() == at::kFloat && norms.dim() == 1);
  DORAD_CHECK(magnitude.numel() == norms.numel());
  return Fp32(magnitude).flatten() / norms.clamp_min(eps);
}

double NormEpsilon(at::ScalarType weight_dtype) {
  return weight_dtype == at::kFloat || weight_dtype == at::kDouble ? 1e-12 : 1e-6;
}

}  // namespace dorad::ops
