// The kernels of a prefill's projection in the emulator, bit for bit against the same sums in the
// same order: pieces of K or none, several parts, mixed adapters, panels with and without a tail.
#include <cmath>

#include "gtest/gtest.h"
#include "kernels/dora/linear_launch.h"
#include "kernels/dora/linear_prefill_division.cuh"
#include "kernels/dora/linear_prefill_mma_fetch.cuh"
#include "tests/emulation/emulator.h"
#include "tests/emulation/random_layer.h"

namespace dorad::kernels {
namespace {

using emulation::Emulator;
using Bf16 = __nv_bfloat16;

struct Case {
  const char* name;
  DoraLinearShape shape;
  int splits;
  int clusters;
  bool has_bias;
  std::vector<std::vector<int>> ranks;  // [slot][part]
  std::vector<RowSegment> segments;
};

class Layer : public RandomLayer {
 public:
  Layer(const Case& c, std::mt19937* random)
      : RandomLayer(c.shape, c.segments.back().end, c.has_bias, c.ranks, random),
        case_(c),
        rows_(c.segments.back().end) {
    plan_.splits = c.splits;
    plan_.log_splits = c.splits - 1;
    plan_.chunks = CeilDiv(c.shape.in, kLinearStageK);
    plan_.a_chunks = CeilDiv(plan_.chunks, kLinearSlices);
    for (int part = 0; part < kDoraLinearMaxParts; ++part) {
      part_begin_[part + 1] = part_begin_[part] + c.shape.out[part];
    }
  }

  // sliced: each cluster shrinks a slice of K; else whole panels. shares_rows: a cluster's blocks
  // share rows of the batch; else a panel. With twice as many clusters as tiles, and two pieces of
  // K, two clusters divide a tile.
  template <int kN>
  std::vector<float> Run(bool y_fp32, bool sliced, bool shares_rows, int clusters) {
    Emulator::Get().device.blocks_at_once = kPrefillCluster * clusters;
    return RunPrefill(KernelIsa::kSm90, y_fp32, [&](const PrefillLaunch& launch) {
      PrefillArgs args = PrefillArgsOf(launch);
      args.meeting_cost = -100000;  // slices and divided tiles are always worth it
      args.exchange_cost = 0;
      if (!sliced) args.shares = nullptr;
      return LaunchDivision<kN>(args, DividePrefill(args, kN, shares_rows), nullptr);
    });
  }

  // As the server launches it on a GPU with so many multiprocessors.
  std::vector<float> Run(bool y_fp32, int processors) {
    Emulator::Get().device.blocks_at_once = processors;
    return RunPrefill(KernelIsa::kSm90, y_fp32, [&](PrefillLaunch launch) {
      launch.processors = processors;
      return LaunchPrefillSm90(launch);
    });
  }

  // The form of every GPU. Some blocks have several tiles, some none. processors: with one, panels
  // are wide; with many, they are narrow. sliced: so is the shrink.
  std::vector<float> RunMma(bool y_fp32, int processors, int blocks, int stages, bool sliced) {
    emulation::Device& device = Emulator::Get().device;
    device.blocks_at_once = blocks;
    const int panel_rows = processors == 1 ? 256 : 128;
    device.dynamic_bytes =
        128 + stages * (kPrefillMmaBatchBytes + panel_rows * kPrefillMmaRowBytes);
    return RunPrefill(KernelIsa::kMma, y_fp32, [&](PrefillLaunch launch) {
      launch.processors = processors;
      if (!sliced) launch.shares = nullptr;
      return LaunchPrefillMma(launch);
    });
  }

  // Up to 32 rows through DoraLinear's kernel for every GPU.
  std::vector<float> RunDecode(int first_row, int rows) {
    std::vector<RowSegment> segments;
    for (const RowSegment& segment : case_.segments) {
      const int begin = std::max(segment.begin - first_row, 0);
      const int end = std::min(segment.end - first_row, rows);
      if (begin < end) segments.push_back({segment.slot, begin, end});
    }
    const auto num_segments = static_cast<int32_t>(segments.size());
    segments.resize(rows);
    emulation::Device& device = Emulator::Get().device;
    device.blocks_at_once = 1000;
    device.dynamic_bytes = MmaIsa<2>::kSharedBytes;
    return RunInto(rows, /*y_fp32=*/true, [&](void* y) {
      auto params = ParamsOf<DoraLinearParams>(first_row, rows, KernelIsa::kMma, y, true);
      params.segments = segments.data();
      params.num_segments = &num_segments;
      Workspace workspace(DoraLinearWorkspaceBytes(shape_, rows, max_rank_));
      params.workspace = workspace.data();
      params.workspace_bytes = workspace.bytes();
      const int processors = 2 * kLinearSlices;
      const LinearPlan plan =
          PlanMmaPieces(shape_, rows, max_rank_ > 0, processors, case_.splits).plan;
      ASSERT_EQ(LaunchLinearMma(params, plan, processors, nullptr), cudaSuccess);
      Emulator::Get().Run();
    });
  }

  // What a row of y is to be, as fp32.
  std::vector<float> Expected(int row, int slot, KernelIsa isa) const {
    const DoraLinearShape& shape = case_.shape;
    const LinearPlan& plan = plan_;
    const Bf16* x = &x_[size_t{1} * row * shape.in];
    std::vector<float> y;
    for (int part = 0; part < shape.parts; ++part) {
      const DoraFactors f = slot < 0 ? DoraFactors() : factors_[slot * shape.parts + part];
      std::vector<Bf16> h(f.ldb, __float2bfloat16(0.0f));
      for (int r = 0; r < f.rank; ++r) {
        float sum = 0.0f;
        for (int chunk = 0; chunk < plan.chunks; chunk += plan.a_chunks) {
          float piece = 0.0f;
          AddProducts(&piece, x, f.a + size_t{1} * r * shape.in, shape.in, chunk,
                      std::min(chunk + plan.a_chunks, plan.chunks));
          sum += piece;
        }
        h[r] = __float2bfloat16(f.scale * sum);
      }
      const int chunks = CeilDiv(f.rank, kLinearStageK);
      for (int n = 0; n < shape.out[part]; ++n) {
        const int row_of_w = part_begin_[part] + n;
        float sum = 0.0f;
        for (int split = 0; split < plan.splits; ++split) {
          const auto of_w = [&](int i) {
            return isa == KernelIsa::kMma ? FirstMmaChunk(plan.chunks, i, plan.splits)
                                          : plan.chunks * i >> plan.log_splits;
          };
          const auto of_rank = [&](int i) {
            return isa == KernelIsa::kMma ? FirstMmaRankChunk(chunks, i, plan.splits)
                                          : chunks * i >> plan.log_splits;
          };
          float piece = 0.0f;
          AddProducts(&piece, x, &w_[size_t{1} * row_of_w * shape.in], shape.in, of_w(split),
                      of_w(split + 1));
          AddProducts(&piece, h.data(), f.b + size_t{1} * n * f.ldb, f.ldb, of_rank(split),
                      of_rank(split + 1));
          sum += piece;
        }
        y.push_back(std::fma(f.rank > 0 && f.g != nullptr ? f.g[n] : 1.0f, sum, bias_[row_of_w]));
      }
    }
    return y;
  }

 private:
  // launch(PrefillLaunch): of all rows.
  template <typename F>
  std::vector<float> RunPrefill(KernelIsa isa, bool y_fp32, F launch) {
    return RunInto(rows_, y_fp32, [&](void* y) {
      auto params = ParamsOf<DoraLinearPrefillParams>(0, rows_, isa, y, y_fp32);
      if (!case_.has_bias) params.bias = nullptr;
      params.segments = case_.segments.data();
      params.num_segments = static_cast<int>(case_.segments.size());
      Workspace workspace(DoraLinearPrefillWorkspaceBytes(shape_, rows_, max_rank_));
      params.workspace = workspace.data();
      params.workspace_bytes = workspace.bytes();
      ASSERT_EQ(launch(LayOutPrefill(params, plan_)), cudaSuccess);
      Emulator::Get().Run();
      EXPECT_TRUE(workspace.CountersAreZero());
    });
  }

  // Stages [first, end) of two lines, as the emulated tensor cores add them.
  static void AddProducts(float* sum, const Bf16* a, const Bf16* b, int size, int first, int end) {
    for (int begin = first * kLinearStageK; begin < end * kLinearStageK; begin += 16) {
      float products = 0.0f;
      for (int k = begin; k < std::min(begin + 16, size); ++k) {
        products += __bfloat162float(a[k]) * __bfloat162float(b[k]);
      }
      *sum += products;
    }
  }

  const Case case_;
  const int rows_;
  LinearPlan plan_;
  int part_begin_[kDoraLinearMaxParts + 1] = {};
};

class EmulatedLinearPrefillTest : public ::testing::TestWithParam<Case> {
 protected:
  // y of some rows: the first and last of segments and tiles, and every seventh.
  void ExpectTheSameBits(const Layer& layer, const std::vector<float>& y, bool y_fp32,
                         KernelIsa isa = KernelIsa::kSm90) {
    for (const RowSegment& segment : GetParam().segments) {
      for (int row = segment.begin; row < segment.end; ++row) {
        if (row != segment.begin && row + 1 != segment.end && row % 128 != 0 && row % 7 != 0) {
          continue;
        }
        std::vector<float> expected = layer.Expected(row, segment.slot, isa);
        if (!y_fp32) {
          for (float& value : expected) value = __bfloat162float(__float2bfloat16(value));
        }
        ASSERT_EQ(std::memcmp(expected.data(), &y[size_t{1} * row * layer.out()],
                              expected.size() * sizeof(float)),
                  0)
            << "row " << row;
      }
    }
  }

  Emulator emulator_{7};
};

TEST_P(EmulatedLinearPrefillTest, SumsAreThoseOfThePlan) {
  Layer layer(GetParam(), &emulator_.random());
  std::vector<float> y;
  const int clusters = GetParam().clusters;
  constexpr int kMany = 20;
  const auto run = [&](auto columns, bool y_fp32, bool sliced, bool shares_rows, int count) {
    ASSERT_NO_THROW(y = layer.Run<columns>(y_fp32, sliced, shares_rows, count));
    ExpectTheSameBits(layer, y, y_fp32);
  };
  run(std::integral_constant<int, 256>(), /*y_fp32=*/true, /*sliced=*/false,
      /*shares_rows=*/false, clusters);
  run(std::integral_constant<int, 176>(), /*y_fp32=*/false, /*sliced=*/true,
      /*shares_rows=*/false, clusters);
  run(std::integral_constant<int, 144>(), /*y_fp32=*/true, /*sliced=*/true,
      /*shares_rows=*/true, clusters);
  run(std::integral_constant<int, 176>(), /*y_fp32=*/true, /*sliced=*/true,
      /*shares_rows=*/false, kMany);
  run(std::integral_constant<int, 256>(), /*y_fp32=*/false, /*sliced=*/false,
      /*shares_rows=*/true, kMany);
  for (const int processors : {4, 2 * kMany}) {
    ASSERT_NO_THROW(y = layer.Run(/*y_fp32=*/true, processors));
    ExpectTheSameBits(layer, y, /*y_fp32=*/true);
  }
}

TEST_P(EmulatedLinearPrefillTest, SumsOfEveryGpuAreThoseOfThePlan) {
  Layer layer(GetParam(), &emulator_.random());
  std::vector<float> y;
  constexpr int kMany = 1000;
  ASSERT_NO_THROW(y = layer.RunMma(/*y_fp32=*/true, /*processors=*/1, /*blocks=*/3, /*stages=*/2,
                                   /*sliced=*/false));
  ExpectTheSameBits(layer, y, /*y_fp32=*/true, KernelIsa::kMma);
  ASSERT_NO_THROW(y = layer.RunMma(/*y_fp32=*/false, kMany, /*blocks=*/7, /*stages=*/3,
                                   /*sliced=*/true));
  ExpectTheSameBits(layer, y, /*y_fp32=*/false, KernelIsa::kMma);
  ASSERT_NO_THROW(y = layer.RunMma(/*y_fp32=*/false, /*processors=*/1, /*blocks=*/4, /*stages=*/4,
                                   /*sliced=*/true));
  ExpectTheSameBits(layer, y, /*y_fp32=*/false, KernelIsa::kMma);
}

TEST_P(EmulatedLinearPrefillTest, ARowHasTheBitsOfADecodeStepOnEveryGpu) {
  Layer layer(GetParam(), &emulator_.random());
  std::vector<float> y;
  ASSERT_NO_THROW(y = layer.RunMma(/*y_fp32=*/true, /*processors=*/1000, /*blocks=*/3,
                                   /*stages=*/3, /*sliced=*/false));
  for (const int first : {0, 89, 120, 250}) {
    constexpr int kRows = 17;
    std::vector<float> decoded;
    ASSERT_NO_THROW(decoded = layer.RunDecode(first, kRows));
    EXPECT_EQ(std::memcmp(decoded.data(), &y[size_t{1} * first * layer.out()],
                          decoded.size() * sizeof(float)),
              0)
        << "from row " << first;
  }
}

const Case kCases[] = {
    {"TheBaseAloneInTwoPieces", {200, 1, {520}}, 2, 2, true, {}, {{-1, 0, 300}}},
    {"OneAdapterOnOneCluster", {320, 1, {264}}, 1, 1, false, {{200}}, {{0, 0, 300}}},
    {"ThreePartsAndFourSegments",
     {704, 3, {256, 64, 72}},
     2,
     2,
     true,
     {{40, 8, 16}, {0, 100, 5}, {200, 16, 64}},
     {{-1, 0, 100}, {0, 100, 103}, {2, 103, 400}, {1, 400, 513}}},
    {"OneStageOfK",
     {64, 2, {192, 320}},
     1,
     2,
     true,
     {{24, 300}, {10, 7}},
     {{1, 0, 129}, {0, 129, 300}}},
    {"SegmentsOfAFewRowsAndOfWholeTiles",
     {136, 2, {64, 80}},
     1,
     2,
     true,
     {{24, 0}, {10, 140}, {0, 33}},
     {{0, 0, 1},
      {1, 1, 2},
      {-1, 2, 3},
      {2, 3, 70},
      {1, 70, 128},
      {0, 128, 256},
      {2, 256, 257},
      {0, 257, 258},
      {1, 258, 386}}},
};

INSTANTIATE_TEST_SUITE_P(Cuts, EmulatedLinearPrefillTest, testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace dorad::kernels
