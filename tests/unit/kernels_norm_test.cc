#include <cuda_bf16.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "kernels/dora/norm.h"
#include "tests/unit/kernels_device.h"

namespace dorad::kernels {
namespace {

using Bf16 = __nv_bfloat16;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> Random(size_t size, float deviation, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> values(size);
  for (float& value : values) value = normal(random);
  return values;
}

std::vector<Bf16> Rounded(const std::vector<float>& values) {
  std::vector<Bf16> rounded(values.size());
  for (size_t i = 0; i < values.size(); ++i) rounded[i] = __float2bfloat16_rn(values[i]);
  return rounded;
}

double Value(float x) { return x; }
double Value(Bf16 x) { return __bfloat162float(x); }

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

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

using Form = cudaError_t (*)(const DoraNormParams&, cudaStream_t);
using Workspace = size_t (*)(int64_t, int64_t, int64_t);

struct Shape {
  int64_t out, in, rank, ldb;
};

// One module with trained-looking factors in host and device memory.
class Module {
 public:
  explicit Module(Shape shape, float b_deviation = 0.02f)
      : Module(shape, Rounded(Random(shape.out * shape.in, 0.02f, 10)), b_deviation) {}
  Module(Shape shape, std::vector<Bf16> w, float b_deviation = 0.02f)
      : shape_(shape),
        w_(std::move(w)),
        a_(Rounded(Random(shape.rank * shape.in, 0.02f, 11))),
        b_(Rounded(Random(shape.out * shape.ldb, b_deviation, 12))),
        magnitude_(Random(shape.out, 0.3f, 13)) {
    for (int64_t o = 0; o < shape.out; ++o) {
      for (int64_t r = shape.rank; r < shape.ldb; ++r) b_[o * shape.ldb + r] = Bf16(0.0f);
    }
    for (float& m : magnitude_) m += 1.5f;
  }

  const Shape& shape() const { return shape_; }
  const std::vector<Bf16>& w() const { return w_; }
  std::vector<Bf16>& w() { return w_; }
  const std::vector<Bf16>& a() const { return a_; }
  const std::vector<Bf16>& b() const { return b_; }
  const std::vector<float>& magnitude() const { return magnitude_; }

  // s·B·A of one row, in double.
  std::vector<double> Update(int64_t row, double scale) const {
    std::vector<double> update(shape_.in, 0.0);
    for (int64_t r = 0; r < shape_.rank; ++r) {
      const double b = scale * Value(b_[row * shape_.ldb + r]);
      for (int64_t i = 0; i < shape_.in; ++i) update[i] += b * Value(a_[r * shape_.in + i]);
    }
    return update;
  }

  std::vector<double> Expected(double scale) const {
    std::vector<double> norms(shape_.out);
    for (int64_t o = 0; o < shape_.out; ++o) {
      const std::vector<double> update = Update(o, scale);
      double sum = 0.0;
      for (int64_t i = 0; i < shape_.in; ++i) {
        const double t = Value(w_[o * shape_.in + i]) + update[i];
        sum += t * t;
      }
      norms[o] = std::sqrt(sum);
    }
    return norms;
  }

  struct Result {
    cudaError_t status;
    std::vector<float> norm;
    std::vector<float> g;
  };
  Result Run(Form form, Workspace workspace, double scale) const;
  void Check(Form form, Workspace workspace, double scale, double tolerance) const {
    const Result got = Run(form, workspace, scale);
    ASSERT_EQ(got.status, cudaSuccess) << cudaGetErrorString(got.status);
    const std::vector<double> expected = Expected(scale);
    double worst = 0.0;
    for (int64_t o = 0; o < shape_.out; ++o) {
      ASSERT_TRUE(std::isfinite(got.norm[o])) << o;
      worst = std::max(worst, std::abs(got.norm[o] - expected[o]) / expected[o]);
      ASSERT_EQ(got.g[o], magnitude_[o] / std::max(got.norm[o], 1e-6f)) << o;
    }
    EXPECT_LT(worst, tolerance);
  }

 private:
  Shape shape_;
  std::vector<Bf16> w_;
  std::vector<Bf16> a_;
  std::vector<Bf16> b_;
  std::vector<float> magnitude_;
};

class DeviceModule {
 public:
  DeviceModule(const Module& module, Workspace workspace, double scale, bool w_by_in = false)
      : w_(w_by_in ? Transposed(module) : module.w()),
        a_(module.a()),
        b_(module.b()),
        magnitude_(module.magnitude()),
        base_sq_(module.shape().out),
        norm_(module.shape().out),
        g_(module.shape().out),
        workspace_(workspace(module.shape().out, module.shape().in, module.shape().rank)) {
    params_.w = w_.get();
    params_.a = a_.get();
    params_.b = b_.get();
    params_.base_sq = base_sq_.get();
    params_.magnitude = magnitude_.get();
    params_.norm = norm_.get();
    params_.g = g_.get();
    params_.workspace = workspace_.get();
    params_.workspace_bytes = workspace_.size();
    params_.out = module.shape().out;
    params_.in = module.shape().in;
    params_.rank = module.shape().rank;
    params_.ldb = module.shape().ldb;
    params_.scale = scale;
    params_.w_by_in = w_by_in;
    EXPECT_EQ(SquaredRowNorms(w_.get(), params_.out, params_.in, base_sq_.get(), nullptr),
              cudaSuccess);
  }

  const DoraNormParams& params() const { return params_; }
  std::vector<float> norm() const { return norm_.Read(); }
  std::vector<float> g() const { return g_.Read(); }

 private:
  static std::vector<Bf16> Transposed(const Module& module) {
    const auto [out, in, rank, ldb] = module.shape();
    std::vector<Bf16> w(module.w().size());
    for (int64_t o = 0; o < out; ++o) {
      for (int64_t i = 0; i < in; ++i) w[i * out + o] = module.w()[o * in + i];
    }
    return w;
  }

  const DeviceBuffer<Bf16> w_, a_, b_;
  const DeviceBuffer<float> magnitude_, base_sq_, norm_, g_;
  const DeviceBuffer<char> workspace_;
  DoraNormParams params_;
};

Module::Result Module::Run(Form form, Workspace workspace, double scale) const {
  const DeviceModule device(*this, workspace, scale);
  cudaError_t status = form(device.params(), nullptr);
  if (status == cudaSuccess) status = cudaDeviceSynchronize();
  return {status, device.norm(), device.g()};
}

// Whole tiles and tails of every size, more tiles than multiprocessors, ranks up to 1024.
const Shape kAlignedShapes[] = {
    {128, 256, 64, 64},    {1, 8, 1, 8},          {100, 72, 16, 16},      {257, 520, 8, 8},
    {130, 1032, 384, 384}, {64, 192, 768, 768},   {300, 512, 1024, 1024}, {200, 256, 90, 96},
    {600, 8200, 40, 40},   {140, 2048, 512, 512}, {96, 320, 320, 320},
};
// What only the plain kernel takes.
const Shape kOddShapes[] = {{33, 37, 5, 5}, {40, 64, 3, 3}, {6, 1001, 64, 64}, {3, 1, 1, 1}};

constexpr double kScale = 1.5;

TEST_F(NormTest, DirectFormMatchesDouble) {
  for (const Shape& shape : kAlignedShapes) {
    SCOPED_TRACE(testing::Message() << shape.out << " x " << shape.in << ", r " << shape.rank);
    Module(shape).Check(DirectNorm, DirectNormWorkspace, kScale, 1e-6);
  }
}

TEST_F(NormTest, DirectFormTakesOddSizes) {
  for (const Shape& shape : kOddShapes) {
    SCOPED_TRACE(testing::Message() << shape.out << " x " << shape.in << ", r " << shape.rank);
    Module(shape).Check(DirectNorm, DirectNormWorkspace, kScale, 1e-6);
  }
}

TEST_F(NormTest, FactoredFormMatchesDouble) {
  for (const Shape& shape : kAlignedShapes) {
    SCOPED_TRACE(testing::Message() << shape.out << " x " << shape.in << ", r " << shape.rank);
    Module(shape).Check(FactoredNorm, FactoredNormWorkspace, kScale, 3e-6);
  }
}

TEST_F(NormTest, FactoredFormRefusesOddSizes) {
  for (const Shape& shape : kOddShapes) {
    EXPECT_EQ(Module(shape).Run(FactoredNorm, FactoredNormWorkspace, kScale).status,
              cudaErrorInvalidValue);
  }
}

// W near -s·B·A: the factored form's terms cancel, the direct form's do not.
TEST_F(NormTest, DirectFormSurvivesCancellation) {
  Module module({64, 512, 48, 48}, /*b_deviation=*/0.3f);
  for (int64_t o = 0; o < 64; ++o) {
    const std::vector<double> update = module.Update(o, kScale);
    for (int64_t i = 0; i < 512; ++i) {
      module.w()[o * 512 + i] = __float2bfloat16_rn(static_cast<float>(-update[i]));
    }
  }
  module.Check(DirectNorm, DirectNormWorkspace, kScale, 1e-5);
}

TEST_F(NormTest, BothFormsReduceToTheBaseNorm) {
  const Module module({70, 256, 16, 16});
  module.Check(DirectNorm, DirectNormWorkspace, 0.0, 5e-7);
  module.Check(FactoredNorm, FactoredNormWorkspace, 0.0, 5e-7);
  const Module without({70, 256, 0, 0});
  without.Check(DirectNorm, DirectNormWorkspace, kScale, 1e-6);
  without.Check(FactoredNorm, FactoredNormWorkspace, kScale, 5e-7);
}

TEST_F(NormTest, BothFormsRepeatToTheLastBit) {
  const Module module({520, 4104, 136, 136});
  for (const auto& [form, workspace] : std::vector<std::pair<Form, Workspace>>{
           {DirectNorm, DirectNormWorkspace}, {FactoredNorm, FactoredNormWorkspace}}) {
    const auto first = module.Run(form, workspace, kScale);
    const auto second = module.Run(form, workspace, kScale);
    EXPECT_TRUE(SameBits(first.norm, second.norm));
    EXPECT_TRUE(SameBits(first.g, second.g));
  }
}

// An embedding's weight lies transposed: on the fast path the same tiles, so the same bits.
TEST_F(NormTest, DirectFormTakesATransposedWeight) {
  for (const Shape& shape : std::vector<Shape>{
           {128, 256, 64, 64}, {72, 1000, 16, 16}, {264, 520, 40, 40}, {8, 5000, 384, 384}}) {
    SCOPED_TRACE(testing::Message() << shape.out << " x " << shape.in << ", r " << shape.rank);
    const Module module(shape);
    module.Check(DirectNorm, DirectNormWorkspace, kScale, 1e-6);
    const DeviceModule transposed(module, DirectNormWorkspace, kScale, /*w_by_in=*/true);
    DORAD_ASSERT_CUDA(DirectNorm(transposed.params(), nullptr));
    EXPECT_TRUE(
        SameBits(transposed.norm(), module.Run(DirectNorm, DirectNormWorkspace, kScale).norm));
    EXPECT_EQ(FactoredNorm(transposed.params(), nullptr), cudaErrorInvalidValue);
  }
  // The plain kernel: odd sizes, and s = 0.
  for (const double scale : {kScale, 0.0}) {
    const Module module({33, 37, 5, 5});
    const DeviceModule transposed(module, DirectNormWorkspace, scale, /*w_by_in=*/true);
    DORAD_ASSERT_CUDA(DirectNorm(transposed.params(), nullptr));
    const std::vector<float> norm = transposed.norm();
    const std::vector<double> expected = module.Expected(scale);
    for (size_t o = 0; o < norm.size(); ++o) {
      EXPECT_NEAR(norm[o], expected[o], 1e-6 * expected[o]) << o;
    }
  }
}

// More modules than a launch takes, fast, plain and without adaptation.
TEST_F(NormTest, ManyModulesAreAsOneByOne) {
  const std::vector<Shape> shapes = {{130, 264, 16, 16},  {33, 37, 5, 5},     {64, 2048, 64, 64},
                                     {257, 520, 8, 8},    {1, 8, 1, 8},       {128, 256, 64, 64},
                                     {96, 320, 320, 320}, {70, 256, 0, 0},    {40, 64, 3, 3},
                                     {600, 1032, 40, 40}, {32, 64, 512, 512}, {300, 512, 90, 96}};
  std::vector<Module> modules;
  std::vector<std::unique_ptr<DeviceModule>> device;
  std::vector<DoraNormParams> params;
  for (const Shape& shape : shapes) {
    modules.emplace_back(shape);
    device.push_back(std::make_unique<DeviceModule>(modules.back(), DirectNormWorkspace, kScale));
    params.push_back(device.back()->params());
  }
  DORAD_ASSERT_CUDA(DirectNorms(params.data(), static_cast<int>(params.size()), nullptr));
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto alone = modules[i].Run(DirectNorm, DirectNormWorkspace, kScale);
    ASSERT_EQ(alone.status, cudaSuccess);
    EXPECT_TRUE(SameBits(device[i]->norm(), alone.norm)) << i;
    EXPECT_TRUE(SameBits(device[i]->g(), alone.g)) << i;
  }
}

TEST_F(NormTest, NanOfAWeightStaysInItsRow) {
  Module module({130, 264, 16, 16});
  module.w()[5 * 264 + 100] = __float2bfloat16_rn(kNan);
  for (const auto& [form, workspace] : std::vector<std::pair<Form, Workspace>>{
           {DirectNorm, DirectNormWorkspace}, {FactoredNorm, FactoredNormWorkspace}}) {
    const auto got = module.Run(form, workspace, kScale);
    for (int64_t o = 0; o < 130; ++o) EXPECT_EQ(std::isnan(got.norm[o]), o == 5) << o;
  }
}

TEST_F(NormTest, EveryFormMarksADegenerateModule) {
  for (const bool planted : {false, true}) {
    // Fast, plain, and without adaptation.
    for (const Shape& shape :
         {Shape{130, 264, 16, 16}, Shape{33, 37, 5, 5}, Shape{70, 256, 0, 0}}) {
      Module module(shape);
      if (planted) module.w()[5 * shape.in + 7] = __float2bfloat16_rn(kNan);
      for (const auto& [form, workspace] : std::vector<std::pair<Form, Workspace>>{
               {DirectNorm, DirectNormWorkspace}, {FactoredNorm, FactoredNormWorkspace}}) {
        if (form == FactoredNorm && shape.in % 8 != 0) continue;
        const DeviceModule device(module, workspace, kScale);
        const DeviceBuffer<uint32_t> flag(std::vector<uint32_t>{0});
        DoraNormParams params = device.params();
        params.degenerate = flag.get();
        DORAD_ASSERT_CUDA(form(params, nullptr));
        EXPECT_EQ(flag.Read()[0], planted ? 1u : 0u) << shape.out << " x " << shape.in;
      }
    }
  }
}

TEST_F(NormTest, CanBeCapturedInAGraph) {
  const Module module({256, 512, 64, 64});
  cudaStream_t stream;
  DORAD_ASSERT_CUDA(cudaStreamCreate(&stream));
  for (const auto& [form, workspace] : std::vector<std::pair<Form, Workspace>>{
           {DirectNorm, DirectNormWorkspace}, {FactoredNorm, FactoredNormWorkspace}}) {
    const DeviceModule device(module, workspace, kScale);
    DORAD_ASSERT_CUDA(cudaDeviceSynchronize());
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    DORAD_ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    DORAD_ASSERT_CUDA(form(device.params(), stream));
    DORAD_ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
    DORAD_ASSERT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    DORAD_ASSERT_CUDA(cudaGraphLaunch(executable, stream));
    DORAD_ASSERT_CUDA(cudaGraphLaunch(executable, stream));
    EXPECT_TRUE(SameBits(device.norm(), module.Run(form, workspace, kScale).norm));
    DORAD_ASSERT_CUDA(cudaGraphExecDestroy(executable));
    DORAD_ASSERT_CUDA(cudaGraphDestroy(graph));
  }
  DORAD_ASSERT_CUDA(cudaStreamDestroy(stream));
}

TEST_F(NormTest, RefusesWhatDoesNotFit) {
  DoraNormParams params;
  params.out = 64;
  params.in = 64;
  params.rank = 8;
  params.ldb = 8;
  params.scale = 1.0;
  EXPECT_EQ(DirectNorm(params, nullptr), cudaErrorInvalidValue);  // no workspace
  EXPECT_EQ(FactoredNorm(params, nullptr), cudaErrorInvalidValue);
  params.workspace_bytes = size_t{1} << 30;
  params.ldb = 7;
  EXPECT_EQ(DirectNorm(params, nullptr), cudaErrorInvalidValue);
  params.ldb = 8;
  params.rank = -1;
  EXPECT_EQ(DirectNorm(params, nullptr), cudaErrorInvalidValue);
  params.rank = 8;
  params.out = 0;
  EXPECT_EQ(DirectNorm(params, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace dorad::kernels
