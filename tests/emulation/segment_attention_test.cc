// Attention of vision towers by mma.sync in the emulator, against a double reference; rows have the
// same bits in tiles of all sizes.
#include <cmath>

#include "gtest/gtest.h"
#include "kernels/vision/attention_mma.cuh"
#include "tests/emulation/emulator.h"

namespace dorad::kernels {
namespace {

using emulation::Emulator;
using emulation::Grid;
using Bf16 = __nv_bfloat16;

const std::vector<int32_t> kBegins = {0, 1, 17, 81, 209, 420};  // of segments

template <int kDim>
std::vector<Bf16> Run(const std::vector<Bf16>& qkv, int head_dim, int32_t most) {
  using C = segment_attention::Config<MmaHeads, kDim>;
  std::vector<SegmentTile> tiles;
  for (size_t i = 0; i + 1 < kBegins.size(); ++i) {
    for (int32_t row = kBegins[i]; row < kBegins[i + 1]; row += most) {
      tiles.push_back({row, std::min(most, kBegins[i + 1] - row), kBegins[i], kBegins[i + 1]});
    }
  }
  std::vector<Bf16> out(qkv.size() / 3, __float2bfloat16(NAN));
  segment_attention::Args<MmaHeads> args = {};
  args.map = {qkv.data(), kBegins.back()};
  args.tiles = tiles.data();
  args.out = out.data();
  args.heads = 1;
  args.head_dim = head_dim;
  args.scale = 1.4426950408889634f / std::sqrt(static_cast<float>(head_dim));
  Grid grid(
      static_cast<int>(tiles.size()), C::threads, 1, C::shared_bytes, [] { return true; },
      [&] { segment_attention::RunSegmentBlock<C>(args, 0); });
  Emulator::Get().Run({&grid});
  return out;
}

template <int kDim>
void ExpectSegments(int head_dim) {
  SCOPED_TRACE(testing::Message() << "head_dim " << head_dim);
  Emulator emulator(7);
  std::normal_distribution<float> normal;
  std::vector<Bf16> qkv(size_t{3} * kBegins.back() * head_dim);
  for (Bf16& x : qkv) x = __float2bfloat16(normal(emulator.random()));
  std::vector<Bf16> out;
  ASSERT_NO_THROW(out = Run<kDim>(qkv, head_dim, kSegmentTileRows));
  std::vector<Bf16> small;
  ASSERT_NO_THROW(small = Run<kDim>(qkv, head_dim, 30));
  EXPECT_EQ(std::memcmp(out.data(), small.data(), out.size() * sizeof(Bf16)), 0);
  const auto at = [&](int row, int part, int d) {
    return double{__bfloat162float(qkv[(size_t{3} * row + part) * head_dim + d])};
  };
  for (size_t s = 0; s + 1 < kBegins.size(); ++s) {
    for (int row = kBegins[s]; row < kBegins[s + 1]; ++row) {
      std::vector<double> sum(head_dim, 0.0);
      double total = 0.0;
      for (int key = kBegins[s]; key < kBegins[s + 1]; ++key) {
        double score = 0.0;
        for (int d = 0; d < head_dim; ++d) score += at(row, 0, d) * at(key, 1, d);
        const double weight = std::exp(score / std::sqrt(head_dim));
        total += weight;
        for (int d = 0; d < head_dim; ++d) sum[d] += weight * at(key, 2, d);
      }
      double difference = 0.0, size = 0.0;
      for (int d = 0; d < head_dim; ++d) {
        const double got = __bfloat162float(out[size_t{1} * row * head_dim + d]);
        difference += std::pow(got - sum[d] / total, 2);
        size += std::pow(sum[d] / total, 2);
      }
      ASSERT_LT(std::sqrt(difference / size), 5e-3) << "row " << row;
    }
  }
}

TEST(EmulatedSegmentAttention, SeesTheWholeSegmentAndNoOther) {
  ExpectSegments<64>(40);
  ExpectSegments<64>(64);
  ExpectSegments<72>(72);
  ExpectSegments<80>(80);
  ExpectSegments<128>(96);
  ExpectSegments<128>(128);
}

}  // namespace
}  // namespace dorad::kernels
