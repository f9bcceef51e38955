// The small kernels between the projections against fp64 on the host, at sizes that take each of
// their forms; and in a chain of early launches against one launch at a time, to the last bit.
#include <cuda_bf16.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <random>
#include <vector>

#include "kernels/decoder/activation.h"
#include "kernels/decoder/embedding.h"
#include "kernels/decoder/rms_norm.h"
#include "tests/unit/kernels/device.h"

namespace dorad::kernels {
namespace {

using Bf16 = __nv_bfloat16;

constexpr float kEps = 1e-6f;

template <typename T>
std::vector<T> Normals(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<T> values(size);
  for (T& x : values) x = static_cast<T>(normal(random));
  return values;
}

class PointwiseTest : public KernelTest {};

TEST_F(PointwiseTest, NormAddsAndScales) {
  for (const int size : {1, 7, 66, 576, 2046, 3072, 4096, 5000, 8192, 16384}) {
    for (const bool has_delta : {true, false}) {
      if (size % 4 != 0 && size > 4096) continue;
      const int rows = 3;
      const auto residual = Normals<float>(int64_t{rows} * size, size);
      const auto delta = Normals<float>(int64_t{rows} * size, size + 1);
      const auto weight = Normals<float>(size, size + 2);
      const DeviceBuffer<float> d_residual(residual), d_delta(delta), d_weight(weight);
      const DeviceBuffer<Bf16> d_out(residual.size());
      AddRmsNormParams params;
      params.rows = rows;
      params.size = size;
      params.residual = d_residual.get();
      params.delta = has_delta ? d_delta.get() : nullptr;
      params.weight = d_weight.get();
      params.eps = kEps;
      params.out = d_out.get();
      DORAD_ASSERT_CUDA(AddRmsNorm(params, nullptr));
      const auto sums = d_residual.Read();
      const auto out = d_out.Read();
      for (int row = 0; row < rows; ++row) {
        double squares = 0.0;
        for (int i = 0; i < size; ++i) {
          const int64_t at = int64_t{row} * size + i;
          ASSERT_EQ(sums[at], has_delta ? residual[at] + delta[at] : residual[at]) << size;
          squares += double{sums[at]} * sums[at];
        }
        const double scale = 1.0 / std::sqrt(squares / size + kEps);
        for (int i = 0; i < size; ++i) {
          const int64_t at = int64_t{row} * size + i;
          const double expected = double{sums[at]} * scale * weight[i];
          ASSERT_NEAR(__bfloat162float(out[at]), expected, std::abs(expected) * 0.004) << size;
        }
      }
    }
  }
}

// Sizes of two and of four groups a thread, with and without vectors.
TEST_F(PointwiseTest, NormOfTheDeltaComesBeforeTheResidual) {
  for (const int size : {1, 7, 66, 576, 4096, 5376, 8192, 12288, 16384}) {
    constexpr int kRows = 3;
    const auto residual = Normals<float>(int64_t{kRows} * size, size);
    auto delta = Normals<float>(int64_t{kRows} * size, size + 1);
    for (float& value : delta) value *= 30.0f;
    const auto weight = Normals<float>(size, size + 2), delta_weight = Normals<float>(size, 9);
    const DeviceBuffer<float> d_residual(residual), d_delta(delta), d_weight(weight),
        d_delta_weight(delta_weight);
    const DeviceBuffer<Bf16> d_out(residual.size());
    AddRmsNormParams params;
    params.rows = kRows;
    params.size = size;
    params.residual = d_residual.get();
    params.delta = d_delta.get();
    params.delta_weight = d_delta_weight.get();
    params.weight = d_weight.get();
    params.eps = kEps;
    params.out = d_out.get();
    DORAD_ASSERT_CUDA(AddRmsNorm(params, nullptr));
    const auto sums = d_residual.Read();
    const auto out = d_out.Read();
    ASSERT_EQ(d_delta.Read(), delta);
    for (int row = 0; row < kRows; ++row) {
      double delta_squares = 0.0, squares = 0.0;
      for (int i = 0; i < size; ++i) {
        const double value = delta[int64_t{row} * size + i];
        delta_squares += value * value;
      }
      const double delta_scale = 1.0 / std::sqrt(delta_squares / size + kEps);
      for (int i = 0; i < size; ++i) {
        const int64_t at = int64_t{row} * size + i;
        const double expected = residual[at] + delta[at] * delta_scale * delta_weight[i];
        ASSERT_NEAR(sums[at], expected, 2e-5) << size;
        squares += double{sums[at]} * sums[at];
      }
      const double scale = 1.0 / std::sqrt(squares / size + kEps);
      for (int i = 0; i < size; ++i) {
        const int64_t at = int64_t{row} * size + i;
        const double expected = double{sums[at]} * scale * weight[i];
        ASSERT_NEAR(__bfloat162float(out[at]), expected, std::abs(expected) * 0.004) << size;
      }
    }
  }
}

TEST_F(PointwiseTest, NormOfTheDeltaOfARowIsTheSameInAnyBatch) {
  constexpr int kSize = 5376, kRows = 257;
  const auto residual = Normals<float>(int64_t{kRows} * kSize, 1);
  const auto delta = Normals<float>(int64_t{kRows} * kSize, 2);
  const DeviceBuffer<float> weight(Normals<float>(kSize, 3)),
      delta_weight(Normals<float>(kSize, 4));
  const auto run = [&](int first, int rows) {
    const auto part = [&](const std::vector<float>& all) {
      return std::vector<float>(all.begin() + int64_t{first} * kSize,
                                all.begin() + int64_t{first + rows} * kSize);
    };
    const DeviceBuffer<float> d_residual(part(residual)), d_delta(part(delta));
    const DeviceBuffer<Bf16> out(size_t{kSize} * rows);
    AddRmsNormParams params;
    params.rows = rows;
    params.size = kSize;
    params.residual = d_residual.get();
    params.delta = d_delta.get();
    params.delta_weight = delta_weight.get();
    params.weight = weight.get();
    params.eps = kEps;
    params.out = out.get();
    EXPECT_EQ(AddRmsNorm(params, nullptr), cudaSuccess);
    std::vector<float> result = d_residual.Read();
    for (const Bf16 value : out.Read()) result.push_back(__bfloat162float(value));
    return result;
  };
  const std::vector<float> all = run(0, kRows);
  for (const int row : {0, 200}) {
    const std::vector<float> alone = run(row, 1);
    for (int i = 0; i < kSize; ++i) {
      ASSERT_EQ(alone[i], all[int64_t{row} * kSize + i]);
      ASSERT_EQ(alone[kSize + i], all[int64_t{kRows + row} * kSize + i]);
    }
  }
}

TEST_F(PointwiseTest, NormOfARowIsTheSameInAnyBatch) {
  constexpr int kSize = 4096, kRows = 257;
  const auto residual = Normals<float>(int64_t{kRows} * kSize, 1);
  const auto weight = Normals<float>(kSize, 2);
  const DeviceBuffer<float> d_residual(residual), d_weight(weight);
  const DeviceBuffer<Bf16> d_all(residual.size()), d_some(size_t{2} * kSize);
  AddRmsNormParams params;
  params.rows = kRows;
  params.size = kSize;
  params.residual = d_residual.get();
  params.weight = d_weight.get();
  params.eps = kEps;
  params.out = d_all.get();
  DORAD_ASSERT_CUDA(AddRmsNorm(params, nullptr));
  const DeviceBuffer<int32_t> gather(std::vector<int32_t>{200, 3});
  params.rows = 2;
  params.gather = gather.get();
  params.out = d_some.get();
  DORAD_ASSERT_CUDA(AddRmsNorm(params, nullptr));
  const auto all = d_all.Read();
  const auto some = d_some.Read();
  for (int i = 0; i < kSize; ++i) {
    ASSERT_EQ(__bfloat162float(some[i]), __bfloat162float(all[200 * kSize + i]));
    ASSERT_EQ(__bfloat162float(some[kSize + i]), __bfloat162float(all[3 * kSize + i]));
  }
}

TEST_F(PointwiseTest, NormRefusesWhatItCannotHold) {
  const DeviceBuffer<float> data(20000);
  const DeviceBuffer<Bf16> out(20000);
  AddRmsNormParams params;
  params.rows = 1;
  params.residual = data.get();
  params.weight = data.get();
  params.out = out.get();
  for (const int size : {0, 4097, 16388}) {
    params.size = size;
    EXPECT_EQ(AddRmsNorm(params, nullptr), cudaErrorInvalidValue) << size;
  }
  params.size = 64;
  params.delta_weight = data.get();
  EXPECT_EQ(AddRmsNorm(params, nullptr), cudaErrorInvalidValue) << "there is no delta";
  params.delta_weight = nullptr;
  params.residual = data.get() + 1;
  EXPECT_EQ(AddRmsNorm(params, nullptr), cudaErrorInvalidValue);
}

// `expected`: of a gate. The fast arithmetic's error stays below bf16's, but near zero, where the
// exponential ends.
void ExpectGated(decltype(&SiluMul) multiply, double (*expected)(double)) {
  for (const int size : {1, 6, 1536, 12288}) {
    const int rows = 3;
    auto gate_up = Normals<Bf16>(int64_t{rows} * 2 * size, size);
    for (Bf16& x : gate_up) x = __float2bfloat16_rn(__bfloat162float(x) * 6.0f);
    for (const float x : {-300.0f, 300.0f, -88.0f, -1e30f, 0.0f}) {
      if (size > 5) gate_up[size - static_cast<int>(std::abs(x)) % 5 - 1] = __float2bfloat16_rn(x);
    }
    const DeviceBuffer<Bf16> d_gate_up(gate_up), d_out(size_t{3} * size);
    DORAD_ASSERT_CUDA(multiply(d_gate_up.get(), rows, size, d_out.get(), nullptr));
    const auto out = d_out.Read();
    for (int row = 0; row < rows; ++row) {
      for (int i = 0; i < size; ++i) {
        const double gate = __bfloat162float(gate_up[int64_t{row} * 2 * size + i]);
        const double up = __bfloat162float(gate_up[int64_t{row} * 2 * size + size + i]);
        const double product = expected(gate) * up;
        ASSERT_NEAR(__bfloat162float(out[int64_t{row} * size + i]), product,
                    std::abs(product) * 0.00392 + 1e-30)
            << gate << " " << up;
      }
    }
  }
}

TEST_F(PointwiseTest, SiluMulIsGated) {
  ExpectGated(SiluMul, [](double x) { return x / (1.0 + std::exp(-x)); });
}

TEST_F(PointwiseTest, GeluTanhMulIsGated) {
  ExpectGated(GeluTanhMul, [](double x) {
    const double u = std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x);
    return x / (1.0 + std::exp(-2.0 * u));
  });
}

// Rows of the base, of LoRA and of DoRA; sizes with and without vectors.
TEST_F(PointwiseTest, EmbedsAMixedBatch) {
  constexpr int kVocabulary = 50, kRank = 3, kLdb = 8, kRows = 300;
  for (const int size : {64, 20}) {
    const auto weight = Normals<Bf16>(int64_t{kVocabulary} * size, size);
    const auto a = Normals<Bf16>(kVocabulary * kRank, 1);
    const auto b = Normals<Bf16>(int64_t{size} * kLdb, 2);
    const auto g = Normals<float>(size, 3);
    const DeviceBuffer<Bf16> d_weight(weight), d_a(a), d_b(b);
    const DeviceBuffer<float> d_g(g), d_out(size_t{kRows} * size);
    const DeviceBuffer<DoraFactors> table(
        std::vector<DoraFactors>{{d_a.get(), d_b.get(), d_g.get(), 0.5f, kRank, kLdb, 0},
                                 {d_a.get(), d_b.get(), nullptr, 2.0f, kRank, kLdb, 0}});
    std::vector<RowSegment> blocks(2 * kSegmentBlockRows);
    blocks[0] = {-1, 0, 10};
    blocks[1] = {0, 10, 256};
    blocks[kSegmentBlockRows] = {1, 0, kRows - 256};
    const DeviceBuffer<RowSegment> d_blocks(blocks);
    const DeviceBuffer<int32_t> counts(std::vector<int32_t>{2, 1});
    std::vector<int32_t> tokens(kRows);
    for (int row = 0; row < kRows; ++row) tokens[row] = row * 7 % kVocabulary;
    const DeviceBuffer<int32_t> d_tokens(tokens);
    EmbedParams params;
    params.rows.rows = kRows;
    params.rows.token_ids = d_tokens.get();
    params.weight = d_weight.get();
    params.size = size;
    params.factor = size == 64 ? 1.0f : 73.5f;
    params.adapters = {table.get(), 1};
    params.segments = {d_blocks.get(), counts.get()};
    params.out = d_out.get();
    DORAD_ASSERT_CUDA(Embed(params, nullptr));
    const auto out = d_out.Read();
    for (int row = 0; row < kRows; ++row) {
      for (int i = 0; i < size; ++i) {
        double expected = __bfloat162float(weight[int64_t{tokens[row]} * size + i]);
        double lora = 0.0;
        for (int r = 0; r < kRank; ++r) {
          lora += double{__bfloat162float(a[tokens[row] * kRank + r])} *
                  double{__bfloat162float(b[int64_t{i} * kLdb + r])};
        }
        if (row >= 256) {
          expected += 2.0 * lora;
        } else if (row >= 10) {
          expected = g[i] * (expected + 0.5 * lora);
        }
        ASSERT_NEAR(out[int64_t{row} * size + i] / params.factor, expected, 1e-4)
            << row << " " << i;
      }
    }
  }
}

// Kernels that begin while the one before still runs must not see what it has not written, nor
// overwrite what it still reads.
TEST_F(PointwiseTest, AChainOfEarlyLaunchesIsAsOneAtATime) {
  constexpr int kSize = 4096, kLinks = 40;
  for (const int rows : {1, 700}) {
    const auto residual = Normals<float>(int64_t{rows} * kSize, 1);
    const auto weight = Normals<float>(kSize, 2);
    const DeviceBuffer<float> d_weight(weight), d_delta(Normals<float>(residual.size(), 3));
    const DeviceBuffer<Bf16> d_normed(residual.size()), d_out(residual.size());
    std::vector<Bf16> results[2];
    for (const bool at_once : {false, true}) {
      const DeviceBuffer<float> d_residual(residual);
      for (int link = 0; link < kLinks; ++link) {
        AddRmsNormParams params;
        params.rows = rows;
        params.size = kSize;
        params.residual = d_residual.get();
        params.delta = d_delta.get();
        params.weight = d_weight.get();
        params.eps = kEps;
        params.out = d_normed.get();
        DORAD_ASSERT_CUDA(AddRmsNorm(params, nullptr));
        if (!at_once) DORAD_ASSERT_CUDA(cudaDeviceSynchronize());
        DORAD_ASSERT_CUDA(SiluMul(d_normed.get(), rows, kSize / 2, d_out.get(), nullptr));
        if (!at_once) DORAD_ASSERT_CUDA(cudaDeviceSynchronize());
        // Overwrites what the launch before reads.
        DORAD_ASSERT_CUDA(SiluMul(d_out.get(), rows, kSize / 4, d_normed.get(), nullptr));
        if (!at_once) DORAD_ASSERT_CUDA(cudaDeviceSynchronize());
      }
      results[at_once] = d_normed.Read();
    }
    for (size_t i = 0; i < size_t(rows) * kSize / 4; ++i) {
      ASSERT_EQ(__bfloat162float(results[0][i]), __bfloat162float(results[1][i])) << rows;
    }
  }
}

TEST_F(PointwiseTest, GatesMultiplyTheirHeads) {
  constexpr int kRows = 3;
  for (const auto& [heads, kv_heads, dim] : {std::array{24, 4, 256}, {3, 1, 12}, {2, 2, 18}}) {
    const int64_t pitch = int64_t{2 * heads + 2 * kv_heads} * dim;
    const auto qkv = Normals<Bf16>(kRows * pitch, dim);
    const auto values = Normals<Bf16>(int64_t{kRows} * heads * dim, dim + 1);
    const DeviceBuffer<Bf16> d_qkv(qkv), d_values(values);
    DORAD_ASSERT_CUDA(GateHeads(d_qkv.get(), pitch, kRows, heads, dim, d_values.get(), nullptr));
    const auto out = d_values.Read();
    for (int64_t at = 0; at < static_cast<int64_t>(values.size()); ++at) {
      const int64_t row = at / (heads * dim), head = at / dim % heads;
      const double gate = __bfloat162float(qkv[row * pitch + (2 * head + 1) * dim + at % dim]);
      const double expected = double{__bfloat162float(values[at])} / (1.0 + std::exp(-gate));
      ASSERT_NEAR(__bfloat162float(out[at]), expected, std::abs(expected) * 0.004) << dim;
    }
  }
}

}  // namespace
}  // namespace dorad::kernels
