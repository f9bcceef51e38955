#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <tuple>

#include "server/ops/dora_norm.h"

namespace dorad::ops {
namespace {

at::Tensor DenseNorms(const at::Tensor& w, const at::Tensor& a, const at::Tensor& b, double s) {
  const at::Tensor dense = w.to(at::kDouble) + s * at::mm(b.to(at::kDouble), a.to(at::kDouble));
  return dense.square().sum(1).sqrt();
}

at::Tensor Factored(const at::Tensor& w, const at::Tensor& a, const at::Tensor& b, double s,
                    NormAxis axis = NormAxis::kRows, int64_t budget = 64 << 20) {
  const NormOptions options{budget};
  return FactoredNorms(w, BaseSquaredNorms(w, axis, options), a, b, s, axis, options);
}

double RelativeError(const at::Tensor& actual, const at::Tensor& expected) {
  return ((actual - expected).abs() / expected).max().item<double>();
}

TEST(DoraNormTest, IsWithinOneMillionthOfTheDenseNormInDouble) {
  at::manual_seed(1);
  for (const auto& [out, in, rank] :
       {std::tuple{512, 512, 384}, {64, 28672, 64}, {1536, 576, 16}, {100, 4097, 33}, {3, 5, 2}}) {
    const at::Tensor w = at::randn({out, in}) * 0.05;
    const at::Tensor a = at::randn({rank, in}) * 0.05;
    const at::Tensor b = at::randn({out, rank}) * 0.05;
    for (double s : {0.5, 2.0, -1.0}) {
      EXPECT_LT(RelativeError(Factored(w, a, b, s), DenseNorms(w, a, b, s)), 1e-6)
          << out << "x" << in << " r " << rank << " s " << s;
    }
  }
}

TEST(DoraNormTest, CancellationKeepsTheErrorSmallAgainstTheWeight) {
  // s·B·A undoes 99 % of W: the terms are 10^4 times their sum.
  at::manual_seed(2);
  const at::Tensor b = at::randn({256, 32}), a = at::randn({32, 512}) * 0.1;
  const at::Tensor w = -0.99 * at::mm(b, a);
  const at::Tensor error = (Factored(w, a, b, 1.0).square() - DenseNorms(w, a, b, 1.0).square());
  EXPECT_LT((error.abs() / w.to(at::kDouble).square().sum(1)).max().item<double>(), 2e-6);
}

TEST(DoraNormTest, ANegativeRadicandBecomesZero) {
  const at::Tensor b = at::ones({4, 1}), a = at::randn({1, 512});
  const at::Tensor w = -at::mm(b, a);
  const at::Tensor smaller = BaseSquaredNorms(w, NormAxis::kRows, {}) * 0.999f;
  const at::Tensor norms = FactoredNorms(w, smaller, a, b, 1.0, NormAxis::kRows, {});
  EXPECT_TRUE((norms == 0.0f).all().item<bool>());
}

TEST(DoraNormTest, TheChunkBudgetDoesNotMatter) {
  at::manual_seed(3);
  const at::Tensor w = at::randn({300, 1000}), a = at::randn({20, 1000}) * 0.1,
                   b = at::randn({300, 20}) * 0.1;
  const at::Tensor whole = Factored(w, a, b, 1.5);
  for (int64_t budget : {0, 100'000, 300'000, 1'000'000}) {
    EXPECT_LT(RelativeError(Factored(w, a, b, 1.5, NormAxis::kRows, budget), whole), 1e-6)
        << budget;
  }
}

TEST(DoraNormTest, ColumnsAreTheNormsOfTheTransposedWeight) {
  at::manual_seed(4);
  const at::Tensor w = at::randn({700, 48}), a = at::randn({8, 700}) * 0.2,
                   b = at::randn({48, 8}) * 0.2;
  const at::Tensor expected = DenseNorms(w.t(), a, b, 0.5);
  for (int64_t budget : {64 << 20, 0}) {
    EXPECT_LT(RelativeError(Factored(w, a, b, 0.5, NormAxis::kCols, budget), expected), 1e-6);
  }
}

TEST(DoraNormTest, TakesBf16WeightsAndFactorsAtTheirValue) {
  at::manual_seed(5);
  const at::Tensor w = at::randn({64, 320}).to(at::kBFloat16),
                   a = at::randn({8, 320}).to(at::kBFloat16),
                   b = at::randn({64, 8}).to(at::kBFloat16);
  EXPECT_LT(RelativeError(Factored(w, a, b, 0.25), DenseNorms(w, a, b, 0.25)), 1e-6);
}

TEST(DoraNormTest, ScaleZeroIgnoresTheFactors) {
  const at::Tensor w = at::randn({8, 100});
  const at::Tensor nan = at::full({8, 4}, NAN);
  const at::Tensor norms = Factored(w, at::full({4, 100}, NAN), nan, 0.0);
  EXPECT_LT(RelativeError(norms, w.to(at::kDouble).square().sum(1).sqrt()), 1e-6);
}

TEST(DoraNormTest, NanStaysInItsRow) {
  at::Tensor w = at::randn({4, 100});
  w[2][50] = NAN;
  const at::Tensor norms = Factored(w, at::randn({3, 100}), at::randn({4, 3}), 1.0);
  const at::Tensor g = MagnitudeScale(at::ones({4}), norms, 1e-12);
  for (int64_t r = 0; r < 4; ++r) {
    EXPECT_EQ(std::isnan(norms[r].item<float>()), r == 2);
    EXPECT_EQ(std::isnan(g[r].item<float>()), r == 2);
  }
}

TEST(DoraNormTest, AZeroRowIsDividedByEpsilon) {
  const at::Tensor norms = Factored(at::zeros({2, 64}), at::zeros({1, 64}), at::zeros({2, 1}), 1.0);
  EXPECT_FLOAT_EQ(MagnitudeScale(at::ones({2}), norms, NormEpsilon(at::kFloat))[0].item<float>(),
                  1e12f);
  EXPECT_FLOAT_EQ(MagnitudeScale(at::ones({2}), norms, NormEpsilon(at::kBFloat16))[1].item<float>(),
                  1e6f);
}

}  // namespace
}  // namespace dorad::ops
