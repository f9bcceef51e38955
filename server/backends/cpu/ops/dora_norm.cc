#include "server/backends/cpu/ops/dora_norm.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "server/platform/check.h"

namespace dorad::ops {
namespace {

constexpr int64_t kAlign = 64;
constexpr int64_t kLeastRows = 256;
// Columns of W in a step of the product that amortize its cost.
constexpr int64_t kGoodColumns = 512;

// The weight as [rows of the result, length of the norm].
at::Tensor Oriented(const at::Tensor& weight, NormAxis axis) {
  DORAD_CHECK(weight.dim() == 2 && weight.is_contiguous());
  return axis == NormAxis::kRows ? weight : weight.t();
}

// How many units of `bytes_each` fit into the budget; a multiple of 64, at least `least`.
int64_t Fitting(int64_t budget, int64_t bytes_each, int64_t least) {
  const int64_t fitting = std::max<int64_t>(0, budget) / std::max<int64_t>(1, bytes_each);
  return std::max(least, fitting / kAlign * kAlign);
}

// The block of the weight in one step of the computation.
struct Block {
  int64_t rows;
  int64_t columns;
};

// Memory held for every output throughout: the sum in double and the fp32 result.
int64_t ResultBytes(int64_t out) { return 12 * out; }

// Each element lives in fp32, squared, and squared in double (`sum` converts its input first).
// Wide blocks first: rows are contiguous.
Block SquareBlock(int64_t out, int64_t in, int64_t budget) {
  const int64_t available = budget - ResultBytes(out);
  constexpr int64_t kElement = 16;
  const int64_t columns = std::min(in, Fitting(available, kElement * kLeastRows, kAlign));
  // A row's own sum, too.
  return {Fitting(available, kElement * columns + 8, kLeastRows), columns};
}

// The Gram matrix and the results stay until the end. A row needs, while W Aᵀ is summed, its row
// of u and a chunk of W in fp32; then u, b in fp32, b·gram, a product and that in double.
Block ProductBlock(int64_t out, int64_t in, int64_t rank, int64_t budget) {
  const int64_t available = budget - ResultBytes(out) - 4 * rank * rank;
  const int64_t while_summing = 4 * (rank + std::min(in, kGoodColumns));
  const int64_t afterwards = 24 * rank + 32;
  const int64_t rows =
      std::min(out, Fitting(available, std::max(while_summing, afterwards), kLeastRows));
  // A column lives in fp32 in the chunks of W and A.
  return {rows, Fitting(available - 4 * rows * rank, 4 * (rows + rank), kAlign)};
}

at::Tensor Fp32(const at::Tensor& t) { return t.to(at::kFloat); }

// Row sums of a∘b, summed in double: the three terms of the norm may cancel.
at::Tensor RowDots(const at::Tensor& a, const at::Tensor& b) {
  return at::sum(a * b, /*dim=*/1, /*keepdim=*/false, at::kDouble);
}

// x yᵀ in fp32, chunk by chunk of their columns.
at::Tensor Product(const at::Tensor& x, const at::Tensor& y, int64_t chunk) {
  at::Tensor product = at::zeros({x.size(0), y.size(0)}, at::kFloat);
  for (int64_t begin = 0; begin < x.size(1); begin += chunk) {
    const int64_t end = std::min(begin + chunk, x.size(1));
    product.addmm_(Fp32(x.slice(1, begin, end)), Fp32(y.slice(1, begin, end)).t());
  }
  return product;
}

// G = A Aᵀ. Unlike Product(a, a) it converts a chunk of A once.
at::Tensor Gram(const at::Tensor& a_RI, int64_t chunk) {
  at::Tensor gram_RR = at::zeros({a_RI.size(0), a_RI.size(0)}, at::kFloat);
  for (int64_t begin = 0; begin < a_RI.size(1); begin += chunk) {
    const at::Tensor a = Fp32(a_RI.slice(1, begin, std::min(begin + chunk, a_RI.size(1))));
    gram_RR.addmm_(a, a.t());
  }
  return gram_RR;
}

// Below this share of its terms' size, ‖W‖² + ‖s·B·A‖², a squared norm has lost digits of fp32.
constexpr double kLeastShare = 0.25;

// Squares the rows that have lost digits again, after the addition in double. terms: ‖W‖² +
// ‖s·B·A‖² of each row.
void SquareAfterAdding(const at::Tensor& w_OI, const at::Tensor& a, const at::Tensor& b,
                       double scale, const at::Tensor& terms, int64_t chunk, at::Tensor squared) {
  const at::Tensor lost = at::nonzero(squared < kLeastShare * terms).flatten();
  for (int64_t first = 0; first < lost.size(0); first += kLeastRows) {
    const at::Tensor rows = lost.slice(0, first, std::min(first + kLeastRows, lost.size(0)));
    const at::Tensor b_rows = b.index_select(0, rows).to(at::kDouble);
    at::Tensor sums = at::zeros({rows.size(0)}, at::kDouble);
    for (int64_t begin = 0; begin < w_OI.size(1); begin += chunk) {
      const int64_t end = std::min(begin + chunk, w_OI.size(1));
      at::Tensor sum = w_OI.slice(1, begin, end).index_select(0, rows).to(at::kDouble);
      sum.addmm_(b_rows, a.slice(1, begin, end).to(at::kDouble), 1.0, scale);
      sums += RowDots(sum, sum);
    }
    squared.index_copy_(0, rows, sums);
  }
}

}  // namespace

at::Tensor BaseSquaredNorms(const at::Tensor& weight, NormAxis axis, const NormOptions& options) {
  const at::Tensor w_OI = Oriented(weight, axis);
  const int64_t out = w_OI.size(0);
  const int64_t in = w_OI.size(1);
  at::Tensor sums = at::zeros({out}, at::kDouble);
  const Block block = SquareBlock(out, in, options.chunk_budget_bytes);
  for (int64_t row = 0; row < out; row += block.rows) {
    const int64_t row_end = std::min(row + block.rows, out);
    at::Tensor target = sums.slice(0, row, row_end);
    for (int64_t begin = 0; begin < in; begin += block.columns) {
      const int64_t end = std::min(begin + block.columns, in);
      const at::Tensor w = Fp32(w_OI.slice(0, row, row_end).slice(1, begin, end));
      target += RowDots(w, w);
    }
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
    const Block block = ProductBlock(out, in, rank, options.chunk_budget_bytes);
    const at::Tensor gram_RR = Gram(a, block.columns);
    for (int64_t begin = 0; begin < out; begin += block.rows) {
      const int64_t end = std::min(begin + block.rows, out);
      const at::Tensor u = Product(w_OI.slice(0, begin, end), a, block.columns);
      const at::Tensor b_block = Fp32(b.slice(0, begin, end));
      at::Tensor target = squared.slice(0, begin, end);
      const at::Tensor terms = target + scale * scale * RowDots(at::mm(b_block, gram_RR), b_block);
      target.copy_(terms + 2.0 * scale * RowDots(b_block, u));
      SquareAfterAdding(w_OI.slice(0, begin, end), a, b_block, scale, terms,
                        std::min(block.columns, kGoodColumns), target);
    }
  }
  return squared.sqrt_().to(at::kFloat);
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
