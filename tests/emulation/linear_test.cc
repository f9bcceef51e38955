// The projection in the emulator, against a double reference: every cut of W and K, every number of
// tiles of the batch, mixed adapters, rings of few stages.
#include <cmath>

#include "gtest/gtest.h"
#include "kernels/dora/linear_grid.cuh"
#include "kernels/dora/linear_launch.h"
#include "kernels/isa/mma/isa.cuh"
#include "kernels/isa/sm90/isa.cuh"
#include "tests/emulation/emulator.h"
#include "tests/emulation/random_layer.h"

namespace dorad::kernels {
namespace {

using emulation::Emulator;

struct Cut {
  int panel_rows;
  int splits;
  int teams;  // of the shrink
};

struct Case {
  const char* name;
  DoraLinearShape shape;
  Cut cut;
  std::vector<std::vector<int>> ranks;  // [slot][part]
};

class Layer : public RandomLayer {
 public:
  Layer(const Case& c, KernelIsa isa, std::mt19937* random)
      : RandomLayer(c.shape, kDoraLinearMaxRows, /*has_bias=*/true, c.ranks, random),
        case_(c),
        isa_(isa) {}

  // Rows 0.. of x under `segments`: y, as fp32. may_adapt: with the kernel that takes adapters.
  std::vector<float> Run(std::vector<RowSegment> segments, bool y_fp32, bool may_adapt = true) {
    const int rows = segments.back().end;
    const auto num_segments = static_cast<int32_t>(segments.size());
    segments.resize(rows);
    return RunInto(rows, y_fp32, [&](void* y) {
      auto params = ParamsOf<DoraLinearParams>(0, rows, isa_, y, y_fp32);
      if (!may_adapt) params.max_rank = 0;
      params.segments = segments.data();
      params.num_segments = &num_segments;
      Workspace workspace(DoraLinearWorkspaceBytes(shape_, rows, params.max_rank));
      params.workspace = workspace.data();
      params.workspace_bytes = workspace.bytes();
      ASSERT_EQ(Launch(params), cudaSuccess);
      Emulator::Get().Run();
      EXPECT_TRUE(workspace.CountersAreZero());
    });
  }

  std::vector<double> Reference(int row, int slot) const {
    std::vector<double> y;
    const int in = case_.shape.in;
    const auto dot = [&](const __nv_bfloat16* line) {
      double sum = 0.0;
      for (int k = 0; k < in; ++k) {
        sum += static_cast<double>(__bfloat162float(line[k])) *
               __bfloat162float(x_[size_t{1} * row * in + k]);
      }
      return sum;
    };
    for (int part = 0, first = 0; part < case_.shape.parts; first += case_.shape.out[part++]) {
      const DoraFactors factors =
          slot < 0 ? DoraFactors() : factors_[slot * case_.shape.parts + part];
      std::vector<double> h;
      for (int r = 0; r < factors.rank; ++r) {
        h.push_back(factors.scale * dot(factors.a + size_t{1} * r * in));
      }
      for (int n = 0; n < case_.shape.out[part]; ++n) {
        double sum = dot(w_.data() + size_t{1} * (first + n) * in);
        for (int r = 0; r < factors.rank; ++r) {
          sum += h[r] * __bfloat162float(factors.b[size_t{1} * n * factors.ldb + r]);
        }
        if (factors.rank > 0 && factors.g != nullptr) sum *= factors.g[n];
        y.push_back(sum + bias_[first + n]);
      }
    }
    return y;
  }

 private:
  // As production does it with such a plan, with a ring of few stages: some blocks have several
  // panels, some have none, and some have no part of the shrink.
  cudaError_t Launch(const DoraLinearParams& params) {
    const bool adapted = params.max_rank > 0;
    const int splits = case_.cut.splits;
    Emulator::Get().device.blocks_at_once = 1000;
    LinearPlan plan;
    if (isa_ == KernelIsa::kMma) {
      plan = PlanMmaPieces(shape_, params.rows, adapted, 2 * (case_.cut.teams * kLinearSlices + 2),
                           splits)
                 .plan;
    } else {
      plan.panel_rows = case_.cut.panel_rows;
      plan.splits = splits;
      plan.log_splits = splits - 1;
      plan.panels = CeilDiv(out_, plan.panel_rows);
      plan.chunks = CeilDiv(shape_.in, kLinearStageK);
      plan.a_chunks = CeilDiv(plan.chunks, kLinearSlices);
    }
    const int processors =
        (adapted ? case_.cut.teams * kLinearSlices + 2 : 4 * splits) * plan.row_groups;
    if (isa_ == KernelIsa::kMma) {
      if (plan.group_rows > 64) {
        ChooseStages<MmaIsa<1, 4, 2>, 2>(plan, adapted);
      } else if (plan.group_rows > 32) {
        ChooseStages<MmaIsa<4>, 1>(plan, adapted);
      } else {
        ChooseStages<MmaIsa<2>, 1>(plan, adapted);
      }
      return LaunchLinearMma(params, plan, processors, nullptr);
    }
    if (params.rows > 128) {
      ChooseStages<Sm90Isa, 4>(plan, adapted);
    } else if (params.rows > 64) {
      ChooseStages<Sm90Isa, 2>(plan, adapted);
    } else {
      ChooseStages<Sm90Isa, 1>(plan, adapted);
    }
    return LaunchLinearSm90(params, plan, processors, nullptr);
  }

  // Shared memory for 2 to 4 stages, or a few more for a small batch.
  template <typename Isa, int kM>
  void ChooseStages(const LinearPlan& plan, bool adapted) {
    const int stages = 2 + static_cast<int>(random_() % 3);
    const auto choose = [&](auto panel, auto is_adapted) {
      if constexpr (Isa::kHasClusters || IsMmaPanel(kM, panel, is_adapted)) {
        int& bytes = Emulator::Get().device.dynamic_bytes;
        bytes = 0;
        while (FitRing<Isa, kM, panel, is_adapted>(plan.splits, 64 * kM, bytes).stages < stages) {
          bytes += 512;
        }
      } else {
        FAIL() << "no panels of " << panel << " rows for " << kM << " tiles";
      }
    };
    const auto choose_form = [&](auto panel) {
      if (adapted) {
        choose(panel, std::true_type());
      } else {
        choose(panel, std::false_type());
      }
    };
    switch (plan.panel_rows) {
      case 32:
        return choose_form(std::integral_constant<int, 32>());
      case 64:
        return choose_form(std::integral_constant<int, 64>());
      case 96:
        return choose_form(std::integral_constant<int, 96>());
      case 128:
        return choose_form(std::integral_constant<int, 128>());
      default:
        return choose_form(std::integral_constant<int, 192>());
    }
  }

  const Case case_;
  const KernelIsa isa_;
};

// The base, then slots 0, 2 and 1.
std::vector<RowSegment> Deal(int rows) {
  if (rows < 4) return {{1, 0, rows}};
  return {{-1, 0, rows / 5},
          {0, rows / 5, rows / 3},
          {2, rows / 3, rows * 2 / 3},
          {1, rows * 2 / 3, rows}};
}

class EmulatedLinearTest : public ::testing::TestWithParam<std::tuple<Case, KernelIsa>> {
 protected:
  Layer MakeLayer() {
    return Layer(std::get<Case>(GetParam()), std::get<KernelIsa>(GetParam()), &emulator_.random());
  }

  Emulator emulator_{7};
};

TEST_P(EmulatedLinearTest, MatchesTheReferenceWithTheSameBitsInEveryBatch) {
  Layer layer = MakeLayer();
  std::map<std::pair<int, int>, std::vector<float>> seen;  // by row and slot
  for (const int rows : {1, 13, 70, 130}) {
    SCOPED_TRACE(testing::Message() << rows << " rows");
    const std::vector<RowSegment> segments = Deal(rows);
    std::vector<float> y;
    std::vector<float> rounded;
    ASSERT_NO_THROW(y = layer.Run(segments, /*y_fp32=*/true));
    if (rows < 64) {
      ASSERT_NO_THROW(rounded = layer.Run(segments, /*y_fp32=*/false));
    }
    for (const RowSegment& segment : segments) {
      if (rows < 64 || (rows == 70 && segment.end == rows)) {
        // Alone with its adapter, which small batches fetch in another order.
        const std::vector<float> alone = layer.Run({{segment.slot, 0, segment.end}}, true);
        for (size_t i = size_t{1} * segment.begin * layer.out(); i < alone.size(); ++i) {
          ASSERT_EQ(alone[i], y[i]) << "slot " << segment.slot << " value " << i;
        }
      }
      for (int row = segment.begin; row < segment.end; ++row) {
        const auto line = y.begin() + size_t{1} * row * layer.out();
        const std::vector<float> got(line, line + layer.out());
        const auto [first, is_new] = seen.try_emplace({row, segment.slot}, got);
        EXPECT_EQ(std::memcmp(first->second.data(), got.data(), got.size() * sizeof(float)), 0)
            << "row " << row;
        if (!is_new || (rows > 64 && row % 9 != 0)) continue;
        const std::vector<double> expected = layer.Reference(row, segment.slot);
        double difference = 0.0;
        double size = 0.0;
        for (int n = 0; n < layer.out(); ++n) {
          difference += std::pow(got[n] - expected[n], 2);
          size += std::pow(expected[n], 2);
          if (!rounded.empty()) {
            EXPECT_EQ(rounded[size_t{1} * row * layer.out() + n],
                      __bfloat162float(__float2bfloat16(got[n])));
          }
        }
        // h is rounded to bf16.
        EXPECT_LT(std::sqrt(difference / size), 2e-3) << "row " << row << " slot " << segment.slot;
      }
    }
    if (HasFailure()) return;
  }
}

TEST_P(EmulatedLinearTest, ServesABatchOfTheBaseAloneWithTheSameBitsInBothForms) {
  Layer layer = MakeLayer();
  for (const int rows : {9, 130}) {
    std::vector<float> y;
    std::vector<float> base;
    ASSERT_NO_THROW(y = layer.Run({{-1, 0, rows}}, /*y_fp32=*/true));
    ASSERT_NO_THROW(base = layer.Run({{-1, 0, rows}}, /*y_fp32=*/true, /*may_adapt=*/false));
    EXPECT_EQ(std::memcmp(y.data(), base.data(), y.size() * sizeof(float)), 0);
    for (int row = 0; row < rows; row += 8) {
      const std::vector<double> expected = layer.Reference(row, -1);
      for (int n = 0; n < layer.out(); ++n) {
        EXPECT_NEAR(y[size_t{1} * row * layer.out() + n], expected[n], 1e-4);
      }
    }
  }
}

// More adapters than magnitudes are kept of, and than one round numbers.
class EmulatedLinearIsaTest : public ::testing::TestWithParam<KernelIsa> {};

TEST_P(EmulatedLinearIsaTest, ServesManyAdapters) {
  Emulator emulator(11);
  Case c = {"Many", {128, 3, {48, 16, 32}}, {32, 1, 1}, {}};
  for (int slot = 0; slot < 40; ++slot) {
    c.ranks.push_back({slot % 7 * 9, slot % 3 * 40, 5 + slot % 2 * 11});
  }
  Layer layer(c, GetParam(), &emulator.random());
  for (const int rows : {43, 140}) {
    std::vector<RowSegment> segments;
    for (int row = 0; row < rows; ++row) {
      segments.push_back({row % 41 == 40 ? -1 : row % 41, row, row + 1});
    }
    std::vector<float> y;
    ASSERT_NO_THROW(y = layer.Run(segments, /*y_fp32=*/true));
    for (const RowSegment& segment : segments) {
      const std::vector<double> expected = layer.Reference(segment.begin, segment.slot);
      for (int n = 0; n < layer.out(); ++n) {
        ASSERT_NEAR(y[size_t{1} * segment.begin * layer.out() + n], expected[n], 2e-2)
            << "row " << segment.begin;
      }
    }
  }
}

const Case kCases[] = {
    {"ThreePartsAndTwoSplits",
     {1024, 3, {64, 16, 32}},
     {64, 2, 2},
     {{40, 8, 16}, {0, 100, 5}, {200, 16, 64}}},
    {"NarrowPanelsAndAnOddWidth", {576, 1, {72}}, {32, 1, 1}, {{24}, {100}, {8}}},
    {"PartsThatEndInAPanel", {200, 2, {112, 100}}, {96, 1, 3}, {{24, 8}, {100, 7}, {72, 300}}},
    {"SeveralPanelsABlock", {576, 2, {512, 300}}, {32, 1, 1}, {{24, 70}, {100, 0}, {8, 40}}},
    {"SeveralShortPanelsABlock", {128, 2, {800, 620}}, {32, 1, 1}, {{24, 70}, {100, 0}, {8, 40}}},
    {"HalvesOfUnevenWidth", {640, 1, {290}}, {96, 2, 1}, {{64}, {130}, {8}}},
    {"WidePanels", {128, 1, {250}}, {192, 1, 2}, {{16}, {24}, {130}}},
    {"RanksThatShareAStage", {256, 2, {96, 130}}, {64, 2, 1}, {{16, 8}, {12, 30}, {5, 25}}},
};

std::string NameOf(KernelIsa isa) { return isa == KernelIsa::kSm90 ? "Sm90" : "Mma"; }

const auto kIsas = testing::Values(KernelIsa::kSm90, KernelIsa::kMma);

INSTANTIATE_TEST_SUITE_P(Cuts, EmulatedLinearTest,
                         testing::Combine(testing::ValuesIn(kCases), kIsas), [](const auto& info) {
                           return std::get<Case>(info.param).name +
                                  NameOf(std::get<KernelIsa>(info.param));
                         });
INSTANTIATE_TEST_SUITE_P(Isas, EmulatedLinearIsaTest, kIsas,
                         [](const auto& info) { return NameOf(info.param); });

}  // namespace
}  // namespace dorad::kernels
