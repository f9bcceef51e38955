// Attention of vision towers in the emulator, launched as the server does it, with both instruction
// sets, against a double reference; rows have the same bits in tiles of all sizes.
#include <cmath>

#include "gtest/gtest.h"
#include "kernels/vision/attention.h"
#include "tests/emulation/emulator.h"

namespace dorad::kernels {
namespace {

using emulation::Emulator;
using Bf16 = __nv_bfloat16;

const std::vector<int32_t> kBegins = {0, 1, 17, 81, 209, 420};  // of segments

std::vector<Bf16> Attend(const std::vector<Bf16>& qkv, int heads, int head_dim, KernelIsa isa,
                         int32_t most) {
  std::vector<SegmentTile> tiles;
  for (size_t i = 0; i + 1 < kBegins.size(); ++i) {
    for (int32_t row = kBegins[i]; row < kBegins[i + 1]; row += most) {
      tiles.push_back({row, std::min(most, kBegins[i + 1] - row), kBegins[i], kBegins[i + 1]});
    }
  }
  std::vector<Bf16> out(qkv.size() / 3, __float2bfloat16(NAN));
  SegmentAttentionParams params;
  params.qkv = qkv.data();
  params.rows = kBegins.back();
  params.heads = heads;
  params.head_dim = head_dim;
  params.tiles = tiles.data();
  params.num_tiles = static_cast<int32_t>(tiles.size());
  params.softmax_scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  params.isa = isa;
  params.out = out.data();
  EXPECT_EQ(SegmentAttention(params, nullptr), cudaSuccess);
  Emulator::Get().Run();
  return out;
}

class EmulatedSegmentAttention : public testing::TestWithParam<std::tuple<int, KernelIsa>> {};

TEST_P(EmulatedSegmentAttention, SeesTheWholeSegmentAndNoOther) {
  const auto [head_dim, isa] = GetParam();
  constexpr int kHeads = 2;
  Emulator emulator(7);
  std::normal_distribution<float> normal;
  std::vector<Bf16> qkv(size_t{3} * kBegins.back() * kHeads * head_dim);
  for (Bf16& x : qkv) x = __float2bfloat16(normal(emulator.random()));
  std::vector<Bf16> out;
  ASSERT_NO_THROW(out = Attend(qkv, kHeads, head_dim, isa, kSegmentTileRows));
  std::vector<Bf16> small;
  ASSERT_NO_THROW(small = Attend(qkv, kHeads, head_dim, isa, 30));
  EXPECT_EQ(std::memcmp(out.data(), small.data(), out.size() * sizeof(Bf16)), 0);
  const auto at = [&, dim = head_dim](int row, int part, int head, int d) {
    return double{__bfloat162float(qkv[((size_t{3} * row + part) * kHeads + head) * dim + d])};
  };
  for (size_t s = 0; s + 1 < kBegins.size(); ++s) {
    for (int row = kBegins[s]; row < kBegins[s + 1]; ++row) {
      const int head = row % kHeads;
      std::vector<double> sum(head_dim, 0.0);
      double total = 0.0;
      for (int key = kBegins[s]; key < kBegins[s + 1]; ++key) {
        double score = 0.0;
        for (int d = 0; d < head_dim; ++d) score += at(row, 0, head, d) * at(key, 1, head, d);
        const double weight = std::exp(score / std::sqrt(head_dim));
        total += weight;
        for (int d = 0; d < head_dim; ++d) sum[d] += weight * at(key, 2, head, d);
      }
      double difference = 0.0, size = 0.0;
      for (int d = 0; d < head_dim; ++d) {
        const double got = __bfloat162float(out[(size_t{1} * row * kHeads + head) * head_dim + d]);
        difference += std::pow(got - sum[d] / total, 2);
        size += std::pow(sum[d] / total, 2);
      }
      ASSERT_LT(std::sqrt(difference / size), 5e-3) << "row " << row;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, EmulatedSegmentAttention,
                         testing::Combine(testing::Values(40, 64, 72, 80, 96, 128),
                                          testing::Values(KernelIsa::kSm90, KernelIsa::kMma)),
                         [](const auto& info) {
                           return "Dim" + std::to_string(std::get<int>(info.param)) +
                                  (std::get<KernelIsa>(info.param) == KernelIsa::kSm90 ? "Sm90"
                                                                                       : "Mma");
                         });

}  // namespace
}  // namespace dorad::kernels
