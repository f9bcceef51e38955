// Gated delta-nets against a reference in double precision, and the same bits for any chunks.

#include "server/backends/cpu/ops/delta.h"

#include <ATen/ATen.h>

#include <cmath>

#include "tests/unit/support/test.h"

namespace dorad::ops {
namespace {

constexpr model::DeltaSizes kSizes{
    .key_heads = 2, .value_heads = 4, .key_dim = 8, .value_dim = 12, .convolution = 4};
constexpr int64_t kTile = 6;
constexpr int64_t kStateBlocks = 4 * 12 / kTile;
constexpr int64_t kBlock = 100;  // elements; of a state's block 48 are used

DeltaShape Shape() { return {kSizes, kTile, kStateBlocks, kBlock}; }

// The blocks of one sequence's state.
struct State {
  std::vector<std::vector<float>> blocks{static_cast<size_t>(kStateBlocks + 3),
                                         std::vector<float>(kBlock, NAN)};
  std::vector<float*> pointers() {
    std::vector<float*> all;
    for (auto& block : blocks) all.push_back(block.data());
    return all;
  }
};

struct DeltaTest : ::testing::Test {
  DeltaTest() {
    at::manual_seed(1);
    const int64_t heads = kSizes.value_heads;
    qkv = at::randn({kRows, kSizes.qkv_size()});
    b = at::randn({kRows, heads});
    a = at::randn({kRows, heads}) * 30;  // beyond softplus' threshold, too
    weight = at::randn({kSizes.qkv_size(), 1, kSizes.convolution});
    decay_log = at::randn({heads}) - 3;
    time_bias = at::randn({heads});
  }

  // The rows [begin, end), from the state (nullptr: zeros) to another or the same.
  at::Tensor Run(int64_t begin, int64_t end, State* from, State* to) {
    const int64_t count = end - begin;
    DeltaRows rows{0, count, {}, to->pointers()};
    if (from != nullptr) {
      const std::vector<float*> pointers = from->pointers();
      rows.from.assign(pointers.begin(), pointers.end());
    }
    const at::Tensor mixed =
        DeltaConvolution(qkv.narrow(0, begin, count).contiguous(), weight, {rows}, Shape());
    return GatedDeltaRule(mixed, b.narrow(0, begin, count).contiguous(),
                          a.narrow(0, begin, count).contiguous(), decay_log, time_bias, {rows},
                          Shape());
  }

  at::Tensor Reference() const {
    const int64_t taps = kSizes.convolution;
    const at::Tensor padded =
        at::cat({at::zeros({taps - 1, kSizes.qkv_size()}, at::kDouble), qkv.to(at::kDouble)}, 0);
    at::Tensor mixed = at::zeros_like(qkv, at::kDouble);
    for (int64_t j = 0; j < taps; ++j) {
      mixed += padded.narrow(0, j, kRows) * weight.select(2, j).select(1, 0).to(at::kDouble);
    }
    mixed = mixed * at::sigmoid(mixed);
    const auto unit = [](const at::Tensor& x) {
      return x / at::sqrt((x * x).sum(-1, /*keepdim=*/true) + 1e-6);
    };
    const int64_t keys = kSizes.key_size();
    const auto heads_of = [&](int64_t first) {
      return unit(mixed.narrow(1, first, keys).reshape({kRows, kSizes.key_heads, kSizes.key_dim}))
          .repeat_interleave(kSizes.value_heads / kSizes.key_heads, 1);
    };
    const at::Tensor q = heads_of(0) / std::sqrt(static_cast<double>(kSizes.key_dim));
    const at::Tensor k = heads_of(keys);
    const at::Tensor v = mixed.narrow(1, 2 * keys, kSizes.value_size())
                             .reshape({kRows, kSizes.value_heads, kSizes.value_dim});
    const at::Tensor decay = at::exp(-at::exp(decay_log.to(at::kDouble)) *
                                     at::softplus(a.to(at::kDouble) + time_bias.to(at::kDouble)));
    const at::Tensor beta = at::sigmoid(b.to(at::kDouble));
    at::Tensor state =
        at::zeros({kSizes.value_heads, kSizes.key_dim, kSizes.value_dim}, at::kDouble);
    std::vector<at::Tensor> out;
    for (int64_t t = 0; t < kRows; ++t) {
      const at::Tensor key = k[t].unsqueeze(-1);
      state = state * decay[t].reshape({-1, 1, 1});
      const at::Tensor difference = (v[t] - (state * key).sum(1)) * beta[t].unsqueeze(-1);
      state = state + key * difference.unsqueeze(1);
      out.push_back((state * q[t].unsqueeze(-1)).sum(1));
    }
    return at::stack(out);
  }

  static constexpr int64_t kRows = 23;
  at::Tensor qkv, b, a, weight, decay_log, time_bias;
};

TEST_F(DeltaTest, EqualsTheReferenceInDoublePrecision) {
  State state;
  const at::Tensor out = Run(0, kRows, nullptr, &state);
  const at::Tensor expected = Reference();
  EXPECT_LT((out.to(at::kDouble) - expected).abs().max().item<double>(), 1e-6);
  EXPECT_GT(expected.abs().max().item<double>(), 0.1);
}

TEST_F(DeltaTest, ChunksAndPlacesOfTheStateChangeNoBit) {
  State whole_state;
  const at::Tensor whole = Run(0, kRows, nullptr, &whole_state);
  // Chunks shorter than the convolution, and in place or elsewhere.
  State first, second;
  std::vector<at::Tensor> parts = {Run(0, 1, nullptr, &first), Run(1, 3, &first, &second),
                                   Run(3, 9, &second, &second), Run(9, 10, &second, &first),
                                   Run(10, kRows, &first, &second)};
  EXPECT_TRUE(at::equal(at::cat(parts, 0), whole));
  for (int64_t i = 0; i < kStateBlocks; ++i) {
    EXPECT_TRUE(std::equal(second.blocks[i].begin(), second.blocks[i].begin() + 8 * kTile,
                           whole_state.blocks[i].begin()));
  }
}

TEST_F(DeltaTest, ReadingAStateLeavesIt) {
  State first, second;
  Run(0, 5, nullptr, &first);
  const State before = first;
  const at::Tensor one = Run(5, 9, &first, &second);
  for (size_t i = 0; i < static_cast<size_t>(kStateBlocks); ++i) {
    EXPECT_TRUE(std::equal(before.blocks[i].begin(), before.blocks[i].begin() + 8 * kTile,
                           first.blocks[i].begin()));
  }
  EXPECT_TRUE(at::equal(Run(5, 9, &first, &second), one));
}

}  // namespace
}  // namespace dorad::ops
