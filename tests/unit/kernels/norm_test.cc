
#include "tests/unit/kernels/norm_values.h"

namespace dorad::kernels {
namespace {

class NormTest : public KernelTest {};

template <typename T>
void CheckSquaredRowNorms(const std::vector<T>& w, int64_t rows, int64_t columns, int64_t skip) {
  const DeviceBuffer<T> device(w);
  const DeviceBuffer<float> out(rows);
  DORAD_ASSERT_CUDA(SquaredRowNorms(device.get() + skip, rows, columns, out.get(), nullptr));
  const auto got = out.Read();
  for (int64_t row = 0; row < rows; ++row) {
    double expected = 0.0;
    for (int64_t i = 0; i < columns; ++i) {
      const double x = Value(w[skip + row * columns + i]);
      expected += x * x;
    }
    ASSERT_NEAR(got[row], expected, 3e-7 * expected) << rows << " x " << columns << ": " << row;
  }
}

TEST_F(NormTest, SumsSquaresOfRows) {
  for (const auto& [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {3, 8}, {9, 37}, {70, 4096}, {17, 10008}, {5, 4099}, {2, 0}}) {
    const auto w = Random(rows * columns + 1, 0.02f, 1);
    CheckSquaredRowNorms(w, rows, columns, 0);
    CheckSquaredRowNorms(w, rows, columns, 1);
    CheckSquaredRowNorms(Rounded(w), rows, columns, 0);
    CheckSquaredRowNorms(Rounded(w), rows, columns, 1);
  }
}

TEST_F(NormTest, KeepsNanOfASquaredRow) {
  auto w = Random(3 * 64, 1.0f, 2);
  w[64 + 5] = kNan;
  const DeviceBuffer<float> device(w);
  const DeviceBuffer<float> out(3);
  DORAD_ASSERT_CUDA(SquaredRowNorms(device.get(), 3, 64, out.get(), nullptr));
  const auto got = out.Read();
  EXPECT_TRUE(std::isfinite(got[0]));
  EXPECT_TRUE(std::isnan(got[1]));
  EXPECT_TRUE(std::isfinite(got[2]));
}

TEST_F(NormTest, AssemblesToTheLastBit) {
  constexpr int64_t kSize = 1000;
  auto base_sq = Random(kSize, 1.0f, 3);
  auto cross = Random(kSize, 1.0f, 4);
  auto ba_sq = Random(kSize, 1.0f, 5);
  for (int64_t i = 0; i < kSize; ++i) {
    base_sq[i] = std::abs(base_sq[i]);
    ba_sq[i] = std::abs(ba_sq[i]);
  }
  base_sq[7] = kNan;
  cross[8] = kNan;
  const double scale = 1.0 / 3.0;
  std::vector<float> expected(kSize);
  int64_t clamped = 0;
  for (int64_t i = 0; i < kSize; ++i) {
    volatile float u = static_cast<float>(2.0 * scale) * cross[i];
    volatile float v = base_sq[i] + u;
    volatile float x = static_cast<float>(scale * scale) * ba_sq[i];
    const float sum = v + x;
    clamped += sum < 0.0f;
    expected[i] = std::isnan(sum) ? kNan : std::sqrt(std::max(sum, 0.0f));
  }
  ASSERT_GT(clamped, 0);
  const DeviceBuffer<float> a(base_sq), b(cross), c(ba_sq), norm(kSize);
  NormAssemblyParams params;
  params.base_sq = a.get();
  params.cross = b.get();
  params.ba_sq = c.get();
  params.norm = norm.get();
  params.size = kSize;
  params.scale = scale;
  DORAD_ASSERT_CUDA(AssembleNorms(params, nullptr));
  const auto got = norm.Read();
  for (int64_t i = 0; i < kSize; ++i) {
    if (std::isnan(expected[i])) {
      EXPECT_TRUE(std::isnan(got[i])) << i;
    } else {
      ASSERT_EQ(got[i], expected[i]) << i;
    }
  }
  // s = 0 reads base_sq alone.
  params.cross = params.ba_sq = nullptr;
  params.scale = 0.0;
  DORAD_ASSERT_CUDA(AssembleNorms(params, nullptr));
  EXPECT_EQ(norm.Read()[1], std::sqrt(base_sq[1]));
  EXPECT_TRUE(std::isnan(norm.Read()[7]));
}

TEST_F(NormTest, DividesTheMagnitude) {
  const std::vector<float> magnitude = {1.0f, 2.0f, kNan, 3.0f, 1.0f};
  const std::vector<float> norms = {3.0f, 0.0f, 1.0f, kNan, 1e-7f};
  const DeviceBuffer<float> m(magnitude), n(norms), g(norms.size());
  DORAD_ASSERT_CUDA(
      MagnitudeScale(m.get(), n.get(), 1e-6f, norms.size(), g.get(), nullptr, nullptr));
  const auto got = g.Read();
  EXPECT_EQ(got[0], 1.0f / 3.0f);
  EXPECT_EQ(got[1], 2.0f / 1e-6f);
  EXPECT_TRUE(std::isnan(got[2]));
  EXPECT_TRUE(std::isnan(got[3]));
  EXPECT_EQ(got[4], 1.0f / 1e-6f);
}

TEST_F(NormTest, TakesMagnitudesInBf16) {
  const std::vector<float> norms = {3.0f, 0.0f, 0.3f};
  const std::vector<__nv_bfloat16> magnitude = {__float2bfloat16(1.0f), __float2bfloat16(2.0f),
                                                __float2bfloat16(0.7f)};
  const DeviceBuffer<__nv_bfloat16> m(magnitude);
  const DeviceBuffer<float> n(norms), g(norms.size());
  DORAD_ASSERT_CUDA(
      MagnitudeScale(m.get(), n.get(), 1e-6f, norms.size(), g.get(), nullptr, nullptr));
  const auto got = g.Read();
  for (size_t i = 0; i < norms.size(); ++i) {
    EXPECT_EQ(got[i], __bfloat162float(magnitude[i]) / std::max(norms[i], 1e-6f)) << i;
  }
}

TEST_F(NormTest, MarksNormsThatDefineNoScale) {
  struct Case {
    float magnitude, norm;
    bool degenerate;
  };
  for (const Case& c : std::vector<Case>{{1.0f, 3.0f, false},
                                         {0.0f, 0.0f, false},  // a padded row
                                         {1.0f, 0.0f, true},
                                         {1.0f, 1e-6f, true},  // eps itself
                                         {1.0f, 1.1e-6f, false},
                                         {1.0f, kNan, true},
                                         {kNan, 1.0f, true},
                                         {1.0f, INFINITY, true},
                                         {3e38f, 1e-3f, true}}) {  // g overflows
    std::vector<float> magnitude(300, 1.0f), norms(300, 2.0f);
    magnitude[270] = c.magnitude;
    norms[270] = c.norm;
    const DeviceBuffer<float> m(magnitude), n(norms), g(norms.size());
    const DeviceBuffer<uint32_t> flag(std::vector<uint32_t>{0});
    DORAD_ASSERT_CUDA(
        MagnitudeScale(m.get(), n.get(), 1e-6f, norms.size(), g.get(), flag.get(), nullptr));
    EXPECT_EQ(flag.Read()[0], c.degenerate ? 1u : 0u) << c.magnitude << " on " << c.norm;
  }
}

}  // namespace
}  // namespace dorad::kernels
