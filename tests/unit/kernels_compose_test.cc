#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/dora/compose.h"
#include "tests/unit/kernels_device.h"

namespace dorad::kernels {
namespace {

float ToFloat(float x) { return x; }
float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
float ToFloat(__half x) { return __half2float(x); }

template <typename T>
T FromFloat(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return __float2half_rn(x);
  }
}

template <typename T>
constexpr FloatType TypeOf() {
  if constexpr (std::is_same_v<T, float>) return FloatType::kF32;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return FloatType::kBF16;
  return FloatType::kF16;
}

template <typename T>
std::vector<T> Random(size_t size, float mean, float deviation, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(mean, deviation);
  std::vector<T> values(size);
  for (T& value : values) value = FromFloat<T>(normal(random));
  return values;
}

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

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
class ComposeTest : public KernelTest {};
using Types = testing::Types<float, __nv_bfloat16, __half>;
TYPED_TEST_SUITE(ComposeTest, Types);

TYPED_TEST(ComposeTest, GivesTheOrderedArithmeticToTheLastBitInPlaceOrNot) {
  using T = TypeParam;
  for (const Shape shape : kShapes) {
    SCOPED_TRACE(testing::Message() << shape.rows << " x " << shape.out);
    const size_t size = shape.rows * shape.out;
    const auto base = Random<T>(size, 0.0f, 3.0f, 1);
    const auto lora = Random<T>(size, 0.0f, 0.5f, 2);
    const auto g = Random<float>(shape.out, 1.0f, 0.002f, 3);
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
    }
  }
}

TYPED_TEST(ComposeTest, TakesUnalignedPointers) {
  using T = TypeParam;
  const Shape shape = {9, 64};
  const size_t size = shape.rows * shape.out;
  const auto base = Random<T>(size, 0.0f, 3.0f, 4);
  const auto lora = Random<T>(size + 1, 0.0f, 0.5f, 5);
  const auto g = Random<float>(shape.out, 1.0f, 0.1f, 6);
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
  const auto base = Random<__nv_bfloat16>(size, 0.0f, 3.0f, 7);
  const auto lora = Random<__nv_bfloat16>(size, 0.0f, 0.001f, 8);
  const auto g = Random<float>(shape.out, 1.0f, 0.0005f, 9);
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
  const auto base = Random<__nv_bfloat16>(size, 0.0f, 3.0f, 10);
  const auto g = Random<float>(shape.out, 1.0f, 0.1f, 11);
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

template <typename T>
class ApplyTest : public KernelTest {};
using OutputTypes = testing::Types<float, __nv_bfloat16>;
TYPED_TEST_SUITE(ApplyTest, OutputTypes);

TYPED_TEST(ApplyTest, JoinsWhatIsThereToTheLastBitAndLeavesThePaddingAlone) {
  using T = TypeParam;
  for (const Shape shape : kShapes) {
    for (int absent = 0; absent < 8; ++absent) {
      SCOPED_TRACE(testing::Message() << shape.rows << " x " << shape.out << ", " << absent);
      const int64_t base_ld = shape.out + 4;
      const int64_t lora_ld = shape.out + 8;
      const int64_t y_ld = shape.out + 12;
      const auto base = Random<float>(shape.rows * base_ld, 0.0f, 3.0f, 12);
      const auto lora = Random<float>(shape.rows * lora_ld, 0.0f, 0.5f, 13);
      const auto g = Random<float>(shape.out, 1.0f, 0.1f, 14);
      const auto bias = Random<float>(shape.out, 0.0f, 1.0f, 15);
      const DeviceBuffer<float> device_base(base);
      const DeviceBuffer<float> device_lora(lora);
      const DeviceBuffer<float> device_g(g);
      const DeviceBuffer<float> device_bias(bias);
      const DeviceBuffer<T> y(shape.rows * y_ld);
      std::vector<T> expected = y.Read();
      ApplyParams params;
      params.base = device_base.get();
      params.lora = (absent & 1) ? nullptr : device_lora.get();
      params.g = (absent & 2) ? nullptr : device_g.get();
      params.bias = (absent & 4) ? nullptr : device_bias.get();
      params.y = y.get();
      params.base_ld = base_ld;
      params.lora_ld = lora_ld;
      params.y_ld = y_ld;
      params.rows = shape.rows;
      params.out = shape.out;
      params.scale = kScale;
      params.y_type = TypeOf<T>();
      for (int64_t row = 0; row < shape.rows; ++row) {
        for (int64_t o = 0; o < shape.out; ++o) {
          volatile float v = base[row * base_ld + o];
          if (params.lora != nullptr) {
            volatile float t = kScale * lora[row * lora_ld + o];
            v = v + t;
          }
          if (params.g != nullptr) v = g[o] * v;
          if (params.bias != nullptr) v = v + bias[o];
          expected[row * y_ld + o] = FromFloat<T>(v);
        }
      }
      DORAD_ASSERT_CUDA(Apply(params, nullptr));
      EXPECT_TRUE(SameBits(y.Read(), expected));
    }
  }
}

class ApplyErrorTest : public KernelTest {};

TEST_F(ApplyErrorTest, WorksInPlace) {
  const Shape shape = {19, 260};
  const auto base = Random<float>(shape.rows * shape.out, 0.0f, 3.0f, 16);
  const auto g = Random<float>(shape.out, 1.0f, 0.1f, 17);
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
  params.y_type = FloatType::kF16;
  EXPECT_EQ(Apply(params, nullptr), cudaErrorInvalidValue);
  params.y_type = FloatType::kF32;
  params.y_ld = 7;
  EXPECT_EQ(Apply(params, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace dorad::kernels
