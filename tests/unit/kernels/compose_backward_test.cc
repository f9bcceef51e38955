#include "kernels/dora/compose_backward.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <type_traits>
#include <vector>

#include "tests/unit/kernels/device.h"
#include "tests/unit/kernels/floats.h"

namespace dorad::kernels {
namespace {

struct Shape {
  int64_t rows;
  int64_t out;
};

// Vectors and tails, one block of rows and several, a width that no vector divides.
const Shape kShapes[] = {{1, 1},      {1, 8},      {3, 64},    {7, 37},    {128, 264},
                         {129, 1000}, {257, 4096}, {300, 333}, {2048, 512}};

constexpr float kScale = 1.7f;

template <typename T>
struct Tensors {
  Tensors(Shape shape, uint32_t seed)
      : shape(shape),
        size(static_cast<size_t>(shape.rows * shape.out)),
        grad(RandomValues<T>(size, 0.0f, 1.0f, seed)),
        inner(RandomValues<T>(size, 0.1f, 2.0f, seed + 1)),
        g(RandomValues<float>(static_cast<size_t>(shape.out), 1.0f, 0.01f, seed + 2)) {}

  std::vector<T> ExpectedBase() const {
    std::vector<T> expected(size);
    for (size_t i = 0; i < size; ++i) {
      volatile float correction = g[i % shape.out] - 1.0f;
      expected[i] = FromFloat<T>(correction * ToFloat(grad[i]));
    }
    return expected;
  }
  std::vector<T> ExpectedLora() const {
    std::vector<T> expected(size);
    for (size_t i = 0; i < size; ++i) {
      volatile float factor = kScale * g[i % shape.out];
      expected[i] = FromFloat<T>(factor * ToFloat(grad[i]));
    }
    return expected;
  }

  const Shape shape;
  const size_t size;
  const std::vector<T> grad, inner;
  const std::vector<float> g;
};

template <typename T>
ComposeBackwardParams Params(const Tensors<T>& tensors) {
  ComposeBackwardParams params;
  params.rows = tensors.shape.rows;
  params.out = tensors.shape.out;
  params.scale = kScale;
  params.type = TypeOf<T>();
  params.workspace_bytes = ComposeBackwardWorkspace(params.rows, params.out);
  return params;
}

template <typename T>
class ComposeBackwardTest : public KernelTest {};
using Types = testing::Types<float, __nv_bfloat16, __half>;
TYPED_TEST_SUITE(ComposeBackwardTest, Types);

TYPED_TEST(ComposeBackwardTest, GivesWhatIsWantedInPlaceOrNot) {
  using T = TypeParam;
  for (const Shape shape : kShapes) {
    const Tensors<T> tensors(shape, 1);
    const DeviceBuffer<float> g(tensors.g);
    for (int wanted = 1; wanted < 8; ++wanted) {
      for (const bool in_place : {false, true}) {
        SCOPED_TRACE(testing::Message() << shape.rows << " x " << shape.out << ", wanted " << wanted
                                        << ", in place " << in_place);
        const DeviceBuffer<T> grad(tensors.grad), inner(tensors.inner);
        const DeviceBuffer<T> base(tensors.size), lora(tensors.size);
        const DeviceBuffer<float> d_g(shape.out);
        ComposeBackwardParams params = Params(tensors);
        const DeviceBuffer<char> workspace(params.workspace_bytes);
        const DeviceBuffer<T>& to_base = in_place ? grad : base;
        const DeviceBuffer<T>& to_lora = in_place ? inner : lora;
        params.grad = grad.get();
        params.g = g.get();
        if (wanted & 1) params.d_base = to_base.get();
        if (wanted & 2) params.d_lora = to_lora.get();
        if (wanted & 4) {
          params.inner = inner.get();
          params.d_g = d_g.get();
          params.workspace = workspace.get();
        }
        DORAD_ASSERT_CUDA(ComposeBackward(params, nullptr));
        EXPECT_TRUE(!(wanted & 1) || SameBits(to_base.Read(), tensors.ExpectedBase()));
        EXPECT_TRUE(!(wanted & 2) || SameBits(to_lora.Read(), tensors.ExpectedLora()));
        if (!(wanted & 4)) continue;
        const std::vector<float> sums = d_g.Read();
        for (int64_t o = 0; o < shape.out; ++o) {
          double expected = 0.0, magnitude = 0.0;
          for (int64_t row = 0; row < shape.rows; ++row) {
            const size_t i = row * shape.out + o;
            const double product = static_cast<double>(ToFloat(tensors.grad[i])) *
                                   static_cast<double>(ToFloat(tensors.inner[i]));
            expected += product;
            magnitude += std::abs(product);
          }
          ASSERT_NEAR(sums[o], expected, 3e-6 * magnitude) << o;
        }
      }
    }
  }
}

TYPED_TEST(ComposeBackwardTest, DividesTheSumsByTheNormsAndRoundsThem) {
  using T = TypeParam;
  constexpr float kEps = 1e-6f;
  for (const Shape shape : kShapes) {
    SCOPED_TRACE(testing::Message() << shape.rows << " x " << shape.out);
    const Tensors<T> tensors(shape, 7);
    std::vector<float> norms = RandomValues<float>(shape.out, 2.0f, 0.1f, 8);
    norms[0] = 0.0f;
    if (shape.out > 1) norms[1] = std::nanf("");
    const DeviceBuffer<T> grad(tensors.grad), inner(tensors.inner);
    const DeviceBuffer<float> g(tensors.g), d_g(shape.out), norm(norms);
    ComposeBackwardParams params = Params(tensors);
    const DeviceBuffer<char> workspace(params.workspace_bytes);
    params.grad = grad.get();
    params.inner = inner.get();
    params.g = g.get();
    params.d_g = d_g.get();
    params.workspace = workspace.get();
    DORAD_ASSERT_CUDA(ComposeBackward(params, nullptr));
    std::vector<float> expected = d_g.Read();
    for (int64_t o = 0; o < shape.out; ++o) expected[o] /= norms[o] < kEps ? kEps : norms[o];
    params.norm = norm.get();
    params.eps = kEps;
    DORAD_ASSERT_CUDA(ComposeBackward(params, nullptr));
    const std::vector<float> divided = d_g.Read();
    const DeviceBuffer<T> in_type(shape.out);
    params.d_g = in_type.get();
    params.d_g_type = TypeOf<T>();
    DORAD_ASSERT_CUDA(ComposeBackward(params, nullptr));
    const std::vector<T> rounded = in_type.Read();
    for (int64_t o = 0; o < shape.out; ++o) {
      if (std::isnan(norms[o])) {
        EXPECT_TRUE(std::isnan(divided[o]));
      } else {
        ASSERT_EQ(divided[o], expected[o]) << o;
        ASSERT_EQ(ToFloat(rounded[o]), ToFloat(FromFloat<T>(expected[o]))) << o;
      }
    }
  }
}

TYPED_TEST(ComposeBackwardTest, TakesUnalignedPointers) {
  using T = TypeParam;
  const Tensors<T> tensors({140, 64}, 4);
  std::vector<T> shifted(tensors.size + 1);
  std::copy(tensors.grad.begin(), tensors.grad.end(), shifted.begin() + 1);
  const DeviceBuffer<T> grad(shifted), inner(tensors.inner), lora(tensors.size);
  const DeviceBuffer<float> g(tensors.g), d_g(64), aligned_d_g(64);
  ComposeBackwardParams params = Params(tensors);
  const DeviceBuffer<char> workspace(params.workspace_bytes);
  params.grad = grad.get() + 1;
  params.inner = inner.get();
  params.g = g.get();
  params.d_lora = lora.get();
  params.d_g = d_g.get();
  params.workspace = workspace.get();
  DORAD_ASSERT_CUDA(ComposeBackward(params, nullptr));
  EXPECT_TRUE(SameBits(lora.Read(), tensors.ExpectedLora()));
  const DeviceBuffer<T> aligned(tensors.grad);
  params.grad = aligned.get();
  params.d_g = aligned_d_g.get();
  DORAD_ASSERT_CUDA(ComposeBackward(params, nullptr));
  const auto one = d_g.Read(), other = aligned_d_g.Read();
  for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], other[i], 1e-3);
}

class ComposeBackwardSumTest : public KernelTest {};

TEST_F(ComposeBackwardSumTest, IsTheSameToTheLastBitEachTime) {
  const Tensors<__nv_bfloat16> tensors({4096, 1024}, 9);
  const DeviceBuffer<__nv_bfloat16> grad(tensors.grad), inner(tensors.inner), base(tensors.size),
      lora(tensors.size);
  const DeviceBuffer<float> g(tensors.g), d_g(1024);
  ComposeBackwardParams params = Params(tensors);
  const DeviceBuffer<char> workspace(params.workspace_bytes);
  params.grad = grad.get();
  params.inner = inner.get();
  params.g = g.get();
  params.d_base = base.get();
  params.d_lora = lora.get();
  params.d_g = d_g.get();
  params.workspace = workspace.get();
  DORAD_ASSERT_CUDA(ComposeBackward(params, nullptr));
  const std::vector<float> first = d_g.Read();
  for (int run = 0; run < 100; ++run) {
    DORAD_ASSERT_CUDA(ComposeBackward(params, nullptr));
    ASSERT_TRUE(SameBits(d_g.Read(), first)) << run;
  }
}

TEST_F(ComposeBackwardSumTest, WalksMoreRowsThanAGridHas) {
  const int64_t rows = int64_t{65536} * 512 + 3;
  const std::vector<__nv_bfloat16> ones(static_cast<size_t>(rows), __float2bfloat16_rn(1.0f));
  const DeviceBuffer<__nv_bfloat16> grad(ones);
  const DeviceBuffer<float> g(std::vector<float>{1.5f}), d_g(1);
  ComposeBackwardParams params;
  params.rows = rows;
  params.out = 1;
  params.workspace_bytes = ComposeBackwardWorkspace(rows, 1);
  const DeviceBuffer<char> workspace(params.workspace_bytes);
  params.grad = params.inner = grad.get();
  params.g = g.get();
  params.d_g = d_g.get();
  params.workspace = workspace.get();
  DORAD_ASSERT_CUDA(ComposeBackward(params, nullptr));
  EXPECT_EQ(d_g.Read()[0], static_cast<float>(rows));
}

TEST_F(ComposeBackwardSumTest, OfNoRowsIsZero) {
  const DeviceBuffer<float> g(std::vector<float>(8, 1.0f)), d_g(8);
  ComposeBackwardParams params;
  params.out = 8;
  params.g = g.get();
  params.d_g = d_g.get();
  DORAD_ASSERT_CUDA(ComposeBackward(params, nullptr));
  EXPECT_EQ(d_g.Read(), std::vector<float>(8, 0.0f));
}

TEST_F(ComposeBackwardSumTest, RefusesBadParameters) {
  const DeviceBuffer<float> any(std::vector<float>(4096, 1.0f));
  ComposeBackwardParams params;
  params.rows = -1;
  params.out = 8;
  EXPECT_EQ(ComposeBackward(params, nullptr), cudaErrorInvalidValue);
  params.rows = 256;
  params.grad = params.g = any.get();
  params.type = FloatType::kF32;
  params.d_g = any.get();
  params.workspace = any.get();
  params.workspace_bytes = ComposeBackwardWorkspace(256, 8);
  EXPECT_EQ(ComposeBackward(params, nullptr), cudaErrorInvalidValue) << "without inner";
  params.inner = any.get();
  params.workspace_bytes -= 1;
  EXPECT_EQ(ComposeBackward(params, nullptr), cudaErrorInvalidValue) << "workspace";
}

}  // namespace
}  // namespace dorad::kernels
