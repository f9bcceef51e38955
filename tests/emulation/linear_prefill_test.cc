// The kernels of a prefill's projection in the emulator, bit for bit against the same sums in the
// same order: pieces of K or none, several parts, mixed adapters, panels with and without a tail.
#include <cmath>

#include "gtest/gtest.h"
#include "kernels/dora/linear_prefill_kernel.cuh"
#include "kernels/dora/linear_prefill_mma.cuh"
#include "kernels/dora/linear_project.cuh"
#include "tests/emulation/emulator.h"
#include "tests/emulation/random_layer.h"

namespace dorad::kernels {
namespace {

using emulation::Emulator;
using emulation::Grid;
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
    const DoraLinearShape& shape = c.shape;
    args_.p.shape = shape;
    args_.p.rows = rows_;
    args_.p.max_rank = max_rank_;
    args_.p.x = x_.data();
    args_.p.w = w_.data();
    args_.p.bias = c.has_bias ? bias_.data() : nullptr;
    args_.p.table = {factors_.data(), shape.parts};
    args_.p.maps = maps_.data();
    args_.p.segments = case_.segments.data();
    args_.p.num_segments = static_cast<int>(case_.segments.size());
    args_.plan.splits = c.splits;
    args_.plan.log_splits = c.splits - 1;
    args_.plan.chunks = CeilDiv(shape.in, kLinearStageK);
    args_.plan.a_chunks = CeilDiv(args_.plan.chunks, kLinearSlices);
    for (int part = 0; part < kDoraLinearMaxParts; ++part) {
      args_.part_begin[part + 1] = args_.part_begin[part] + shape.out[part];
    }
    args_.bands = CeilDiv(rows_, kPrefillBandRows);
    args_.ldh = RoundUp(max_rank_, kLinearStageK);
    args_.counters = &counters_;
  }

  // sliced: each cluster shrinks a slice of K; else whole panels. shares_rows: a cluster's blocks
  // share rows of the batch; else a panel. With twice as many clusters as tiles, and two pieces of
  // K, two clusters divide a tile.
  template <int kN>
  std::vector<float> Run(bool y_fp32, bool sliced, bool shares_rows, int clusters) {
    using Shared = typename PrefillBlock<kN>::Shared;
    constexpr uint32_t kDynamic = PrefillConfig<kN>::kStaticBytes;
    std::vector<float> y(size_t{1} * rows_ * out_, NAN);
    std::vector<Bf16> rounded(y.size());
    const int columns = case_.shape.parts * args_.ldh;
    std::vector<Bf16> h(size_t{1} * rows_ * columns, __float2bfloat16(NAN));
    const int panels = CeilDiv(out_, kN);
    args_.shares_rows = shares_rows;
    const int box_rows = shares_rows ? kPrefillTileRows / 2 : kPrefillTileRows;
    args_.tile_bands = CeilDiv(rows_, shares_rows ? kPrefillTileRows : kPrefillBandRows);
    args_.tile_panels = shares_rows ? CeilDiv(panels, 2) : panels;
    args_.group = std::min(args_.tile_bands, 8);
    const int tiles = args_.tile_bands * args_.tile_panels;
    args_.divides = case_.splits == 2 && 2 * tiles <= clusters;
    std::vector<float> given(size_t{2} * tiles * kPrefillTileRows * kN, NAN);
    args_.given = given.data();
    args_.h = h.data();
    std::vector<float> shares(
        kPrefillSlicedPanels * kLinearSlices * kPrefillShareBytes / sizeof(float), NAN);
    args_.shares = sliced ? shares.data() : nullptr;
    args_.meeting_cost = -100000;  // always worth it
    args_.p.y_fp32 = y_fp32;
    args_.p.y = y_fp32 ? static_cast<void*>(y.data()) : static_cast<void*>(rounded.data());
    const int in = case_.shape.in;
    const CUtensorMap w_map = MapOf(w_.data(), out_, in, in, kN / 2);
    const CUtensorMap x_map = MapOf(x_.data(), rows_, in, in, box_rows);
    const CUtensorMap h_map = MapOf(h.data(), rows_, columns, columns, box_rows);
    int delay = static_cast<int>(random_() % 200);  // until x is there
    Grid grid(
        2 * clusters, kPrefillThreads, 2, kDynamic + PrefillConfig<kN>::kDynamicBytes,
        [&delay] { return --delay < 0; },
        [&] {
          auto& shared = *reinterpret_cast<Shared*>(emulation::ThisBlock().shared);
          RunPrefill<kN>(&w_map, &x_map, &h_map, args_, shared, kDynamic);
        });
    Emulator::Get().Run({&grid});
    EXPECT_EQ(counters_.shares | counters_.shrunk | counters_.left, 0u);
    EXPECT_EQ(counters_.given | counters_.taken, 0u);
    if (!y_fp32) std::transform(rounded.begin(), rounded.end(), y.begin(), __bfloat162float);
    return y;
  }

  // The form of every GPU. Some blocks have several tiles, some none. sliced: so is the shrink.
  template <int kN>
  std::vector<float> RunMma(bool y_fp32, int blocks, int stages, bool sliced) {
    using Block = PrefillMmaBlock<kN>;
    constexpr uint32_t kDynamic = RoundUp(sizeof(typename Block::Shared), 128);
    std::vector<float> y(size_t{1} * rows_ * out_, NAN);
    std::vector<Bf16> rounded(y.size());
    std::vector<Bf16> h(size_t{1} * rows_ * case_.shape.parts * args_.ldh, __float2bfloat16(NAN));
    PrefillMmaArgs args = {args_};
    args.tile_bands = CeilDiv(rows_, kPrefillTileRows);
    args.tile_panels = CeilDiv(out_, kN);
    args.group = std::min(args.tile_bands, 2);
    args.h = h.data();
    args.stages = stages;
    std::vector<float> shares(
        kPrefillMmaSlicedPanels * kLinearSlices * kPrefillMmaShareBytes / sizeof(float), NAN);
    std::vector<uint32_t> summed(kPrefillMmaSlicedPanels);
    args.shares = sliced ? shares.data() : nullptr;
    args.summed = summed.data();
    std::vector<float> kept(size_t{1} * blocks * kPrefillTileRows * kN, NAN);
    args.kept = reinterpret_cast<float4*>(kept.data());
    args.p.y_fp32 = y_fp32;
    args.p.y = y_fp32 ? static_cast<void*>(y.data()) : static_cast<void*>(rounded.data());
    int delay = static_cast<int>(random_() % 200);  // until x is there
    Grid grid(
        blocks, kPrefillMmaThreads, 1, kDynamic + stages * Block::kStageBytes,
        [&delay] { return --delay < 0; },
        [&] {
          auto& shared = *reinterpret_cast<typename Block::Shared*>(emulation::ThisBlock().shared);
          Block(args, shared, kDynamic).Run();
        });
    Emulator::Get().Run({&grid});
    EXPECT_EQ(counters_.shares | counters_.shrunk | counters_.left, 0u);
    EXPECT_EQ(summed, std::vector<uint32_t>(summed.size()));
    if (!y_fp32) std::transform(rounded.begin(), rounded.end(), y.begin(), __bfloat162float);
    return y;
  }

  // Up to 32 rows through DoraLinear's kernel for every GPU.
  std::vector<float> RunDecode(int first_row, int rows) {
    using Isa = MmaIsa<2>;
    constexpr int kPanel = 32;
    using Config = ProjectConfig<Isa, 1, kPanel, true>;
    using Shared = typename ProjectBlock<Isa, 1, kPanel, true>::Shared;
    constexpr uint32_t kDynamic = RoundUp(sizeof(Shared), 1024);
    const int in = case_.shape.in;
    std::vector<RowSegment> segments;
    for (const RowSegment& segment : case_.segments) {
      const int begin = std::max(segment.begin - first_row, 0);
      const int end = std::min(segment.end - first_row, rows);
      if (begin < end) segments.push_back({segment.slot, begin, end});
    }
    const auto num_segments = static_cast<int32_t>(segments.size());
    segments.resize(rows);
    std::vector<float> y(size_t{1} * rows * out_, NAN);
    LinearSignals signals = {};
    LinearArgs args = {};
    args.p.shape = case_.shape;
    args.p.rows = rows;
    args.p.max_rank = max_rank_;
    args.p.x = x_.data() + size_t{1} * first_row * in;
    args.p.w = w_.data();
    args.p.bias = args_.p.bias;
    args.p.table = args_.p.table;
    args.p.segments = segments.data();
    args.p.num_segments = &num_segments;
    args.p.y = y.data();
    args.p.y_fp32 = true;
    args.plan = args_.plan;
    args.plan.group_rows = rows;
    args.plan.panel_rows = kPanel;
    args.plan.panels = CeilDiv(out_, kPanel);
    std::vector<float> given(size_t{64} * args.plan.panels * kPanel, NAN);
    std::vector<uint32_t> is_given(args.plan.panels);
    args.given = reinterpret_cast<float4*>(given.data());
    args.is_given = is_given.data();
    std::copy_n(args_.part_begin, kDoraLinearMaxParts + 1, args.part_begin);
    args.x_rows = RoundUp(rows, 16);
    args.log_siblings = 0;
    args.stages = 3;
    args.flight = 2;
    args.ldh = RoundUp(max_rank_, 8);
    args.signals = &signals;
    std::vector<Bf16> h(size_t{1} * case_.shape.parts * rows * args.ldh, __float2bfloat16(NAN));
    std::vector<float> shares(h.size() * kLinearSlices, NAN);
    args.h = h.data();
    args.shares = shares.data();
    typename Isa::Matrix w_map, x_map;
    EncodeMatrix(w_.data(), out_, in, in, kPanel, &w_map);
    EncodeMatrix(args.p.x, rows, in, in, args.x_rows, &x_map);
    const int stage_bytes =
        Config::kWeightBytes + Config::kStageChunks * args.x_rows * 2 * kLinearStageK;
    Grid grid(
        kLinearSlices, Config::kThreads, 1, kDynamic + args.stages * stage_bytes,
        [] { return true; },
        [&] {
          auto& shared = *reinterpret_cast<Shared*>(emulation::ThisBlock().shared);
          RunProject<Isa, 1, kPanel, true>(&w_map, &x_map, &x_map, args, shared, kDynamic);
        });
    Emulator::Get().Run({&grid});
    return y;
  }

  // What a row of y is to be, as fp32.
  std::vector<float> Expected(int row, int slot, KernelIsa isa) const {
    const DoraLinearShape& shape = case_.shape;
    LinearPlan plan = args_.plan;
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
        const int row_of_w = args_.part_begin[part] + n;
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
  PrefillCounters counters_ = {};
  PrefillArgs args_ = {};
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
}

TEST_P(EmulatedLinearPrefillTest, SumsOfEveryGpuAreThoseOfThePlan) {
  Layer layer(GetParam(), &emulator_.random());
  std::vector<float> y;
  ASSERT_NO_THROW(
      y = layer.RunMma<256>(/*y_fp32=*/true, /*blocks=*/3, /*stages=*/2, /*sliced=*/false));
  ExpectTheSameBits(layer, y, /*y_fp32=*/true, KernelIsa::kMma);
  ASSERT_NO_THROW(
      y = layer.RunMma<128>(/*y_fp32=*/false, /*blocks=*/7, /*stages=*/3, /*sliced=*/true));
  ExpectTheSameBits(layer, y, /*y_fp32=*/false, KernelIsa::kMma);
  ASSERT_NO_THROW(
      y = layer.RunMma<256>(/*y_fp32=*/false, /*blocks=*/4, /*stages=*/4, /*sliced=*/true));
  ExpectTheSameBits(layer, y, /*y_fp32=*/false, KernelIsa::kMma);
}

TEST_P(EmulatedLinearPrefillTest, ARowHasTheBitsOfADecodeStepOnEveryGpu) {
  Layer layer(GetParam(), &emulator_.random());
  std::vector<float> y;
  ASSERT_NO_THROW(
      y = layer.RunMma<128>(/*y_fp32=*/true, /*blocks=*/3, /*stages=*/3, /*sliced=*/false));
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
