// The delta rule's step in the emulator, with both instruction sets: the same bits, and those of
// the rule in double up to rounding.
#include <cmath>
#include <numeric>

#include "gtest/gtest.h"
#include "kernels/decoder/delta_state.cuh"
#include "kernels/isa/mma/isa.cuh"
#include "kernels/isa/sm90/isa.cuh"
#include "tests/emulation/emulator.h"

namespace dorad::kernels {
namespace {

using emulation::Emulator;

constexpr int kSequences = 24, kWithoutRow = 5, kWithoutState = 9, kFromZeros = 3;
constexpr int kTile = 32, kPlanes = 3;
constexpr DeltaShape kShape = {1, 2, 128, 64, 4};
constexpr int kStateBlocks = 4;  // 2 heads of 2 tiles
constexpr int kPages = 2;        // of a state

struct Result {
  std::vector<float> mixed, states;
};

// One step of a row each; memory of states is [plane][page][key][column].
template <typename Isa>
Result Step(const Result& before, const std::vector<float>& factors) {
  Result result = before;
  std::vector<int32_t> pages(kSequences * kPages), row_begin = {0}, to, from;
  std::iota(pages.begin(), pages.end(), 0);
  std::reverse(pages.begin(), pages.end());
  for (int i = 0; i < kSequences; ++i) {
    row_begin.push_back(row_begin.back() + (i == kWithoutRow ? 0 : 1));
    to.push_back(i == kWithoutState ? -1 : i * kPages);
    from.push_back(i == kFromZeros ? -1 : i * kPages);
  }
  DeltaParams params;
  params.rows.rows = row_begin.back();
  params.rows.pages = pages.data();
  params.rows.states = {kSequences, row_begin.data(), to.data(), from.data()};
  params.single_rows = true;
  params.shape = kShape;
  const int block_bytes = 4 * 128 * kTile;
  params.states = {reinterpret_cast<std::byte*>(result.states.data()),
                   int64_t{block_bytes} * kSequences * kPages,
                   block_bytes,
                   kPages,
                   0,
                   kTile,
                   kStateBlocks};
  std::vector<float> of_rows = factors;
  params.factors = of_rows.data();
  params.mixed = result.mixed.data();
  Emulator::Get().device.processors = 2;
  EXPECT_EQ(delta::LaunchDeltaStep<Isa>(params, nullptr), cudaSuccess);
  Emulator::Get().Run();
  return result;
}

TEST(EmulatedDeltaStep, MovesEveryStateOn) {
  Emulator emulator(11);
  std::normal_distribution<float> normal(0.0f, 0.1f);
  std::uniform_real_distribution<float> uniform(0.1f, 0.9f);
  Result before;
  before.mixed.resize(kSequences * kShape.qkv_size());
  before.states.resize(size_t{kPlanes} * kSequences * kPages * 128 * kTile);
  for (std::vector<float>* values : {&before.mixed, &before.states}) {
    for (float& x : *values) x = normal(emulator.random());
  }
  std::vector<float> factors(kSequences * 2 * kShape.value_heads);
  for (float& x : factors) x = uniform(emulator.random());
  Result mma, sm90;
  ASSERT_NO_THROW(mma = Step<MmaIsa<4>>(before, factors));
  ASSERT_NO_THROW(sm90 = Step<Sm90Isa>(before, factors));
  EXPECT_EQ(mma.mixed, sm90.mixed);
  EXPECT_EQ(mma.states, sm90.states);

  Result expected = before;
  for (int i = 0, row = 0; i < kSequences; ++i) {
    if (i == kWithoutRow) continue;
    const int this_row = row++;
    if (i == kWithoutState) continue;
    float* const q = expected.mixed.data() + this_row * kShape.qkv_size();
    for (int head = 0; head < kShape.value_heads; ++head) {
      const double update = factors[this_row * 2 * kShape.value_heads + head];
      const double decay = factors[(this_row * 2 + 1) * kShape.value_heads + head];
      for (int column = 0; column < kShape.value_dim; ++column) {
        const int block = head * 2 + column / kTile;
        const int page = kSequences * kPages - 1 - (i * kPages + block % kPages);
        float* const state =
            expected.states.data() +
            (size_t{1} * (block / kPages) * kSequences * kPages + page) * 128 * kTile +
            column % kTile;
        double seen = 0.0, out = 0.0;
        const auto at = [&](int key) { return i == kFromZeros ? 0.0 : double{state[key * kTile]}; };
        for (int key = 0; key < 128; ++key) seen += at(key) * double{q[128 + key]};
        float& v = q[2 * 128 + head * kShape.value_dim + column];
        const double change = (double{v} - decay * seen) * update;
        for (int key = 0; key < 128; ++key) {
          const double now = at(key) * decay + change * double{q[128 + key]};
          out += now * double{q[key]};
          state[key * kTile] = static_cast<float>(now);
        }
        v = static_cast<float>(out);
      }
    }
  }
  for (size_t i = 0; i < expected.mixed.size(); ++i) {
    ASSERT_NEAR(mma.mixed[i], expected.mixed[i], 1e-5) << i;
  }
  for (size_t i = 0; i < expected.states.size(); ++i) {
    ASSERT_NEAR(mma.states[i], expected.states[i], 1e-5) << i;
  }
}

}  // namespace
}  // namespace dorad::kernels
