// The projection in the emulator, against a double reference: every cut of W and K, every number of
// tiles of the batch, mixed adapters, rings of few stages.
#include <cmath>

#include "gtest/gtest.h"
#include "kernels/dora/linear_grid.cuh"
#include "kernels/dora/linear_project.cuh"
#include "kernels/isa/mma/isa.cuh"
#include "kernels/isa/sm90/isa.cuh"
#include "tests/emulation/emulator.h"
#include "tests/emulation/random_layer.h"

namespace dorad::kernels {
namespace {

using emulation::Emulator;
using emulation::Grid;

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
  std::vector<float> Run(const std::vector<RowSegment>& segments, bool y_fp32,
                         bool may_adapt = true) {
    const int rows = segments.back().end;
    std::vector<float> y(size_t{1} * rows * out_, NAN);
    std::vector<__nv_bfloat16> rounded(y.size());
    LinearArgs args = Args(segments);
    if (!may_adapt) args.p.max_rank = 0;
    args.p.y_fp32 = y_fp32;
    args.p.y = y_fp32 ? static_cast<void*>(y.data()) : static_cast<void*>(rounded.data());
    std::vector<__nv_bfloat16> h(size_t{1} * case_.shape.parts * rows * args.ldh,
                                 __float2bfloat16(NAN));
    std::vector<float> shares(h.size() * kLinearSlices, NAN);
    args.h = h.data();
    args.shares = shares.data();
    if (isa_ == KernelIsa::kSm90) {
      RunSm90(args);
    } else {
      RunMma(args);
    }
    EXPECT_EQ(is_given_, std::vector<uint32_t>(is_given_.size()));
    for (const LinearSignals& signals : signals_) {
      EXPECT_EQ(signals.shares | signals.h | signals.left, 0u);
    }
    if (!y_fp32) std::transform(rounded.begin(), rounded.end(), y.begin(), __bfloat162float);
    return y;
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
  LinearArgs Args(const std::vector<RowSegment>& segments) {
    segments_ = segments;
    num_segments_ = static_cast<int32_t>(segments.size());
    segments_.resize(kDoraLinearMaxRows);
    LinearArgs args = {};
    args.p.shape = case_.shape;
    args.p.rows = segments.back().end;
    args.p.max_rank = max_rank_;
    args.p.x = x_.data();
    args.p.w = w_.data();
    args.p.bias = bias_.data();
    args.p.table = {factors_.data(), case_.shape.parts};
    args.p.maps = maps_.data();
    args.p.segments = segments_.data();
    args.p.num_segments = &num_segments_;
    args.plan.panel_rows = case_.cut.panel_rows;
    args.plan.splits = case_.cut.splits;
    args.plan.log_splits = case_.cut.splits - 1;
    args.plan.panels = CeilDiv(out_, case_.cut.panel_rows);
    args.plan.chunks = CeilDiv(case_.shape.in, kLinearStageK);
    args.plan.a_chunks = CeilDiv(args.plan.chunks, kLinearSlices);
    for (int part = 0; part < kDoraLinearMaxParts; ++part) {
      args.part_begin[part + 1] =
          args.part_begin[part] + (part < case_.shape.parts ? case_.shape.out[part] : 0);
    }
    args.ldh = RoundUp(max_rank_, 8);
    args.signals = signals_;
    return args;
  }

  void RunSm90(LinearArgs args) {
    const int tiles = args.p.rows <= 64 ? 1 : args.p.rows <= 128 ? 2 : 4;
    args.log_siblings = args.plan.splits == 1 && tiles > 1 ? 1 : 0;
    args.x_rows = RoundUp(args.p.rows, tiles == 1 ? 8 : 64);
    if (tiles == 1) return RunWidths<Sm90Isa, 1>(args);
    if (tiles == 2) return RunWidths<Sm90Isa, 2>(args);
    RunWidths<Sm90Isa, 4>(args);
  }

  // As DoraLinear does it.
  void RunMma(LinearArgs args) {
    args.log_siblings = 0;
    args.plan = PlanMmaPieces(case_.shape, args.p.rows, args.p.max_rank > 0,
                              2 * (case_.cut.teams * kLinearSlices + 2), case_.cut.splits)
                    .plan;
    std::vector<float> given(size_t{4} * 64 * (out_ + 192), NAN);
    args.given = reinterpret_cast<float4*>(given.data());
    args.is_given = is_given_.data();
    const int rows = args.plan.group_rows;
    args.x_rows = RoundUp(rows, rows > 64 ? 64 : 16);
    if (rows > 64) return RunWidths<MmaIsa<1, 4, 2>, 2>(args);
    if (rows > 32) return RunWidths<MmaIsa<4>, 1>(args);
    RunWidths<MmaIsa<2>, 1>(args);
  }

  template <typename Isa, int kM>
  void RunWidths(const LinearArgs& args) {
    const auto run = [&](auto panel) {
      const auto run_form = [&](auto adapted) {
        if constexpr (Isa::kHasClusters || IsMmaPanel(kM, panel, adapted)) {
          RunPanels<Isa, kM, panel, adapted>(args);
        } else {
          FAIL() << "no panels of " << panel << " rows for " << kM << " tiles";
        }
      };
      if (args.p.max_rank > 0) {
        run_form(std::true_type());
      } else {
        run_form(std::false_type());
      }
    };
    switch (args.plan.panel_rows) {
      case 32:
        return run(std::integral_constant<int, 32>());
      case 64:
        return run(std::integral_constant<int, 64>());
      case 128:
        return run(std::integral_constant<int, 128>());
      case 96:
        return run(std::integral_constant<int, 96>());
      default:
        return run(std::integral_constant<int, 192>());
    }
  }

  template <typename Isa, int kM, int kPanel, bool kAdapted>
  void RunPanels(LinearArgs args) {
    using Config = ProjectConfig<Isa, kM, kPanel, kAdapted>;
    using Shared = typename ProjectBlock<Isa, kM, kPanel, kAdapted>::Shared;
    const int rows = args.p.rows;
    const int in = case_.shape.in;
    typename Isa::Matrix w_map, x_map, x_tile_map;
    EncodeMatrix(w_.data(), out_, in, in, kPanel, &w_map);
    EncodeMatrix(x_.data(), rows, in, in, args.x_rows >> args.log_siblings, &x_map);
    EncodeMatrix(x_.data(), rows, in, in, std::min(64, args.x_rows), &x_tile_map);
    // As production does it, with a ring of few stages: some blocks have several panels, some have
    // none, and some have no part of the shrink.
    const int wanted_stages = 2 + static_cast<int>(random_() % 3);
    int shared_bytes = 0;
    while (FitRing<Isa, kM, kPanel, kAdapted>(args.plan.splits, args.x_rows, shared_bytes).stages <
           wanted_stages) {
      shared_bytes += 512;
    }
    const int groups = args.plan.row_groups;
    const int processors =
        kAdapted ? case_.cut.teams * kLinearSlices + 2 : 2 * args.plan.splits << args.log_siblings;
    const auto planned =
        PlanGrid<Isa, kM, kPanel, kAdapted>(processors * groups, shared_bytes, &args);
    ASSERT_GE(args.stages, 2);
    args.flight = 1 + static_cast<int>(random_() % args.flight);
    // Where dynamic shared memory begins behind the static one, and nothing is lost by alignment.
    constexpr uint32_t kDynamic = (sizeof(Shared) + 1023) / 1024 * 1024;
    int delay = static_cast<int>(random_() % 200);  // until x is there
    Grid grid(
        planned.blocks * groups, Config::kThreads, planned.cluster,
        kDynamic + planned.dynamic_bytes - kAlignBytes, [&delay] { return --delay < 0; },
        [&] {
          auto& shared = *reinterpret_cast<Shared*>(emulation::ThisBlock().shared);
          RunProject<Isa, kM, kPanel, kAdapted>(&w_map, &x_map, &x_tile_map, args, shared,
                                                kDynamic);
        },
        groups);
    Emulator::Get().Run({&grid});
  }

  const Case case_;
  const KernelIsa isa_;
  std::vector<RowSegment> segments_;
  int32_t num_segments_ = 0;
  LinearSignals signals_[kLinearMostRowGroups] = {};
  std::vector<uint32_t> is_given_ = std::vector<uint32_t>(kLinearGivenSignals);
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
