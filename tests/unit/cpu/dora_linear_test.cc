#include "server/backends/cpu/ops/dora_linear.h"

#include <ATen/ATen.h>

#include "server/backends/cpu/simd/kernels.h"
#include "tests/unit/support/test.h"

namespace dorad::ops {
namespace {

at::Tensor Random(at::IntArrayRef sizes, double scale, at::ScalarType type = at::kFloat) {
  return (at::randn(sizes, at::kFloat) * scale).to(type);
}

struct Shape {
  int64_t in, out;
};

// A linear with adapters of several kinds: DoRA, LoRA, different ranks and dtypes.
struct Case {
  BaseLinear base;
  std::vector<AdapterFactors> adapters;

  Case(Shape shape, at::ScalarType base_type, bool bias) {
    at::manual_seed(static_cast<uint64_t>(shape.in * 1000 + shape.out));
    base.weight_OI = Random({shape.out, shape.in}, 0.1, base_type);
    if (bias) base.bias_O = Random({shape.out}, 1.0);
    for (const auto& [rank, type, dora] : {std::tuple{16, at::kFloat, true},
                                           {5, at::kFloat, true},
                                           {40, at::kBFloat16, true},
                                           {8, at::kBFloat16, false},
                                           {67, at::kFloat, false}}) {
      AdapterFactors f;
      f.a_RI = Random({rank, shape.in}, 0.1, type);
      f.b_OR = Random({shape.out, rank}, 0.1, type);
      if (dora) f.g_O = at::rand({shape.out}) + 0.5;
      f.scale = 0.5f + 0.1f * static_cast<float>(rank);
      adapters.push_back(f);
    }
  }

  // adapter -1: the base model.
  const AdapterFactors* Factors(int adapter) const {
    return adapter < 0 ? nullptr : &adapters[adapter];
  }

  at::Tensor Run(const at::Tensor& x, const std::vector<RowSegment>& segments, ComputeDType compute,
                 bool reference = false) const {
    const at::Tensor y = at::full({x.size(0), base.weight_OI.size(0)}, 7.0f);
    const Projection projection{&base, segments, y};
    (reference ? DoraLinearReference : DoraLinear)(x, {&projection, 1}, compute);
    return y;
  }
};

// One adapter index a row, in runs, over all adapters and the base.
std::vector<RowSegment> MixedSegments(const Case& c, int64_t rows, int64_t run) {
  std::vector<RowSegment> segments;
  int adapter = -1;
  for (int64_t begin = 0; begin < rows; begin += run) {
    segments.push_back({c.Factors(adapter), begin, std::min(begin + run, rows)});
    adapter = adapter + 1 == static_cast<int>(c.adapters.size()) ? -1 : adapter + 1;
  }
  return segments;
}

double MaxError(const at::Tensor& actual, const at::Tensor& expected) {
  return ((actual - expected).abs().max() / expected.abs().max()).item<double>();
}

bool SameBits(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() == b.numel() &&
         std::memcmp(a.contiguous().data_ptr(), b.contiguous().data_ptr(), a.numel() * 4) == 0;
}

class DoraLinearTest : public ::testing::TestWithParam<const cpu::Kernels*> {
 protected:
  void SetUp() override { cpu::SetActiveKernels(*GetParam()); }
  void TearDown() override { cpu::SetActiveKernels(**cpu::SupportedKernels().begin()); }
};

TEST_P(DoraLinearTest, AgreesWithTheReference) {
  for (Shape shape : {Shape{576, 192}, {64, 64}, {77, 51}, {1, 3}, {33, 8}, {1536, 101}}) {
    for (at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      const Case c(shape, type, shape.out % 2 == 0);
      for (int64_t rows : {1, 3, 7, 13, 40, 210}) {
        const at::Tensor x = Random({rows, shape.in}, 1.0);
        for (int64_t run : {int64_t{1}, int64_t{4}, rows}) {
          const auto segments = MixedSegments(c, rows, run);
          for (ComputeDType compute : {ComputeDType::kF32, ComputeDType::kBF16}) {
            const at::Tensor expected = c.Run(x, segments, compute, /*reference=*/true);
            const double error = MaxError(c.Run(x, segments, compute), expected);
            // In bf16 an h on the edge of two bf16 values may round either way.
            EXPECT_LT(error, compute == ComputeDType::kF32 ? 3e-6 : 3e-3)
                << shape.in << "x" << shape.out << " rows " << rows << " run " << run;
          }
        }
      }
    }
  }
}

TEST_P(DoraLinearTest, ARowDoesNotDependOnTheRowsBesideIt) {
  for (Shape shape : {Shape{576, 96}, {77, 51}, {130, 37}}) {
    for (at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      const Case c(shape, type, true);
      for (ComputeDType compute : {ComputeDType::kF32, ComputeDType::kBF16}) {
        const at::Tensor x = Random({70, shape.in}, 1.0);
        for (int64_t run : {1, 5, 23}) {
          const auto all = MixedSegments(c, 70, run);
          std::vector<at::Tensor> solo;
          for (const RowSegment& s : all) {
            for (int64_t r = s.begin; r < s.end; ++r) {
              solo.push_back(c.Run(x.slice(0, r, r + 1), {{s.factors, 0, 1}}, compute));
            }
          }
          for (int64_t rows = 1; rows <= 70; rows += rows < 20 ? 1 : 7) {
            const at::Tensor y = c.Run(x.slice(0, 0, rows), MixedSegments(c, rows, run), compute);
            for (int64_t r = 0; r < rows; ++r) {
              ASSERT_TRUE(SameBits(y[r], solo[r][0])) << "row " << r << " of " << rows;
            }
          }
        }
      }
    }
  }
}

TEST_P(DoraLinearTest, ARowIsTheSameInAPrefillOfManyRows) {
  const Case c({192, 160}, at::kBFloat16, false);
  const at::Tensor x = Random({500, 192}, 1.0);
  const at::Tensor y = c.Run(x, MixedSegments(c, 500, 130), ComputeDType::kF32);
  for (const RowSegment& s : MixedSegments(c, 500, 130)) {
    for (int64_t r = s.begin; r < s.end; r += 17) {
      const at::Tensor solo = c.Run(x.slice(0, r, r + 1), {{s.factors, 0, 1}}, ComputeDType::kF32);
      ASSERT_TRUE(SameBits(y[r], solo[0])) << "row " << r;
    }
  }
}

TEST_P(DoraLinearTest, AGroupEqualsItsMembersAlone) {
  const Case a({96, 64}, at::kBFloat16, true);
  const Case b({96, 17}, at::kFloat, false);
  const at::Tensor x = Random({9, 96}, 1.0);
  const auto segments_a = MixedSegments(a, 9, 2);
  const auto segments_b = MixedSegments(b, 9, 3);
  const at::Tensor y_a = at::empty({9, 64});
  const at::Tensor y_b = at::empty({9, 17});
  const Projection group[] = {{&a.base, segments_a, y_a}, {&b.base, segments_b, y_b}};
  DoraLinear(x, group, ComputeDType::kF32);
  EXPECT_TRUE(SameBits(y_a, a.Run(x, segments_a, ComputeDType::kF32)));
  EXPECT_TRUE(SameBits(y_b, b.Run(x, segments_b, ComputeDType::kF32)));
}

TEST_P(DoraLinearTest, ReadsNothingBeyondAWeight) {
  // What follows a weight in memory is NaN, and K and R end in the middle of a vector.
  for (at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor pool = at::full({10000}, NAN).to(type);
    auto inside = [&](int64_t offset, int64_t rows, int64_t cols) {
      at::Tensor t = pool.slice(0, offset, offset + rows * cols).view({rows, cols});
      t.copy_(Random({rows, cols}, 0.3));
      return t;
    };
    BaseLinear base{inside(13, 7, 43), {}};
    AdapterFactors f;
    f.a_RI = inside(1001, 3, 43);
    f.b_OR = inside(2001, 7, 3);
    f.scale = 2.0f;
    const RowSegment segment{&f, 0, 2};
    const at::Tensor y = at::empty({2, 7});
    const Projection projection{&base, {&segment, 1}, y};
    DoraLinear(Random({2, 43}, 1.0), {&projection, 1}, ComputeDType::kF32);
    EXPECT_TRUE(at::isfinite(y).all().item<bool>());
  }
}

TEST_P(DoraLinearTest, ANanStaysInItsRow) {
  const Case c({64, 32}, at::kBFloat16, false);
  at::Tensor x = Random({8, 64}, 1.0);
  x[3][10] = NAN;
  const at::Tensor y = c.Run(x, MixedSegments(c, 8, 8), ComputeDType::kF32);
  EXPECT_TRUE(at::isnan(y[3]).all().item<bool>());
  EXPECT_TRUE(at::isfinite(y.slice(0, 0, 3)).all().item<bool>());
  EXPECT_TRUE(at::isfinite(y.slice(0, 4, 8)).all().item<bool>());
}

TEST_P(DoraLinearTest, NoRowsIsNothingToDo) {
  const Case c({64, 32}, at::kFloat, false);
  EXPECT_EQ(c.Run(at::empty({0, 64}), {}, ComputeDType::kF32).numel(), 0);
}

TEST(DoraLinearCheckTest, RefusesSegmentsWithAGap) {
  const Case c({64, 32}, at::kFloat, false);
  EXPECT_DEATH(c.Run(at::zeros({4, 64}), {{nullptr, 0, 1}, {nullptr, 2, 4}}, ComputeDType::kF32),
               "CHECK failed");
}

INSTANTIATE_TEST_SUITE_P(Variants, DoraLinearTest,
                         ::testing::ValuesIn(cpu::SupportedKernels().begin(),
                                             cpu::SupportedKernels().end()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace dorad::ops
