#include "server/backends/cpu/ops/dora_norm.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "tests/unit/support/test.h"

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

// Torch's CPU memory while it lives; counts what is held above what was held at its start. Blocks
// may outlive it: they count on shared numbers.
class CountingAllocator final : public c10::Allocator {
 public:
  CountingAllocator() : inner_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, kPriority); }
  ~CountingAllocator() override { c10::SetCPUAllocator(inner_, kPriority); }

  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{inner_->allocate(bytes), static_cast<int64_t>(bytes), held_};
    held_->now += block->bytes;
    held_->peak = std::max(held_->peak, held_->now);
    return {block->data.get(), block, &Free, block->data.device()};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    inner_->copy_data(to, from, bytes);
  }
  int64_t peak() const { return held_->peak; }

 private:
  static constexpr uint8_t kPriority = 100;
  struct Held {
    int64_t now = 0;
    int64_t peak = 0;
  };
  struct Block {
    c10::DataPtr data;
    int64_t bytes;
    std::shared_ptr<Held> held;
  };
  static void Free(void* context) {
    auto* block = static_cast<Block*>(context);
    block->held->now -= block->bytes;
    delete block;
  }

  c10::Allocator* const inner_;
  const std::shared_ptr<Held> held_ = std::make_shared<Held>();
};

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

TEST(DoraNormTest, RowsInWhichTheTermsCancelKeepTheirDigits) {
  at::manual_seed(2);
  for (const double left : {0.6, 0.4, 0.3, 1e-1, 1e-2, 1e-3, 1e-4}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      // s·B·A undoes all but a part of W in two rows of three.
      const at::Tensor b = (at::randn({600, 32})).to(dtype);
      const at::Tensor a = (at::randn({32, 700}) * 0.1).to(dtype);
      at::Tensor w = at::mm(b.to(at::kFloat), a.to(at::kFloat)) * (left - 1);
      w.slice(0, 0, 600, 3).copy_(at::randn({200, 700}));
      w = w.to(dtype);
      for (const int64_t budget : {64 << 20, 0}) {
        const at::Tensor norms = Factored(w, a, b, 1.0, NormAxis::kRows, budget);
        EXPECT_LT(RelativeError(norms, DenseNorms(w, a, b, 1.0)), 1e-6) << left << " " << dtype;
      }
    }
  }
}

TEST(DoraNormTest, RowsThatCancelWhollyHaveNormZero) {
  const at::Tensor b = at::ones({4, 1}), a = at::randn({1, 512});
  const at::Tensor w = -at::mm(b, a);
  const at::Tensor smaller = BaseSquaredNorms(w, NormAxis::kRows, {}) * 0.999f;
  const at::Tensor norms = FactoredNorms(w, smaller, a, b, 1.0, NormAxis::kRows, {});
  EXPECT_TRUE((norms == 0.0f).all().item<bool>());
}

TEST(DoraNormTest, TheChunkBudgetDoesNotMatter) {
  at::manual_seed(3);
  const at::Tensor w = at::randn({700, 1000}), a = at::randn({20, 1000}) * 0.1,
                   b = at::randn({700, 20}) * 0.1;
  const at::Tensor whole = Factored(w, a, b, 1.5);
  for (int64_t budget : {0, 100'000, 300'000, 1'000'000}) {
    EXPECT_LT(RelativeError(Factored(w, a, b, 1.5, NormAxis::kRows, budget), whole), 1e-6)
        << budget;
  }
}

TEST(DoraNormTest, WhatACallHoldsStaysUnderTheBudget) {
  at::manual_seed(6);
  constexpr int64_t kBudget = 4 << 20;
  struct Case {
    int64_t out, in, rank;
    NormAxis axis;
    at::ScalarType dtype;
  };
  for (const Case& c : {Case{10000, 512, 384, NormAxis::kRows, at::kFloat},
                        Case{5000, 200, 384, NormAxis::kRows, at::kBFloat16},
                        Case{25000, 128, 8, NormAxis::kRows, at::kBFloat16},
                        Case{512, 5000, 384, NormAxis::kCols, at::kBFloat16},
                        Case{5000, 256, 64, NormAxis::kCols, at::kFloat},
                        Case{256, 8192, 384, NormAxis::kRows, at::kBFloat16}}) {
    at::Tensor w = at::randn({c.out, c.in}).to(c.dtype);
    if (c.axis == NormAxis::kCols) w = w.t().contiguous();
    const at::Tensor a = (at::randn({c.rank, c.in}) * 0.1).to(c.dtype);
    const at::Tensor b = (at::randn({c.out, c.rank}) * 0.1).to(c.dtype);
    at::Tensor squared, norms;
    {
      const CountingAllocator allocator;
      squared = BaseSquaredNorms(w, c.axis, {kBudget});
      EXPECT_GT(allocator.peak(), 0);
      EXPECT_LE(allocator.peak(), kBudget) << "squared, " << c.out << "x" << c.in;
    }
    {
      const CountingAllocator allocator;
      norms = FactoredNorms(w, squared, a, b, 0.5, c.axis, {kBudget});
      EXPECT_GT(allocator.peak(), 0);
      EXPECT_LE(allocator.peak(), kBudget) << c.out << "x" << c.in << " r " << c.rank;
    }
    EXPECT_LT(RelativeError(norms, Factored(w, a, b, 0.5, c.axis, 1 << 30)), 1e-6);
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
