// Gated delta-nets against fp64 on the host; and in chunks and batches, to the last bit.
#include "kernels/decoder/delta.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "tests/unit/kernels/device.h"

namespace dorad::kernels {
namespace {

using Bf16 = __nv_bfloat16;

constexpr float kEps = 1e-6f;

struct Case {
  const char* name;
  DeltaShape shape;
  int tile = 0;
  int planes = 0;
  KernelIsa isa = KernelIsa::kSm90;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

// One delta-net and its states. A sequence's pages are its own; the cache begins as NaN.
class Net {
 public:
  Net(const Case& c, int sequences) : shape_(c.shape), planes_(c.planes), isa_(c.isa) {
    block_bytes_ = (4 * shape_.key_dim * c.tile + 15) / 16 * 16;
    state_blocks_ = shape_.value_heads * (shape_.value_dim / c.tile);
    const int row_bytes = 2 * (shape_.convolution - 1) * shape_.qkv_size();
    const int blocks = kFirstBlock + state_blocks_ + (row_bytes + block_bytes_ - 1) / block_bytes_;
    state_pages_ = (blocks + planes_ - 1) / planes_;
    plane_bytes_ = int64_t{sequences} * state_pages_ * block_bytes_;
    memory_ = std::make_unique<DeviceBuffer<std::byte>>(plane_bytes_ * planes_);
    pages_.resize(sequences * state_pages_);
    std::iota(pages_.begin(), pages_.end(), 0);
    std::shuffle(pages_.begin(), pages_.end(), std::mt19937(1));
    tile_ = c.tile;
    convolution_ = Normals(int64_t{shape_.qkv_size()} * shape_.convolution, 2, 0.5f);
    decay_log_ = Normals(shape_.value_heads, 3, 0.5f);
    time_bias_ = Normals(shape_.value_heads, 4, 0.5f);
    norm_ = Normals(shape_.value_dim, 5, 1.0f);
  }

  static std::vector<float> Normals(int64_t size, uint32_t seed, float scale) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, scale);
    std::vector<float> values(size);
    for (float& x : values) x = normal(random);
    return values;
  }

  // The inputs of a sequence's rows [0, rows).
  struct Inputs {
    std::vector<Bf16> qkvz;
    std::vector<float> ba;
  };
  Inputs MakeInputs(int rows, uint32_t seed) const {
    Inputs inputs;
    for (const float x : Normals(int64_t{rows} * Pitch(), seed, 1.0f)) {
      inputs.qkvz.push_back(__float2bfloat16(x));
    }
    inputs.ba = Normals(int64_t{rows} * 2 * shape_.value_heads, seed + 1, 1.0f);
    return inputs;
  }

  // Rows [begin, end) of a sequence, whose state comes from another's; -1: zeros. to -1: no state,
  // as of padded rows.
  struct Piece {
    const Inputs* inputs = nullptr;
    int begin = 0, end = 0;
    int to = 0, from = -1;
  };

  // One step. Returns the outputs' bits of each piece.
  std::vector<std::vector<uint16_t>> Run(const std::vector<Piece>& pieces) {
    std::vector<Bf16> qkvz;
    std::vector<float> ba;
    std::vector<int32_t> sequences, row_begin = {0}, to, from;
    for (const Piece& piece : pieces) {
      const Inputs& inputs = *piece.inputs;
      qkvz.insert(qkvz.end(), inputs.qkvz.begin() + piece.begin * Pitch(),
                  inputs.qkvz.begin() + piece.end * Pitch());
      ba.insert(ba.end(), inputs.ba.begin() + piece.begin * 2 * shape_.value_heads,
                inputs.ba.begin() + piece.end * 2 * shape_.value_heads);
      const auto index = static_cast<int32_t>(to.size());
      sequences.insert(sequences.end(), piece.end - piece.begin, index);
      row_begin.push_back(row_begin.back() + piece.end - piece.begin);
      to.push_back(piece.to < 0 ? -1 : piece.to * state_pages_);
      from.push_back(piece.from < 0 ? -1 : piece.from * state_pages_);
    }
    // A padded row.
    qkvz.resize(qkvz.size() + Pitch(), __float2bfloat16(NAN));
    ba.resize(ba.size() + 2 * shape_.value_heads, NAN);
    sequences.push_back(static_cast<int32_t>(to.size()));
    row_begin.push_back(row_begin.back() + 1);
    to.push_back(-1);
    from.push_back(-1);

    const int rows = row_begin.back();
    const DeviceBuffer<Bf16> d_qkvz(qkvz), d_out(int64_t{rows} * shape_.value_size());
    const DeviceBuffer<float> d_ba(ba), d_mixed(int64_t{rows} * shape_.qkv_size()),
        d_convolution(convolution_), d_decay_log(decay_log_), d_time_bias(time_bias_),
        d_norm(norm_);
    const DeviceBuffer<int32_t> d_sequences(sequences), d_row_begin(row_begin), d_to(to),
        d_from(from), d_pages(pages_);
    DeltaParams params;
    params.rows.rows = rows;
    params.rows.sequences = d_sequences.get();
    params.rows.pages = d_pages.get();
    params.rows.states = {static_cast<int32_t>(to.size()), d_row_begin.get(), d_to.get(),
                          d_from.get()};
    params.single_rows = std::all_of(pieces.begin(), pieces.end(), [](const Piece& piece) {
      return piece.end - piece.begin <= 1;
    });
    params.isa = isa_;
    params.shape = shape_;
    params.states = {memory_->get(), plane_bytes_, block_bytes_, state_pages_,
                     kFirstBlock,    tile_,        state_blocks_};
    params.qkvz = d_qkvz.get();
    params.factors = d_ba.get();
    params.convolution = d_convolution.get();
    params.decay_log = d_decay_log.get();
    params.time_bias = d_time_bias.get();
    params.norm = d_norm.get();
    params.eps = kEps;
    params.mixed = d_mixed.get();
    params.out = d_out.get();
    EXPECT_EQ(DeltaConvolution(params, nullptr), cudaSuccess);
    EXPECT_EQ(DeltaRule(params, nullptr), cudaSuccess);
    EXPECT_EQ(DeltaNorm(params, nullptr), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const std::vector<Bf16> out = d_out.Read();
    std::vector<std::vector<uint16_t>> bits;
    for (size_t i = 0; i < pieces.size(); ++i) {
      const int64_t size = int64_t{row_begin[i + 1] - row_begin[i]} * shape_.value_size();
      bits.emplace_back(size);
      std::memcpy(bits.back().data(), out.data() + int64_t{row_begin[i]} * shape_.value_size(),
                  size * sizeof(Bf16));
    }
    return bits;
  }

  // The outputs of a whole sequence in fp64.
  std::vector<double> Reference(const Inputs& inputs) const {
    const int rows = static_cast<int>(inputs.qkvz.size() / Pitch());
    const int channels = shape_.qkv_size();
    const int keys = shape_.key_dim, values = shape_.value_dim, heads = shape_.value_heads;
    const auto in = [&](int row, int c) {
      return row < 0 ? 0.0 : double{__bfloat162float(inputs.qkvz[row * Pitch() + c])};
    };
    std::vector<double> out;
    std::vector<double> state(int64_t{heads} * keys * values, 0.0);
    for (int row = 0; row < rows; ++row) {
      std::vector<double> x(channels, 0.0);
      for (int c = 0; c < channels; ++c) {
        for (int j = 0; j < shape_.convolution; ++j) {
          x[c] += double{convolution_[c * shape_.convolution + j]} *
                  in(row + j + 1 - shape_.convolution, c);
        }
        x[c] /= 1.0 + std::exp(-x[c]);
      }
      const auto normalise = [&](int first, double scale) {
        double squares = 1e-6;
        for (int d = 0; d < keys; ++d) squares += x[first + d] * x[first + d];
        for (int d = 0; d < keys; ++d) x[first + d] *= scale / std::sqrt(squares);
      };
      for (int head = 0; head < shape_.key_heads; ++head) {
        normalise(head * keys, 1.0 / std::sqrt(double(keys)));
        normalise(shape_.key_size() + head * keys, 1.0);
      }
      for (int head = 0; head < heads; ++head) {
        const double* const q = x.data() + head / (heads / shape_.key_heads) * keys;
        const double* const k = q + shape_.key_size();
        const double* const v = x.data() + 2 * shape_.key_size() + head * values;
        const double b = inputs.ba[int64_t{row} * 2 * heads + head];
        const double a = inputs.ba[int64_t{row} * 2 * heads + heads + head];
        const double decay = std::exp(-std::exp(double{decay_log_[head]}) *
                                      std::log1p(std::exp(a + double{time_bias_[head]})));
        const double update = 1.0 / (1.0 + std::exp(-b));
        std::vector<double> o(values, 0.0);
        for (int c = 0; c < values; ++c) {
          double* const s = state.data() + (int64_t{head} * values + c) * keys;
          double seen = 0.0;
          for (int d = 0; d < keys; ++d) seen += (s[d] *= decay) * k[d];
          for (int d = 0; d < keys; ++d) s[d] += k[d] * (v[c] - seen) * update;
          for (int d = 0; d < keys; ++d) o[c] += s[d] * q[d];
        }
        double squares = 0.0;
        for (const double y : o) squares += y * y;
        const double scale = 1.0 / std::sqrt(squares / values + double{kEps});
        for (int c = 0; c < values; ++c) {
          const double z = in(row, channels + head * values + c);
          out.push_back(o[c] * scale * double{norm_[c]} * z / (1.0 + std::exp(-z)));
        }
      }
    }
    return out;
  }

 private:
  static constexpr int kFirstBlock = 3;  // behind another net's

  int Pitch() const { return shape_.qkv_size() + shape_.value_size(); }

  const DeltaShape shape_;
  const int planes_;
  const KernelIsa isa_;
  int32_t block_bytes_ = 0, tile_ = 0, state_blocks_ = 0, state_pages_ = 0;
  int64_t plane_bytes_ = 0;
  std::unique_ptr<DeviceBuffer<std::byte>> memory_;
  std::vector<int32_t> pages_;
  std::vector<float> convolution_, decay_log_, time_bias_, norm_;
};

using DeltaStepTest = IsaTest;

class DeltaTest : public KernelTest, public testing::WithParamInterface<Case> {
 protected:
  void SetUp() override {
    KernelTest::SetUp();
    if (!IsSkipped()) SkipWithout(GetParam().isa);
  }
};

TEST_P(DeltaTest, IsTheRule) {
  for (const int rows : {1, 2, 16, 17, 70}) {
    Net net(GetParam(), 1);
    const Net::Inputs inputs = net.MakeInputs(rows, rows);
    const auto bits = net.Run({{&inputs, 0, rows, 0, -1}})[0];
    const std::vector<double> expected = net.Reference(inputs);
    ASSERT_EQ(bits.size(), expected.size());
    double difference = 0.0, size = 0.0;
    for (size_t i = 0; i < bits.size(); ++i) {
      const double got = __bfloat162float(__ushort_as_bfloat16(bits[i]));
      difference += (got - expected[i]) * (got - expected[i]);
      size += expected[i] * expected[i];
    }
    EXPECT_LT(std::sqrt(difference / size), 0.003) << rows << " rows";  // of bf16's rounding
  }
}

// Chunks of any size, alone or beside others, in place or from another's state, give the same bits.
TEST_P(DeltaTest, ARowsBitsDependOnItsSequenceAlone) {
  constexpr int kRows = 45;
  Net net(GetParam(), 6);
  const Net::Inputs one = net.MakeInputs(kRows, 10), two = net.MakeInputs(kRows, 20);
  const auto whole = net.Run({{&one, 0, kRows, 0, -1}})[0];
  const auto other = net.Run({{&two, 0, kRows, 1, -1}})[0];
  const auto joined = [](std::vector<uint16_t> a, const std::vector<uint16_t>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  };
  for (const int cut : {1, 2, 3, 15, 16, 33, 44}) {
    const auto first = net.Run({{&two, 0, 1, 2, -1}, {&one, 0, cut, 3, -1}});
    // Sequence 4 goes on from what 3 was, and 3 goes on in place.
    const auto rest =
        net.Run({{&one, cut, kRows, 4, 3}, {&two, 1, kRows, 2, 2}, {&one, cut, kRows, 5, 3}});
    EXPECT_EQ(joined(first[1], rest[0]), whole) << cut;
    EXPECT_EQ(joined(first[0], rest[1]), other) << cut;
    EXPECT_EQ(rest[2], rest[0]);
    const auto again = net.Run({{&one, cut, kRows, 3, 3}});
    EXPECT_EQ(again[0], rest[0]) << "state 3 was only read";
  }
  std::vector<uint16_t> by_rows;
  for (int row = 0; row < kRows; ++row) {
    by_rows = joined(by_rows, net.Run({{&one, row, row + 1, 0, row == 0 ? -1 : 0}})[0]);
  }
  EXPECT_EQ(by_rows, whole);
}

std::vector<Case> Cases(KernelIsa isa) {
  return {{"Qwen35", {2, 6, 128, 128, 4}, 64, 8, isa},
          {"NarrowTiles", {2, 4, 128, 128, 4}, 32, 3, isa},
          {"WideTiles", {1, 2, 128, 128, 4}, 128, 4, isa},
          {"PartOfABlock", {1, 2, 64, 192, 2}, 96, 4, isa},
          {"Tiny", {2, 4, 8, 12, 3}, 12, 2, isa},
          {"TinyTiles", {2, 2, 12, 20, 4}, 5, 6, isa}};
}

INSTANTIATE_TEST_SUITE_P(Sm90, DeltaTest, testing::ValuesIn(Cases(KernelIsa::kSm90)),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Mma, DeltaTest, testing::ValuesIn(Cases(KernelIsa::kMma)),
                         [](const auto& info) { return info.param.name; });

DORAD_FOR_EACH_ISA(DeltaStepTest);

// In a step of single rows: sequences without a row and without a state lie between the others.
TEST_P(DeltaStepTest, BlocksTakeOneStateAfterTheOther) {
  constexpr int kSequences = 60, kWithoutRow = 20, kWithoutState = 40;
  Net net({"", {2, 6, 128, 128, 4}, 4, 16, GetParam()}, kSequences + 1);
  std::vector<Net::Inputs> inputs;
  for (int i = 0; i < kSequences; ++i) inputs.push_back(net.MakeInputs(2, 100 + 2 * i));
  std::vector<std::vector<std::vector<uint16_t>>> steps;
  for (int row = 0; row < 2; ++row) {
    std::vector<Net::Piece> pieces;
    for (int i = 0; i < kSequences; ++i) {
      const int end = i == kWithoutRow ? row : row + 1;
      pieces.push_back({&inputs[i], row, end, i == kWithoutState ? -1 : i, row == 0 ? -1 : i});
    }
    steps.push_back(net.Run(pieces));
  }
  for (int i = 0; i < kSequences; ++i) {
    if (i == kWithoutRow || i == kWithoutState) continue;
    for (int row = 0; row < 2; ++row) {
      const int from = row == 0 ? -1 : kSequences;
      const auto alone = net.Run({{&inputs[i], row, row + 1, kSequences, from}});
      EXPECT_EQ(steps[row][i], alone[0]) << "sequence " << i << ", row " << row;
    }
  }
}

TEST(DeltaShapeTest, NamesTheShapesThatItHas) {
  EXPECT_TRUE(IsDeltaShape({16, 48, 128, 128, 4}));
  EXPECT_FALSE(IsDeltaShape({16, 48, 132, 128, 4}));
  EXPECT_FALSE(IsDeltaShape({16, 48, 126, 128, 4}));
  EXPECT_FALSE(IsDeltaShape({16, 40, 128, 128, 4}));
  EXPECT_FALSE(IsDeltaShape({16, 48, 128, 126, 4}));
  EXPECT_FALSE(IsDeltaShape({16, 48, 128, 128, 1}));
  EXPECT_FALSE(IsDeltaShape({16, 48, 128, 128, 5}));
}

}  // namespace
}  // namespace dorad::kernels
