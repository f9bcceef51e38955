// Keys and values on their way into a cache in eight bits, in the emulator.
#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/decoder/attention.h"
#include "tests/emulation/emulator.h"
#include "tests/unit/kernels/fp8_cache.h"

namespace dorad::kernels {
namespace {

using emulation::Emulator;
using Bf16 = __nv_bfloat16;

TEST(EmulatedRopeAppend, RoundsNumbersBeyondAllScalesToEightBits) {
  struct Number {
    float x, want;
  };
  constexpr float kMost = 57344.0f;  // 448 · 2^7
  const std::vector<Number> numbers = {
      {1.0f, 1.0f},     {kMost, kMost}, {-60000.0f, -kMost},        {1e38f, kMost},
      {-1e-35f, 0.0f},  {NAN, NAN},     {0x1.Cp-93f, 0x1.Cp-93f},   {INFINITY, NAN},
      {-INFINITY, NAN}, {0.0f, 0.0f},   {-0x1.8p-93f, -0x1.8p-93f}, {2.0f, 2.0f},
  };
  Emulator emulator(3);
  const AttentionShape shape{1, 1, 64};
  const auto rows = static_cast<int32_t>(numbers.size());
  ASSERT_LE(rows, kKvPageTokens);
  std::vector<Bf16> qkv(rows * 3 * shape.head_dim, __float2bfloat16(0.0f)),
      q(rows * shape.head_dim);
  const auto head = [&](int row, int part) {
    return qkv.data() + (row * 3 + part) * shape.head_dim;
  };
  std::vector<int32_t> positions(rows), sequences(rows, 0);
  const int32_t page = 0;
  for (int row = 0; row < rows; ++row) {
    positions[row] = row;
    for (const int part : {1, 2}) head(row, part)[7] = __float2bfloat16(numbers[row].x);
  }
  const std::vector<float> cos(kKvPageTokens * shape.head_dim / 2, 1.0f), sin(cos.size(), 0.0f);
  Fp8Cache cache(shape, 1);
  for (int row = 0; row < rows; ++row) {
    std::vector<float> ones(shape.head_dim, 1.0f);
    for (const Kind kind : {kKey, kValue}) cache.Put(kind, 0, 0, row, ones.data());
  }
  RopeAppendParams params;
  params.rows = {rows, nullptr, positions.data(), sequences.data(), &page, &page};
  params.shape = shape;
  params.qkv = qkv.data();
  params.cos = cos.data();
  params.sin = sin.data();
  params.q = q.data();
  params.cache = cache.OnHost();
  ASSERT_EQ(RopeAppend(params, nullptr), cudaSuccess);
  Emulator::Get().Run();
  for (int row = 0; row < rows; ++row) {
    for (const Kind kind : {kKey, kValue}) {
      for (int d = 0; d < shape.head_dim; ++d) {
        const float got = cache.Get(kind, 0, 0, row, d);
        if (std::isnan(numbers[row].want)) {
          EXPECT_TRUE(std::isnan(got))
              << numbers[row].x << " makes the whole head NaN, not " << got;
        } else {
          EXPECT_EQ(got, d == 7 ? numbers[row].want : 0.0f) << numbers[row].x << " dim " << d;
        }
      }
    }
  }
}

}  // namespace
}  // namespace dorad::kernels
