// Norms, activations and the embedding, against double.
#include <ATen/ATen.h>

#include "server/backends/cpu/ops/activation.h"
#include "server/backends/cpu/ops/embedding.h"
#include "server/backends/cpu/ops/norm.h"
#include "tests/unit/cpu/variants.h"

namespace dorad::ops {
namespace {

class PointwiseTest : public VariantTest {};

double MaxDifference(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

bool SameBits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return x.numel() == y.numel() && std::memcmp(x.data_ptr(), y.data_ptr(), x.numel() * 4) == 0;
}

at::Tensor ExpectedNorm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::Tensor d = x.to(at::kDouble);
  return d / (d.square().mean(-1, true) + eps).sqrt() * weight.to(at::kDouble);
}

TEST_P(PointwiseTest, RmsNormAgreesWithDouble) {
  for (int64_t dim : {1, 7, 16, 64, 100, 576, 4096}) {
    const at::Tensor x = at::randn({5, dim}) * 3, weight = at::randn({dim});
    EXPECT_LT(MaxDifference(RmsNorm(x, weight, 1e-5), ExpectedNorm(x, weight, 1e-5)), 1e-5) << dim;
    at::Tensor in_place = x.clone();
    RmsNormInplace(in_place, weight, 1e-5);
    EXPECT_TRUE(SameBits(in_place, RmsNorm(x, weight, 1e-5)));
  }
}

TEST_P(PointwiseTest, RmsNormOfARowDoesNotDependOnTheOthers) {
  const at::Tensor x = at::randn({300, 576}), weight = at::randn({576});
  const at::Tensor y = RmsNorm(x, weight, 1e-6);
  for (int64_t r = 0; r < 300; r += 13) {
    EXPECT_TRUE(SameBits(RmsNorm(x.slice(0, r, r + 1), weight, 1e-6)[0], y[r]));
  }
}

TEST_P(PointwiseTest, AddRmsNormUpdatesTheResidual) {
  const at::Tensor residual = at::randn({40, 100}), x = at::randn({40, 100}),
                   weight = at::randn({100});
  at::Tensor updated = residual.clone();
  const at::Tensor y = AddRmsNorm(updated, x, weight, 1e-6);
  EXPECT_TRUE(SameBits(updated, residual + x));
  EXPECT_TRUE(SameBits(y, RmsNorm(residual + x, weight, 1e-6)));
}

TEST_P(PointwiseTest, SiluMulAgreesWithDoubleOverItsWholeRange) {
  at::Tensor gate = at::cat({at::linspace(-200, 200, 4001), at::randn({123 * 100 - 4001})});
  gate = gate.view({123, 100}).contiguous();
  const at::Tensor up = at::randn({123, 100});
  const at::Tensor g = gate.to(at::kDouble);
  const at::Tensor expected = g / (at::exp(-g) + 1) * up.to(at::kDouble);
  SiluMul(gate, up);
  EXPECT_LT(((gate - expected).abs() / (expected.abs() + 1e-30)).max().item<double>(), 1e-5)
      << "relative";
  EXPECT_LT(MaxDifference(gate, expected), 1e-4);
}

TEST_P(PointwiseTest, GeluTanhMulAgreesWithDoubleOverItsWholeRange) {
  at::Tensor gate = at::cat({at::linspace(-200, 200, 4001), at::randn({123 * 100 - 4001})});
  gate = gate.view({123, 100}).contiguous();
  const at::Tensor up = at::randn({123, 100});
  const at::Tensor expected = at::gelu(gate.to(at::kDouble), "tanh") * up.to(at::kDouble);
  GeluTanhMul(gate, up);
  EXPECT_LT(((gate - expected).abs() / (expected.abs() + 1e-3)).max().item<double>(), 1e-5);
}

TEST_P(PointwiseTest, GeluTanhMulKeepsInfinitiesAndNan) {
  at::Tensor gate = at::tensor({INFINITY, -1e30f, NAN, 0.0f});
  GeluTanhMul(gate, at::ones({4}));
  EXPECT_EQ(gate[0].item<float>(), INFINITY);
  EXPECT_EQ(gate[1].item<float>(), 0.0f);
  EXPECT_TRUE(std::isnan(gate[2].item<float>()));
  EXPECT_EQ(gate[3].item<float>(), 0.0f);
}

TEST_P(PointwiseTest, SiluMulKeepsInfinitiesAndNan) {
  at::Tensor gate = at::tensor({INFINITY, -90.0f, NAN, 0.0f});
  SiluMul(gate, at::ones({4}));
  EXPECT_EQ(gate[0].item<float>(), INFINITY);
  EXPECT_NEAR(gate[1].item<float>(), 0.0f, 1e-30f);
  EXPECT_TRUE(std::isnan(gate[2].item<float>()));
  EXPECT_EQ(gate[3].item<float>(), 0.0f);
}

TEST_P(PointwiseTest, ExpIsWithinTwoUlp) {
  std::vector<float> x, e;
  for (float v = -87.2f; v < 0.0f; v += 0.00173f) x.push_back(v);
  e.resize(x.size());
  GetParam()->sum_exp(x.data(), static_cast<int64_t>(x.size()), 0.0f, e.data());
  double worst = 0.0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(static_cast<double>(x[i]));
    const float rounded = static_cast<float>(exact);
    const double ulp = std::nextafter(rounded, INFINITY) - rounded;
    worst = std::max(worst, std::abs(e[i] - exact) / ulp);
  }
  EXPECT_LT(worst, 2.0);
  const std::vector<float> special = {-INFINITY, -1000.0f, 0.0f, 1000.0f, NAN};
  e.resize(special.size());
  GetParam()->sum_exp(special.data(), 5, 0.0f, e.data());
  EXPECT_EQ(e[0], 0.0f);
  EXPECT_EQ(e[1], 0.0f);
  EXPECT_EQ(e[2], 1.0f);
  EXPECT_EQ(e[3], INFINITY);
  EXPECT_TRUE(std::isnan(e[4]));
}

TEST_P(PointwiseTest, EmbedAddsTheAdapterAndMultiplies) {
  const int64_t vocabulary = 50, dim = 37;
  for (at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const float factor = type == at::kFloat ? 1.0f : 73.5f;
    const at::Tensor weight = at::randn({vocabulary, dim}).to(type);
    AdapterFactors dora, lora;
    dora.a_RI = at::randn({vocabulary, 12}).to(type);
    dora.b_OR = at::randn({dim, 12}).to(type);
    dora.g_O = at::rand({dim}) + 0.5;
    dora.scale = 0.7f;
    lora = dora;
    lora.g_O = at::Tensor();
    const at::Tensor ids = at::randint(0, vocabulary, {90}, at::kInt);
    const RowSegment segments[] = {{&dora, 0, 30}, {nullptr, 30, 33}, {&lora, 33, 90}};
    const at::Tensor y = Embed(ids, weight, factor, segments);
    const at::Tensor low_rank =
        at::matmul(dora.a_RI.to(at::kDouble), dora.b_OR.to(at::kDouble).t()) * 0.7;
    const at::Tensor adapted = weight.to(at::kDouble) + low_rank;
    const at::Tensor index = ids.to(at::kLong);
    const at::Tensor expected =
        at::cat({(adapted * dora.g_O).index_select(0, index.slice(0, 0, 30)),
                 weight.to(at::kDouble).index_select(0, index.slice(0, 30, 33)),
                 adapted.index_select(0, index.slice(0, 33, 90))});
    EXPECT_LT(MaxDifference(y / factor, expected), 1e-5);
    const RowSegment alone{&dora, 0, 1};
    for (int64_t r = 0; r < 30; ++r) {
      EXPECT_TRUE(SameBits(Embed(ids.slice(0, r, r + 1), weight, factor, {&alone, 1})[0], y[r]));
    }
  }
}

TEST(EmbedCheckTest, RefusesATokenOutsideTheVocabulary) {
  const RowSegment base{nullptr, 0, 1};
  EXPECT_DEATH(Embed(at::full({1}, 5, at::kInt), at::zeros({5, 4}), 1.0f, {&base, 1}),
               "CHECK failed");
}

DORAD_INSTANTIATE_VARIANTS(PointwiseTest);

}  // namespace
}  // namespace dorad::ops
