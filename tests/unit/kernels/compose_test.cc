#include "kernels/dora/compose.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tests/unit/kernels/device.h"
#include "tests/unit/kernels/floats.h"

namespace dorad::kernels {
namespace {

struct Shape {
  int64_t rows;
  int64_t out;
};

// Vectors and tails, one row and several blocks of them, a width that no vector divides.
const Shape kShapes[] = {{1, 1},     {1, 8},     {3, 64},     {7, 37},    {5, 1536},
                         {33, 1000}, {130, 264}, {200, 4096}, {129, 4099}};

constexpr float kScale = 1.7f;

template <typename T>
std::vector<T> ExpectedCompose(const std::vector<T>& base, const std::vector<T>& lora,
                               const std::vector<float>& g, Shape shape) {
  std::vector<T> delta(base.size());
  for (int64_t row = 0; row < shape.rows; ++row) {
    for (int64_t o = 0; o < shape.out; ++o) {
      const size_t i = row * shape.out + o;
      // One operation a statement: nothing for a compiler to contract.
      volatile float t = kScale * ToFloat(lora[i]);
      volatile float u = g[o] * t;
      volatile float correction = g[o] - 1.0f;
      volatile float v = correction * ToFloat(base[i]);
      delta[i] = FromFloat<T>(v + u);
    }
  }
  return delta;
}

template <typename T>
std::vector<T> ExpectedInner(const std::vector<T>& base, const std::vector<T>& lora) {
  std::vector<T> inner(base.size());
  for (size_t i = 0; i < base.size(); ++i) {
    volatile float t = kScale * ToFloat(lora[i]);
    inner[i] = FromFloat<T>(ToFloat(base[i]) + t);
  }
  return inner;
}

template <typename T>
class ComposeTest : public KernelTest {};
using Types = testing::Types<float, __nv_bfloat16, __half>;
TYPED_TEST_SUITE(ComposeTest, Types);

TYPED_TEST(ComposeTest, GivesTheOrderedArithmeticToTheLastBitInPlaceOrNot) {
  using T = TypeParam;
  for (const Shape shape : kShapes) {
    SCOPED_TRACE(testing::Message() << shape.rows << " x " << shape.out);
    const size_t size = shape.rows * shape.out;
    const auto base = RandomValues<T>(size, 0.0f, 3.0f, 1);
    const auto lora = RandomValues<T>(size, 0.0f, 0.5f, 2);
    const auto g = RandomValues<float>(shape.out, 1.0f, 0.002f, 3);
    const auto expected = ExpectedCompose(base, lora, g, shape);
    const DeviceBuffer<float> device_g(g);
    for (int place = 0; place < 3; ++place) {
      const DeviceBuffer<T> device_base(base);
      const DeviceBuffer<T> device_lora(lora);
      const DeviceBuffer<T> delta(size);
      const DeviceBuffer<T>& to = place == 0 ? delta : place == 1 ? device_base : device_lora;
      ComposeParams params;
      params.base = device_base.get();
      params.lora = device_lora.get();
      params.g = device_g.get();
      params.delta = to.get();
      params.rows = shape.rows;
      params.out = shape.out;
      params.scale = kScale;
      params.type = TypeOf<T>();
      DORAD_ASSERT_CUDA(Compose(params, nullptr));
      EXPECT_TRUE(SameBits(to.Read(), expected)) << "place " << place;
      // With the sum that the backward pass needs, which may replace the other input.
      const DeviceBuffer<T> again_base(base), again_lora(lora), again_delta(size),
          again_inner(size);
      const DeviceBuffer<T>& delta_to = place == 0   ? again_delta
                                        : place == 1 ? again_base
                                                     : again_lora;
      const DeviceBuffer<T>& inner_to = place == 0   ? again_inner
                                        : place == 1 ? again_lora
                                                     : again_base;
      params.base = again_base.get();
      params.lora = again_lora.get();
      params.delta = delta_to.get();
      params.inner = inner_to.get();
      DORAD_ASSERT_CUDA(Compose(params, nullptr));
      EXPECT_TRUE(SameBits(delta_to.Read(), expected)) << "place " << place;
      EXPECT_TRUE(SameBits(inner_to.Read(), ExpectedInner(base, lora))) << "place " << place;
    }
  }
}

TYPED_TEST(ComposeTest, TakesUnalignedPointers) {
  using T = TypeParam;
  const Shape shape = {9, 64};
  const size_t size = shape.rows * shape.out;
  const auto base = RandomValues<T>(size, 0.0f, 3.0f, 4);
  const auto lora = RandomValues<T>(size + 1, 0.0f, 0.5f, 5);
  const auto g = RandomValues<float>(shape.out, 1.0f, 0.1f, 6);
  const DeviceBuffer<T> device_base(base);
  const DeviceBuffer<T> device_lora(lora);
  const DeviceBuffer<float> device_g(g);
  const DeviceBuffer<T> delta(size);
  ComposeParams params;
  params.base = device_base.get();
  params.lora = device_lora.get() + 1;
  params.g = device_g.get();
  params.delta = delta.get();
  params.rows = shape.rows;
  params.out = shape.out;
  params.scale = kScale;
  params.type = TypeOf<T>();
  DORAD_ASSERT_CUDA(Compose(params, nullptr));
  const std::vector<T> shifted(lora.begin() + 1, lora.end());
  EXPECT_TRUE(SameBits(delta.Read(), ExpectedCompose(base, shifted, g, shape)));
}

class ComposeErrorTest : public KernelTest {};

// With g within 2^-9 of 1, bf16 arithmetic would lose the base's share of delta altogether.
TEST_F(ComposeErrorTest, KeepsTheSmallCorrectionNearOne) {
  const Shape shape = {64, 512};
  const size_t size = shape.rows * shape.out;
  const auto base = RandomValues<__nv_bfloat16>(size, 0.0f, 3.0f, 7);
  const auto lora = RandomValues<__nv_bfloat16>(size, 0.0f, 0.001f, 8);
  const auto g = RandomValues<float>(shape.out, 1.0f, 0.0005f, 9);
  const DeviceBuffer<__nv_bfloat16> device_base(base);
  const DeviceBuffer<__nv_bfloat16> device_lora(lora);
  const DeviceBuffer<float> device_g(g);
  const DeviceBuffer<__nv_bfloat16> delta(size);
  ComposeParams params;
  params.base = device_base.get();
  params.lora = device_lora.get();
  params.g = device_g.get();
  params.delta = delta.get();
  params.rows = shape.rows;
  params.out = shape.out;
  params.scale = kScale;
  DORAD_ASSERT_CUDA(Compose(params, nullptr));
  const auto got = delta.Read();
  for (size_t i = 0; i < size; ++i) {
    const double factor = g[i % shape.out];
    const double expected = (factor - 1.0) * static_cast<double>(ToFloat(base[i])) +
                            factor * static_cast<double>(kScale) * ToFloat(lora[i]);
    // Half a bf16 step, and fp32's error in the terms that may cancel.
    const double bound = std::ldexp(std::abs(expected), -8) + 1e-6 * std::abs(ToFloat(base[i]));
    ASSERT_NEAR(ToFloat(got[i]), expected, bound) << i;
  }
}

TEST_F(ComposeErrorTest, WalksMoreRowsThanAGridHas) {
  const Shape shape = {524287, 8};
  const size_t size = shape.rows * shape.out;
  const auto base = RandomValues<__nv_bfloat16>(size, 0.0f, 3.0f, 10);
  const auto g = RandomValues<float>(shape.out, 1.0f, 0.1f, 11);
  const DeviceBuffer<__nv_bfloat16> device_base(base);
  const DeviceBuffer<float> device_g(g);
  const DeviceBuffer<__nv_bfloat16> delta(size);
  ComposeParams params;
  params.base = device_base.get();
  params.lora = device_base.get();
  params.g = device_g.get();
  params.delta = delta.get();
  params.rows = shape.rows;
  params.out = shape.out;
  params.scale = kScale;
  DORAD_ASSERT_CUDA(Compose(params, nullptr));
  EXPECT_TRUE(SameBits(delta.Read(), ExpectedCompose(base, base, g, shape)));
}

TEST_F(ComposeErrorTest, RefusesBadSizesAndTakesNone) {
  ComposeParams params;
  params.rows = -1;
  params.out = 8;
  EXPECT_EQ(Compose(params, nullptr), cudaErrorInvalidValue);
  params.rows = int64_t{1} << 40;
  EXPECT_EQ(Compose(params, nullptr), cudaErrorInvalidValue);
  params.rows = 0;
  EXPECT_EQ(Compose(params, nullptr), cudaSuccess);
}

template <typename Types>
class ApplyTest : public KernelTest {};
// Of base and lora, and of y.
using ApplyTypes = testing::Types<std::pair<float, float>, std::pair<float, __nv_bfloat16>,
                                  std::pair<float, __half>, std::pair<__nv_bfloat16, __nv_bfloat16>,
                                  std::pair<__half, __half>>;
TYPED_TEST_SUITE(ApplyTest, ApplyTypes);

TYPED_TEST(ApplyTest, JoinsWhatIsThereToTheLastBitAndLeavesThePaddingAlone) {
  using T = typename TypeParam::first_type;
  using Y = typename TypeParam::second_type;
  for (const Shape shape : kShapes) {
    for (int absent = 0; absent < 16; ++absent) {
      SCOPED_TRACE(testing::Message() << shape.rows << " x " << shape.out << ", " << absent);
      const int64_t base_ld = shape.out + 8;
      const int64_t lora_ld = shape.out + 16;
      const int64_t y_ld = shape.out + 24;
      const auto base = RandomValues<T>(shape.rows * base_ld, 0.0f, 3.0f, 12);
      const auto lora = RandomValues<T>(shape.rows * lora_ld, 0.0f, 0.5f, 13);
      const auto g = RandomValues<float>(shape.out, 1.0f, 0.1f, 14);
      const auto bias = RandomValues<float>(shape.out, 0.0f, 1.0f, 15);
      const DeviceBuffer<T> device_base(base);
      const DeviceBuffer<T> device_lora(lora);
      const DeviceBuffer<float> device_g(g);
      const DeviceBuffer<float> device_bias(bias);
      const DeviceBuffer<Y> y(shape.rows * y_ld);
      const DeviceBuffer<Y> inner(shape.rows * y_ld);
      std::vector<Y> expected = y.Read();
      std::vector<Y> expected_inner = inner.Read();
      ApplyParams params;
      params.base = device_base.get();
      params.lora = (absent & 1) ? nullptr : device_lora.get();
      params.g = (absent & 2) ? nullptr : device_g.get();
      params.bias = (absent & 4) ? nullptr : device_bias.get();
      params.y = y.get();
      params.inner = (absent & 8) ? nullptr : inner.get();
      params.base_ld = base_ld;
      params.lora_ld = lora_ld;
      params.y_ld = y_ld;
      params.rows = shape.rows;
      params.out = shape.out;
      params.scale = kScale;
      params.type = TypeOf<T>();
      params.y_type = TypeOf<Y>();
      for (int64_t row = 0; row < shape.rows; ++row) {
        for (int64_t o = 0; o < shape.out; ++o) {
          volatile float v = ToFloat(base[row * base_ld + o]);
          if (params.lora != nullptr) {
            volatile float t = kScale * ToFloat(lora[row * lora_ld + o]);
            v = v + t;
          }
          if (params.inner != nullptr) expected_inner[row * y_ld + o] = FromFloat<Y>(v);
          if (params.g != nullptr) v = g[o] * v;
          if (params.bias != nullptr) v = v + bias[o];
          expected[row * y_ld + o] = FromFloat<Y>(v);
        }
      }
      DORAD_ASSERT_CUDA(Apply(params, nullptr));
      EXPECT_TRUE(SameBits(y.Read(), expected));
      EXPECT_TRUE(SameBits(inner.Read(), expected_inner));
    }
  }
}

class ApplyErrorTest : public KernelTest {};

TEST_F(ApplyErrorTest, WorksInPlace) {
  const Shape shape = {19, 260};
  const auto base = RandomValues<float>(shape.rows * shape.out, 0.0f, 3.0f, 16);
  const auto g = RandomValues<float>(shape.out, 1.0f, 0.1f, 17);
  const DeviceBuffer<float> y(base);
  const DeviceBuffer<float> device_g(g);
  ApplyParams params;
  params.base = y.get();
  params.g = device_g.get();
  params.y = y.get();
  params.base_ld = params.y_ld = params.out = shape.out;
  params.rows = shape.rows;
  params.y_type = FloatType::kF32;
  DORAD_ASSERT_CUDA(Apply(params, nullptr));
  std::vector<float> expected = base;
  for (size_t i = 0; i < expected.size(); ++i) expected[i] = g[i % shape.out] * base[i];
  EXPECT_TRUE(SameBits(y.Read(), expected));
}

TEST_F(ApplyErrorTest, RefusesBadParameters) {
  ApplyParams params;
  params.rows = 2;
  params.out = params.base_ld = params.y_ld = 8;
  params.type = FloatType::kBF16;
  params.y_type = FloatType::kF16;
  EXPECT_EQ(Apply(params, nullptr), cudaErrorInvalidValue);
  params.y_type = FloatType::kF32;
  EXPECT_EQ(Apply(params, nullptr), cudaErrorInvalidValue);
  params.type = FloatType::kF32;
  params.y_ld = 7;
  EXPECT_EQ(Apply(params, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace dorad::kernels
