// The kernels of vision towers against fp64 on the host.
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/decoder/activation.h"
#include "kernels/decoder/attention.h"
#include "kernels/vision/attention.h"
#include "kernels/vision/layer_norm.h"
#include "kernels/vision/pointwise.h"
#include "tests/unit/kernels/device.h"

namespace dorad::kernels {
namespace {

using Bf16 = __nv_bfloat16;
using VisionTest = KernelTest;

std::vector<float> Normals(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(size);
  for (float& x : values) x = normal(random);
  return values;
}

std::vector<Bf16> Rounded(const std::vector<float>& values) {
  std::vector<Bf16> out;
  for (const float x : values) out.push_back(__float2bfloat16_rn(x));
  return out;
}

double ValueOf(Bf16 x) { return double{__bfloat162float(x)}; }

// Segments [begins[i], begins[i + 1]) in tiles of at most `most` rows.
std::vector<SegmentTile> Tiles(const std::vector<int32_t>& begins, int32_t most) {
  std::vector<SegmentTile> tiles;
  for (size_t i = 0; i + 1 < begins.size(); ++i) {
    for (int32_t row = begins[i]; row < begins[i + 1]; row += most) {
      tiles.push_back({row, std::min(most, begins[i + 1] - row), begins[i], begins[i + 1]});
    }
  }
  return tiles;
}

using SegmentAttentionTest = IsaTest;

DORAD_FOR_EACH_ISA(SegmentAttentionTest);

TEST_P(SegmentAttentionTest, SeesTheWholeSegmentAndNoOther) {
  const std::vector<int32_t> begins = {0, 1, 17, 81, 209, 500};
  const int rows = begins.back();
  for (const int dim : {8, 16, 40, 64, 72, 80, 96, 128}) {
    const int heads = 3, width = heads * dim;
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    std::vector<float> values = Normals(int64_t{rows} * 3 * width, dim);
    // Now and then scores that leave no room for others.
    for (size_t i = 0; i < values.size(); i += 4099) values[i] *= 40.0f;
    const std::vector<Bf16> qkv = Rounded(values);
    const DeviceBuffer<Bf16> d_qkv(qkv);
    std::vector<std::vector<Bf16>> results;
    for (const int32_t most : {kSegmentTileRows, 16, 5}) {
      const std::vector<SegmentTile> tiles = Tiles(begins, most);
      const DeviceBuffer<SegmentTile> d_tiles(tiles);
      const DeviceBuffer<Bf16> out(int64_t{rows} * width);
      SegmentAttentionParams params;
      params.qkv = d_qkv.get();
      params.rows = rows;
      params.heads = heads;
      params.head_dim = dim;
      params.tiles = d_tiles.get();
      params.num_tiles = static_cast<int32_t>(tiles.size());
      params.softmax_scale = scale;
      params.isa = GetParam();
      params.out = out.get();
      DORAD_ASSERT_CUDA(SegmentAttention(params, nullptr));
      results.push_back(out.Read());
      // The last segment alone, in memory of its own.
      const auto first = std::find_if(tiles.begin(), tiles.end(), [&](const SegmentTile& tile) {
        return tile.begin == begins[begins.size() - 2];
      });
      params.tiles += first - tiles.begin();
      params.num_tiles -= static_cast<int32_t>(first - tiles.begin());
      params.first_row = begins[begins.size() - 2];
      const DeviceBuffer<Bf16> last(int64_t{rows - params.first_row} * width);
      params.out = last.get();
      DORAD_ASSERT_CUDA(SegmentAttention(params, nullptr));
      const auto alone = last.Read();
      for (size_t i = 0; i < alone.size(); ++i) {
        ASSERT_EQ(ValueOf(alone[i]), ValueOf(results.back()[params.first_row * width + i]));
      }
    }
    for (const auto& result : results) {
      for (size_t i = 0; i < result.size(); ++i) {
        ASSERT_EQ(ValueOf(result[i]), ValueOf(results[0][i])) << dim;
      }
    }
    const auto at = [&](int row, int part, int head, int d) {
      return ValueOf(qkv[(int64_t{row} * 3 + part) * width + head * dim + d]);
    };
    for (size_t s = 0; s + 1 < begins.size(); ++s) {
      for (int row = begins[s]; row < begins[s + 1]; row += 3) {
        for (int head = 0; head < heads; ++head) {
          std::vector<double> weights;
          double most = -INFINITY, sum = 0.0;
          for (int key = begins[s]; key < begins[s + 1]; ++key) {
            double score = 0.0;
            for (int d = 0; d < dim; ++d) score += at(row, 0, head, d) * at(key, 1, head, d);
            weights.push_back(score * scale);
            most = std::max(most, weights.back());
          }
          for (double& weight : weights) sum += weight = std::exp(weight - most);
          for (int d = 0; d < dim; ++d) {
            double expected = 0.0, magnitude = 0.0;
            for (int key = begins[s]; key < begins[s + 1]; ++key) {
              const double term = weights[key - begins[s]] / sum * at(key, 2, head, d);
              expected += term;
              magnitude += std::abs(term);
            }
            ASSERT_NEAR(ValueOf(results[0][int64_t{row} * width + head * dim + d]), expected,
                        0.006 * magnitude + 1e-6)
                << dim << " row " << row;
          }
        }
      }
    }
  }
}

TEST_F(VisionTest, SegmentAttentionRefusesWhatItCannotHold) {
  const DeviceBuffer<Bf16> memory(4096);
  const DeviceBuffer<SegmentTile> tile({SegmentTile{0, 1, 0, 1}});
  SegmentAttentionParams params;
  params.qkv = params.out = memory.get();
  params.tiles = tile.get();
  params.num_tiles = params.heads = params.rows = 1;
  params.softmax_scale = 1.0f;
  for (const int dim : {0, 4, 12, 136}) {
    params.head_dim = dim;
    EXPECT_EQ(SegmentAttention(params, nullptr), cudaErrorInvalidValue) << dim;
  }
}

TEST_F(VisionTest, LayerNormAddsAndScales) {
  constexpr int kRows = 3;
  constexpr float kEps = 1e-6f;
  for (const int size : {1, 7, 32, 1152, 4608, 8192}) {
    for (const bool has_delta : {true, false}) {
      const auto residual = Normals(int64_t{kRows} * size, size);
      const auto delta = Normals(int64_t{kRows} * size, size + 1);
      const auto weight = Normals(size, size + 2), bias = Normals(size, size + 3);
      const DeviceBuffer<float> d_residual(residual), d_delta(delta), d_weight(weight),
          d_bias(bias);
      const DeviceBuffer<Bf16> d_out(residual.size());
      DORAD_ASSERT_CUDA(
          AddLayerNorm({kRows, size, d_residual.get(), has_delta ? d_delta.get() : nullptr,
                        d_weight.get(), d_bias.get(), kEps, d_out.get()},
                       nullptr));
      const auto sums = d_residual.Read();
      const auto out = d_out.Read();
      for (int row = 0; row < kRows; ++row) {
        double sum = 0.0, squares = 0.0;
        const float* const x = sums.data() + int64_t{row} * size;
        for (int i = 0; i < size; ++i) {
          const int64_t at = int64_t{row} * size + i;
          ASSERT_EQ(x[i], has_delta ? residual[at] + delta[at] : residual[at]);
          sum += double{x[i]};
        }
        for (int i = 0; i < size; ++i) squares += std::pow(x[i] - sum / size, 2);
        const double scale = 1.0 / std::sqrt(squares / size + kEps);
        for (int i = 0; i < size; ++i) {
          const double expected = (x[i] - sum / size) * scale * weight[i] + bias[i];
          // fp32's rounding of the mean where the variance vanishes.
          const double allowed = std::abs(expected) * 0.004 + (size == 1 ? 1e-3 : 1e-5);
          ASSERT_NEAR(ValueOf(out[int64_t{row} * size + i]), expected, allowed) << size;
        }
      }
    }
  }
  EXPECT_EQ(AddLayerNorm({1, 8200}, nullptr), cudaErrorInvalidValue);
}

TEST_F(VisionTest, GeluIsTorchs) {
  for (const int64_t count : {1, 7, 800, 4101}) {
    std::vector<float> values = Normals(count, 5);
    for (float& x : values) x *= 4.0f;
    const std::vector<Bf16> x = Rounded(values);
    const DeviceBuffer<Bf16> exact(x), tanh(x);
    DORAD_ASSERT_CUDA(Gelu(exact.get(), count, nullptr));
    DORAD_ASSERT_CUDA(GeluTanh(tanh.get(), count, nullptr));
    const auto got_exact = exact.Read(), got_tanh = tanh.Read();
    for (int64_t i = 0; i < count; ++i) {
      const double v = ValueOf(x[i]);
      const double by_erf = 0.5 * v * (1.0 + std::erf(v / std::sqrt(2.0)));
      const double by_tanh =
          0.5 * v * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (v + 0.044715 * v * v * v)));
      ASSERT_NEAR(ValueOf(got_exact[i]), by_erf, std::abs(by_erf) * 0.004 + 2e-6) << v;
      ASSERT_NEAR(ValueOf(got_tanh[i]), by_tanh, std::abs(by_tanh) * 0.004 + 2e-6) << v;
    }
  }
}

TEST_F(VisionTest, PatchesTakeTheirPlacesAndTurn) {
  constexpr int kRows = 9, kHeads = 2, kDim = 20, kHalf = kDim / 2, kWidth = kHeads * kDim;
  constexpr int kPlaces = 7, kTable = 30;
  std::mt19937 random(3);
  std::vector<PatchTaps> taps(kRows);
  for (PatchTaps& tap : taps) {
    for (int t = 0; t < 4; ++t) {
      tap.rows[t] = static_cast<int32_t>(random() % kTable);
      tap.weights[t] = static_cast<float>(random() % 100) / 100.0f;
    }
    tap.row = static_cast<int32_t>(random() % kPlaces);
    tap.column = static_cast<int32_t>(random() % kPlaces);
  }
  const auto residual = Normals(kRows * kWidth, 1), table = Normals(kTable * kWidth, 2);
  const auto cos = Normals(kPlaces * kHalf, 3), sin = Normals(kPlaces * kHalf, 4);
  const auto qkv = Rounded(Normals(kRows * 3 * kWidth, 5));
  const DeviceBuffer<PatchTaps> d_taps(taps);
  const DeviceBuffer<float> d_residual(residual), d_table(table), d_cos(cos), d_sin(sin);
  const DeviceBuffer<Bf16> d_qkv(qkv);
  DORAD_ASSERT_CUDA(
      AddTableRows(d_residual.get(), d_taps.get(), d_table.get(), kRows, kWidth, nullptr));
  DORAD_ASSERT_CUDA(RotatePatches(
      {d_qkv.get(), d_taps.get(), kRows, kHeads, kDim, d_cos.get(), d_sin.get()}, nullptr));
  const auto sums = d_residual.Read();
  const auto turned = d_qkv.Read();
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kWidth; ++i) {
      double expected = residual[row * kWidth + i];
      for (int t = 0; t < 4; ++t) {
        expected += double{table[taps[row].rows[t] * kWidth + i]} * taps[row].weights[t];
      }
      ASSERT_NEAR(sums[row * kWidth + i], expected, 1e-5);
    }
    for (int i = 0; i < 3 * kWidth; ++i) {
      const int64_t at = int64_t{row} * 3 * kWidth + i;
      double expected = ValueOf(qkv[at]);
      if (i < 2 * kWidth) {
        const int pair = i % kHalf;
        const int place = pair < kHalf / 2 ? taps[row].row : taps[row].column;
        const double c = cos[place * kHalf + pair], s = sin[place * kHalf + pair];
        const bool is_low = i % kDim < kHalf;
        const double other = ValueOf(qkv[is_low ? at + kHalf : at - kHalf]);
        expected = is_low ? expected * c - other * s : expected * c + other * s;
      }
      ASSERT_NEAR(ValueOf(turned[at]), expected, std::abs(expected) * 0.004 + 1e-5);
    }
  }
}

TEST_F(VisionTest, ElementsGoChannelByChannel) {
  constexpr int kTokens = 5, kPatches = 4, kChannels = 70;
  const auto from = Rounded(Normals(kTokens * kPatches * kChannels, 1));
  const DeviceBuffer<Bf16> d_from(from), d_to(from.size());
  DORAD_ASSERT_CUDA(ByChannel(d_from.get(), kTokens, kPatches, kChannels, d_to.get(), nullptr));
  const auto to = d_to.Read();
  for (int t = 0; t < kTokens; ++t) {
    for (int p = 0; p < kPatches; ++p) {
      for (int c = 0; c < kChannels; ++c) {
        ASSERT_EQ(ValueOf(to[(t * kChannels + c) * kPatches + p]),
                  ValueOf(from[(t * kPatches + p) * kChannels + c]));
      }
    }
  }
}

TEST_F(VisionTest, PatchesOfATokenArePooled) {
  constexpr int kTokens = 5, kChannels = 70;
  for (const int patches : {1, 4, 16}) {
    const auto from = Rounded(Normals(kTokens * patches * kChannels, 1));
    const DeviceBuffer<Bf16> d_from(from);
    const DeviceBuffer<float> d_to(kTokens * kChannels);
    DORAD_ASSERT_CUDA(PoolPatches(d_from.get(), kTokens, patches, kChannels, d_to.get(), nullptr));
    const auto to = d_to.Read();
    for (int i = 0; i < kTokens * kChannels; ++i) {
      double sum = 0.0;
      for (int p = 0; p < patches; ++p) {
        sum += ValueOf(from[(i / kChannels * patches + p) * kChannels + i % kChannels]);
      }
      ASSERT_NEAR(to[i], sum / patches, 1e-6);
    }
  }
}

TEST_F(VisionTest, RowsGoToTheirPlaces) {
  constexpr int kRows = 6, kWidth = 300;
  const std::vector<int32_t> places = {3, 0, 5, 1, 4, 2};
  const auto from = Normals(kRows * kWidth, 1);
  const DeviceBuffer<float> d_from(from), d_to(from.size());
  const DeviceBuffer<int32_t> d_places(places);
  DORAD_ASSERT_CUDA(ScatterRows(d_from.get(), d_places.get(), kRows, kWidth, d_to.get(), nullptr));
  const auto to = d_to.Read();
  for (int i = 0; i < kRows * kWidth; ++i) {
    ASSERT_EQ(to[places[i / kWidth] * kWidth + i % kWidth], from[i]);
  }
}

TEST_F(VisionTest, AGateTakesTheExactGelu) {
  constexpr int kRows = 3, kSize = 20;
  const auto x = Rounded(Normals(kRows * 2 * kSize, 4));
  const DeviceBuffer<Bf16> d_x(x), d_out(kRows * kSize);
  DORAD_ASSERT_CUDA(GeluMul(d_x.get(), kRows, kSize, d_out.get(), nullptr));
  const auto out = d_out.Read();
  for (int i = 0; i < kRows * kSize; ++i) {
    const int64_t at = i / kSize * 2 * kSize + i % kSize;
    const double gate = ValueOf(x[at]);
    const double expected =
        0.5 * gate * (1.0 + std::erf(gate / std::sqrt(2.0))) * ValueOf(x[at + kSize]);
    ASSERT_NEAR(ValueOf(out[i]), expected, std::abs(expected) * 0.004 + 2e-6);
  }
}

TEST_F(VisionTest, AddInPlaceAddsAll) {
  const auto a = Normals(1000, 1), b = Normals(1000, 2);
  const DeviceBuffer<float> to(a), from(b);
  DORAD_ASSERT_CUDA(AddInPlace(to.get(), from.get(), 999, nullptr));
  const auto sums = to.Read();
  for (int i = 0; i < 999; ++i) ASSERT_EQ(sums[i], a[i] + b[i]);
  EXPECT_EQ(sums[999], a[999]);
}

// A row of the decoder turns by three positions as by one whose angles are the mixture.
TEST_F(VisionTest, AxesChooseThePositionOfEachPair) {
  for (const AttentionShape shape : {AttentionShape{32, 8, 128}, {4, 1, 256}, {2, 1, 18}}) {
    for (const int rows : {3, 100}) {
      const auto [heads, kv_heads, dim] = shape;
      const int all = heads + 2 * kv_heads, half = dim / 2;
      std::mt19937 random(rows);
      std::vector<int32_t> positions, sequences(rows, 0), rotary, pages;
      std::vector<uint8_t> axes;
      for (int i = 0; i < half; ++i) axes.push_back(static_cast<uint8_t>(i % 3));
      const auto cos = Normals(int64_t{100} * half, 1), sin = Normals(int64_t{100} * half, 2);
      std::vector<float> mixed_cos, mixed_sin;
      for (int r = 0; r < rows; ++r) {
        positions.push_back(r);
        for (int axis = 0; axis < 3; ++axis) rotary.push_back(static_cast<int32_t>(random() % 100));
        if (r % kKvPageTokens == 0) pages.push_back(r / kKvPageTokens);
        for (int i = 0; i < half; ++i) {
          const int64_t at = int64_t{rotary[3 * r + axes[i]]} * half + i;
          mixed_cos.push_back(cos[at]);
          mixed_sin.push_back(sin[at]);
        }
      }
      const DeviceBuffer<Bf16> qkv(Rounded(Normals(int64_t{rows} * all * dim, 3)));
      const DeviceBuffer<int32_t> d_positions(positions), d_sequences(sequences),
          d_begin(std::vector<int32_t>{0}), d_pages(pages), d_rotary(rotary);
      const DeviceBuffer<uint8_t> d_axes(axes);
      const DeviceBuffer<float> d_cos(cos), d_sin(sin), d_mixed_cos(mixed_cos),
          d_mixed_sin(mixed_sin);
      const int64_t plane = static_cast<int64_t>(pages.size()) * kv_heads * kKvPageTokens * dim;
      std::vector<std::vector<Bf16>> results;
      for (const bool by_axes : {true, false}) {
        const DeviceBuffer<Bf16> q(int64_t{rows} * heads * dim), k(plane), v(plane);
        RopeAppendParams params;
        params.rows = {rows,
                       nullptr,
                       d_positions.get(),
                       d_sequences.get(),
                       d_begin.get(),
                       d_pages.get(),
                       by_axes ? d_rotary.get() : nullptr};
        params.shape = shape;
        params.qkv = qkv.get();
        params.cos = by_axes ? d_cos.get() : d_mixed_cos.get();
        params.sin = by_axes ? d_sin.get() : d_mixed_sin.get();
        params.axes = by_axes ? d_axes.get() : nullptr;
        params.q = q.get();
        params.cache = {k.get(), v.get()};
        DORAD_ASSERT_CUDA(RopeAppend(params, nullptr));
        results.push_back(q.Read());
        const auto keys = k.Read();
        results.back().insert(results.back().end(), keys.begin(), keys.end());
      }
      for (size_t i = 0; i < results[0].size(); ++i) {
        const double a = ValueOf(results[0][i]), b = ValueOf(results[1][i]);
        ASSERT_TRUE(a == b || (std::isnan(a) && std::isnan(b))) << dim << " at " << i;
      }
    }
  }
}

}  // namespace
}  // namespace dorad::kernels
