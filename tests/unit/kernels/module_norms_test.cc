// Row norms of W + s*B*A: both forms of the kernel against fp64.
#include "tests/unit/kernels/norm_values.h"

namespace dorad::kernels {
namespace {

class ModuleNormsTest : public IsaTest {};
DORAD_FOR_EACH_ISA(ModuleNormsTest);

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
    params_.isa = tested_isa;
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

TEST_P(ModuleNormsTest, DirectFormMatchesDouble) {
  for (const Shape& shape : kAlignedShapes) {
    SCOPED_TRACE(testing::Message() << shape.out << " x " << shape.in << ", r " << shape.rank);
    Module(shape).Check(DirectNorm, DirectNormWorkspace, kScale, 1e-6);
  }
}

TEST_P(ModuleNormsTest, DirectFormTakesOddSizes) {
  for (const Shape& shape : kOddShapes) {
    SCOPED_TRACE(testing::Message() << shape.out << " x " << shape.in << ", r " << shape.rank);
    Module(shape).Check(DirectNorm, DirectNormWorkspace, kScale, 1e-6);
  }
}

TEST_P(ModuleNormsTest, FactoredFormMatchesDouble) {
  for (const Shape& shape : kAlignedShapes) {
    SCOPED_TRACE(testing::Message() << shape.out << " x " << shape.in << ", r " << shape.rank);
    Module(shape).Check(FactoredNorm, FactoredNormWorkspace, kScale, 3e-6);
  }
}

TEST_P(ModuleNormsTest, FactoredFormRefusesOddSizes) {
  for (const Shape& shape : kOddShapes) {
    EXPECT_EQ(Module(shape).Run(FactoredNorm, FactoredNormWorkspace, kScale).status,
              cudaErrorInvalidValue);
  }
}

// W near -s·B·A: the factored form's terms cancel, the direct form's do not.
TEST_P(ModuleNormsTest, DirectFormSurvivesCancellation) {
  Module module({64, 512, 48, 48}, /*b_deviation=*/0.3f);
  for (int64_t o = 0; o < 64; ++o) {
    const std::vector<double> update = module.Update(o, kScale);
    for (int64_t i = 0; i < 512; ++i) {
      module.w()[o * 512 + i] = __float2bfloat16_rn(static_cast<float>(-update[i]));
    }
  }
  module.Check(DirectNorm, DirectNormWorkspace, kScale, 1e-5);
}

TEST_P(ModuleNormsTest, BothFormsReduceToTheBaseNorm) {
  const Module module({70, 256, 16, 16});
  module.Check(DirectNorm, DirectNormWorkspace, 0.0, 5e-7);
  module.Check(FactoredNorm, FactoredNormWorkspace, 0.0, 5e-7);
  const Module without({70, 256, 0, 0});
  without.Check(DirectNorm, DirectNormWorkspace, kScale, 1e-6);
  without.Check(FactoredNorm, FactoredNormWorkspace, kScale, 5e-7);
}

TEST_P(ModuleNormsTest, BothFormsRepeatToTheLastBit) {
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
TEST_P(ModuleNormsTest, DirectFormTakesATransposedWeight) {
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
TEST_P(ModuleNormsTest, ManyModulesAreAsOneByOne) {
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

TEST_P(ModuleNormsTest, NanOfAWeightStaysInItsRow) {
  Module module({130, 264, 16, 16});
  module.w()[5 * 264 + 100] = __float2bfloat16_rn(kNan);
  for (const auto& [form, workspace] : std::vector<std::pair<Form, Workspace>>{
           {DirectNorm, DirectNormWorkspace}, {FactoredNorm, FactoredNormWorkspace}}) {
    const auto got = module.Run(form, workspace, kScale);
    for (int64_t o = 0; o < 130; ++o) EXPECT_EQ(std::isnan(got.norm[o]), o == 5) << o;
  }
}

TEST_P(ModuleNormsTest, EveryFormMarksADegenerateModule) {
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

TEST_P(ModuleNormsTest, CanBeCapturedInAGraph) {
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

TEST_P(ModuleNormsTest, RefusesWhatDoesNotFit) {
  DoraNormParams params;
  params.out = 64;
  params.in = 64;
  params.rank = 8;
  params.ldb = 8;
  params.scale = 1.0;
  params.isa = GetParam();
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
