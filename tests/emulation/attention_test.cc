// Attention in the emulator, planned and launched as the server does it, with both instruction
// sets, against a double reference and against itself: whole rows, rows in parts, rows that read
// common pages together, rows appended on the way, and tiles of rows have the same bits. Unused
// places of the cache are NaN.
#include "kernels/decoder/attention.h"

#include <cmath>
#include <numeric>
#include <string>

#include "gtest/gtest.h"
#include "kernels/decoder/attention_layout.h"
#include "kernels/decoder/attention_simple.h"
#include "tests/emulation/emulator.h"
#include "tests/unit/kernels/fp8_cache.h"

namespace dorad::kernels {

// Of other shapes; not emulated.
cudaError_t SimplePagedAttention(const PagedAttentionParams&, cudaStream_t) {
  return cudaErrorNotSupported;
}

namespace {

using emulation::Emulator;
using Bf16 = __nv_bfloat16;

struct Case {
  const char* name;
  AttentionShape shape;
  int window = 0;
  // Each sequence's rows [first, end), by position. A row sees the whole run, or none behind it.
  std::vector<std::pair<int, int>> runs;
  bool sees_run = false;
  int common = 0;  // positions whose pages all sequences have in common
  bool is_fp8 = false;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class Step {
 public:
  Step(const Case& c, KernelIsa isa, std::mt19937* random) : case_(c), isa_(isa), random_(*random) {
    const auto [heads, kv_heads, dim] = c.shape;
    std::normal_distribution<float> normal;
    int pages = 2;
    for (const auto& run : c.runs) pages += (run.second + kKvPageTokens - 1) / kKvPageTokens;
    std::vector<int32_t> shuffled(pages);
    std::iota(shuffled.begin(), shuffled.end(), 0);
    std::shuffle(shuffled.begin(), shuffled.end(), random_);
    k_.assign(size_t{1} * pages * kv_heads * kKvPageTokens * dim, __float2bfloat16(NAN));
    v_ = k_;
    for (size_t s = 0; s < c.runs.size(); ++s) {
      const auto [first, end] = c.runs[s];
      page_begin_.push_back(static_cast<int32_t>(pages_.size()));
      const int common = s == 0 ? 0 : std::min(c.common, end / kKvPageTokens * kKvPageTokens);
      for (int at = 0; at < end; at += kKvPageTokens) {
        if (at < common) {
          pages_.push_back(pages_[at / kKvPageTokens]);
          continue;
        }
        pages_.push_back(shuffled.back());
        shuffled.pop_back();
      }
      for (int position = common; position < end; ++position) {
        for (int head = 0; head < kv_heads; ++head) {
          for (int d = 0; d < dim; ++d) {
            k_[At(s, position, head) + d] = __float2bfloat16(normal(random_));
            v_[At(s, position, head) + d] = __float2bfloat16(normal(random_));
          }
        }
      }
      for (int position = first; position < end; ++position) {
        sequences_.push_back(static_cast<int32_t>(s));
        positions_.push_back(position);
        reach_.push_back(c.sees_run ? end - 1 : position);
      }
    }
    q_.resize(positions_.size() * heads * dim);
    for (Bf16& x : q_) x = __float2bfloat16(normal(random_));
    if (c.is_fp8) RoundToFp8(pages);
  }

  struct How {
    AttentionSplit split = AttentionSplit::kNever;
    int processors = 2;  // with one, a part has more chunks; with many, blocks join parts
    bool appends = false;
    bool shares = false;
    bool tiles = false;
    bool as_bf16 = false;  // from the numbers that a cache in eight bits stands for
  };
  std::vector<Bf16> Run(const How& how) {
    const int count = static_cast<int>(positions_.size());
    const bool is_fp8 = case_.is_fp8 && !how.as_bf16;
    StepRows rows;
    rows.rows = count;
    rows.positions = positions_.data();
    rows.sequences = sequences_.data();
    rows.page_begin = page_begin_.data();
    rows.pages = pages_.data();
    if (case_.sees_run) rows.reach = reach_.data();
    struct alignas(256) Line {
      unsigned char bytes[256];
    };
    const size_t bytes = AttentionWorkspaceBytes(case_.shape, count, kMostPositions);
    std::vector<Line> memory((bytes + sizeof(Line) - 1) / sizeof(Line));
    std::memset(memory.data(), 0xFF, bytes);
    const AttentionWorkspace workspace = {memory.data(), bytes, count};
    Emulator::Get().device.processors = how.processors;
    Emulator::Get().device.blocks_at_once = 1000;
    AttentionPlanParams plan;
    plan.rows = rows;
    plan.shape = case_.shape;
    plan.window = case_.window;
    plan.row_tiles = how.tiles;
    plan.shares = how.shares;
    plan.split = how.split;
    plan.isa = isa_;
    plan.is_fp8 = is_fp8;
    plan.workspace = workspace;
    EXPECT_EQ(PlanAttention(plan, nullptr), cudaSuccess);

    const std::vector<Bf16>& whole_k = is_fp8 ? codes_[0] : k_;
    const std::vector<Bf16>& whole_v = is_fp8 ? codes_[1] : v_;
    std::vector<Bf16> k = whole_k, v = whole_v, factors = factors_,
                      out(q_.size(), __float2bfloat16(NAN)), qkv;
    PagedAttentionParams params;
    params.rows = rows;
    params.shape = case_.shape;
    params.q = q_.data();
    params.cache = {k.data(), v.data(), is_fp8 ? factors.data() : nullptr};
    params.softmax_scale = scale();
    params.window = case_.window;
    params.row_tiles = how.tiles;
    params.shares = how.shares;
    params.isa = isa_;
    params.workspace = workspace;
    params.out = out.data();
    const std::vector<float> cos(kMostPositions * 128, 1.0f), sin(kMostPositions * 128, 0.0f);
    if (how.appends) {
      qkv = TakeFromCache(&k, &v, &factors, is_fp8);
      RopeAppendParams append;
      append.rows = rows;
      append.shape = case_.shape;
      append.qkv = qkv.data();
      append.cos = cos.data();
      append.sin = sin.data();
      append.q = q_.data();
      append.cache = params.cache;
      EXPECT_EQ(AppendAttention(append, params, nullptr), cudaSuccess);
    } else {
      EXPECT_EQ(PagedAttention(params, nullptr), cudaSuccess);
    }
    Emulator::Get().Run();
    AttentionLayout layout;
    EXPECT_TRUE(LayOutAttention(case_.shape, count, workspace, &layout));
    EXPECT_EQ(layout.header->next, 0);
    EXPECT_EQ(layout.header->done, 0);
    const auto* const parts = reinterpret_cast<const uint32_t*>(layout.parts);
    EXPECT_TRUE(std::all_of(
        parts, parts + size_t{1} * layout.slots * case_.shape.kv_heads * layout.part_floats,
        [](uint32_t x) { return x == kNoPart; }));
    EXPECT_EQ(std::memcmp(k.data(), whole_k.data(), k.size() * sizeof(Bf16)), 0);
    EXPECT_EQ(std::memcmp(v.data(), whole_v.data(), v.size() * sizeof(Bf16)), 0);
    EXPECT_EQ(std::memcmp(factors.data(), factors_.data(), factors.size() * sizeof(Bf16)), 0);
    return out;
  }

  // The largest error of a row's heads, in units of the output's size.
  double Error(const std::vector<Bf16>& out) const {
    const auto [heads, kv_heads, dim] = case_.shape;
    double worst = 0.0;
    for (size_t row = 0; row < positions_.size(); ++row) {
      for (int head = 0; head < heads; ++head) {
        const Bf16* const q = q_.data() + (row * heads + head) * dim;
        std::vector<double> sum(dim, 0.0);
        double total = 0.0;
        const int first = case_.window > 0 ? std::max(0, positions_[row] - case_.window + 1) : 0;
        for (int j = first; j <= reach_[row]; ++j) {
          const int64_t place = At(sequences_[row], j, head / (heads / kv_heads));
          double dot = 0.0;
          for (int d = 0; d < dim; ++d) {
            dot += double{__bfloat162float(q[d])} * double{__bfloat162float(k_[place + d])};
          }
          const double weight = std::exp(dot * double{scale()});
          total += weight;
          for (int d = 0; d < dim; ++d) sum[d] += weight * double{__bfloat162float(v_[place + d])};
        }
        double difference = 0.0, size = 0.0;
        for (int d = 0; d < dim; ++d) {
          const double got = __bfloat162float(out[(row * heads + head) * dim + d]);
          difference += std::pow(got - sum[d] / total, 2);
          size += std::pow(sum[d] / total, 2);
        }
        const double error = std::sqrt(difference / size);
        if (!(error <= worst)) worst = error;
      }
    }
    return worst;
  }

  // Whether each sequence has one row, and no row more than its own position.
  bool CanAppend() const { return !case_.sees_run && positions_.size() == case_.runs.size(); }
  int joins() const { return static_cast<int>(positions_.size()) * case_.shape.kv_heads; }

 private:
  static constexpr int kMostPositions = 4096;

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(case_.shape.head_dim)); }
  int64_t At(size_t sequence, int position, int kv_head) const {
    const int64_t page = pages_[page_begin_[sequence] + position / kKvPageTokens];
    return ((page * case_.shape.kv_heads + kv_head) * kKvPageTokens + position % kKvPageTokens) *
           case_.shape.head_dim;
  }

  // Codes and factors, and what they stand for instead of the numbers. Numbers of one position and
  // head differ by up to 2^16, so that some codes are zeros and some below the least exponent.
  void RoundToFp8(int pages) {
    const auto [heads, kv_heads, dim] = case_.shape;
    Fp8Cache cache(case_.shape, pages);
    std::uniform_real_distribution<float> size(-8.0f, 8.0f);
    for (int64_t page = 0; page < pages; ++page) {
      for (int at = 0; at < kv_heads * kKvPageTokens; ++at) {
        for (const Kind kind : {kKey, kValue}) {
          Bf16* const from =
              (kind == kKey ? k_ : v_).data() + (page * kv_heads * kKvPageTokens + at) * dim;
          if (std::isnan(__bfloat162float(from[0]))) continue;  // unused
          std::vector<float> x(dim);
          for (int d = 0; d < dim; ++d) {
            x[d] = __bfloat162float(from[d]) * (d % 3 == 0 ? std::exp2(size(random_)) / 64 : 1.0f);
          }
          // Rounding may make a smaller scale enough; then what is appended would get that.
          for (int i = 0; i < 2; ++i) {
            for (float& value : x)
              value += 0.0f;  // no negative zeros: rotation may turn their sign
            cache.Put(kind, page, at / kKvPageTokens, at % kKvPageTokens, x.data());
          }
          for (int d = 0; d < dim; ++d) from[d] = __float2bfloat16(x[d]);
        }
      }
    }
    for (const Kind kind : {kKey, kValue}) codes_[kind] = cache.Codes(kind);
    factors_ = cache.factors();
  }

  // The rows' queries, keys and values for AppendAttention; their places in the cache become NaN.
  // Rows turn by no angle: what is appended is what was there.
  std::vector<Bf16> TakeFromCache(std::vector<Bf16>* k, std::vector<Bf16>* v,
                                  std::vector<Bf16>* factors, bool is_fp8) const {
    const auto [heads, kv_heads, dim] = case_.shape;
    std::vector<Bf16> qkv;
    for (size_t row = 0; row < positions_.size(); ++row) {
      qkv.insert(qkv.end(), q_.begin() + row * heads * dim, q_.begin() + (row + 1) * heads * dim);
      for (const Kind kind : {kKey, kValue}) {
        const std::vector<Bf16>& from = kind == kKey ? k_ : v_;
        std::vector<Bf16>& cache = *(kind == kKey ? k : v);
        for (int head = 0; head < kv_heads; ++head) {
          const int64_t place = At(sequences_[row], positions_[row], head);
          qkv.insert(qkv.end(), from.begin() + place, from.begin() + place + dim);
          const int width = is_fp8 ? 2 : 1;
          std::fill_n(cache.begin() + place / width, dim / width, __float2bfloat16(NAN));
          if (!is_fp8) continue;
          const int64_t page = place / dim / kKvPageTokens / kv_heads;
          (*factors)[Fp8Cache(case_.shape, 0)
                         .FactorAt(kind, page, head, positions_[row] % kKvPageTokens)] =
              __float2bfloat16(NAN);
        }
      }
    }
    return qkv;
  }

  const Case case_;
  const KernelIsa isa_;
  std::mt19937& random_;
  std::vector<int32_t> sequences_, positions_, reach_;  // of rows
  std::vector<Bf16> k_, v_, q_;
  std::vector<Bf16> codes_[2], factors_;  // in eight bits, codes by two
  std::vector<int32_t> pages_, page_begin_;
};

class EmulatedAttention : public testing::TestWithParam<std::tuple<Case, KernelIsa>> {};

TEST_P(EmulatedAttention, HasTheSameBitsInAllWays) {
  const auto [c, isa] = GetParam();
  Emulator emulator(3);
  Step step(c, isa, &emulator.random());
  std::vector<Bf16> whole;
  ASSERT_NO_THROW(whole = step.Run({}));
  EXPECT_LT(step.Error(whole), 4e-3);  // of bf16's rounding
  const auto expect_same = [&](const std::string& way, const Step::How& how) {
    std::vector<Bf16> other;
    ASSERT_NO_THROW(other = step.Run(how)) << way;
    int different = 0, first = -1;
    for (size_t i = 0; i < whole.size(); ++i) {
      if (std::memcmp(&whole[i], &other[i], sizeof(Bf16)) == 0) continue;
      if (first < 0) first = static_cast<int>(i);
      ++different;
    }
    EXPECT_EQ(different, 0) << way << ", first at " << first;
  };
  constexpr int kJoinShare = 8;  // blocks for each join by a block of its own
  for (int way = 1; way < 16; ++way) {
    Step::How how;
    std::string name;
    switch (way % 4) {
      case 1:
      case 2:
        how.split = AttentionSplit::kAlways;
        how.processors = 2 - way % 2;
        name = "in parts on " + std::to_string(how.processors) + " multiprocessors, ";
        break;
      case 3:
        if (step.joins() > 10) continue;  // the emulator would take long
        how.split = AttentionSplit::kAlways;
        how.processors = kJoinShare * step.joins();
        name = "joined by blocks of their own, ";
        break;
      default:
        break;
    }
    how.appends = (way / 4 & 1) != 0;
    how.shares = (way / 8 & 1) != 0;
    if ((how.appends && !step.CanAppend()) || (how.shares && c.common == 0)) continue;
    if (how.appends) name += "appended, ";
    if (how.shares) name += "common pages together, ";
    expect_same(name, how);
  }
  if (c.is_fp8) {
    Step::How how;
    how.as_bf16 = true;
    expect_same("from bf16", how);
  }
  if (!HasTileAttention(c.shape.head_dim)) return;
  Step::How how;
  how.tiles = true;
  expect_same("in tiles", how);
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  const std::vector<std::pair<int, int>> singles = {{0, 1},     {15, 16},   {63, 64},  {64, 65},
                                                    {129, 130}, {255, 256}, {300, 301}};
  cases.push_back({"Dim64", {8, 2, 64}, 0, singles});
  cases.push_back({"Dim80", {6, 2, 80}, 0, singles});
  cases.push_back({"Dim96Wide", {18, 2, 96}, 0, singles});
  cases.push_back({"Dim128", {6, 2, 128}, 0, singles});
  cases.push_back({"Dim128Wide", {12, 1, 128}, 0, {{40, 41}, {270, 271}}});
  cases.push_back({"Dim256", {4, 2, 256}, 0, {{5, 6}, {130, 131}, {200, 201}}});
  cases.push_back({"Dim256Wide", {16, 1, 256}, 0, {{5, 6}, {130, 131}, {200, 201}}});
  cases.push_back({"Window", {4, 2, 64}, 100, singles});
  cases.push_back({"Run64", {4, 2, 64}, 0, {{0, 40}, {100, 170}}});
  cases.push_back({"Run128", {4, 2, 128}, 0, {{0, 20}, {230, 300}}});
  cases.push_back({"Run256", {4, 1, 256}, 0, {{0, 20}, {190, 210}}});
  cases.push_back({"RunInWindow", {4, 1, 64}, 90, {{250, 290}}});
  cases.push_back({"Image", {4, 1, 64}, 0, {{30, 80}}, true});
  cases.push_back({"ImageWide", {16, 1, 128}, 0, {{0, 40}}, true});
  cases.push_back({"Long", {1, 1, 64}, 0, {{2300, 2302}}});
  // More rows than an item holds, of which some end within what all have in common.
  const auto sharing = [](int rows) {
    std::vector<std::pair<int, int>> runs;
    for (int i = 0; i < rows; ++i)
      runs.emplace_back(133 + 3 * i + i % 3 * 50, 134 + 3 * i + i % 3 * 50);
    return runs;
  };
  cases.push_back({"CommonGroup1", {2, 2, 64}, 0, sharing(18), false, 128});
  cases.push_back({"CommonGroup3", {6, 2, 64}, 0, sharing(11), false, 128});
  cases.push_back({"CommonGroup4", {8, 2, 128}, 0, sharing(9), false, 128});
  cases.push_back({"CommonGroup5", {5, 1, 128}, 0, sharing(5), false, 128});
  cases.push_back({"CommonGroup8Dim96", {8, 1, 96}, 0, sharing(5), false, 128});
  cases.push_back({"CommonDim80", {6, 2, 80}, 0, sharing(6), false, 128});
  cases.push_back({"CommonWide", {12, 1, 128}, 0, sharing(3), false, 128});
  cases.push_back({"CommonDim256", {4, 1, 256}, 0, sharing(5), false, 128});
  cases.push_back(
      {"CommonChunks", {4, 2, 64}, 0, {{400, 401}, {300, 301}, {275, 276}}, false, 272});
  cases.push_back({"CommonOfOneSequence", {4, 2, 64}, 0, {{300, 306}}, false, 256});
  cases.push_back({"CommonDim256Wide", {16, 1, 256}, 0, sharing(2), false, 128});
  cases.push_back({"Fp8Dim64", {8, 2, 64}, 0, singles, false, 0, true});
  cases.push_back({"Fp8Dim64Wide", {12, 1, 64}, 0, {{40, 41}, {270, 271}}, false, 0, true});
  cases.push_back({"Fp8Dim128", {6, 2, 128}, 0, singles, false, 0, true});
  cases.push_back({"Fp8Dim128Wide", {12, 1, 128}, 0, {{40, 41}, {270, 271}}, false, 0, true});
  cases.push_back({"Fp8Dim256", {4, 2, 256}, 0, {{5, 6}, {130, 131}}, false, 0, true});
  cases.push_back({"Fp8Window", {4, 2, 64}, 100, singles, false, 0, true});
  cases.push_back({"Fp8Run64", {4, 2, 64}, 0, {{0, 40}, {100, 170}}, false, 0, true});
  cases.push_back({"Fp8Run128", {4, 2, 128}, 0, {{0, 20}, {230, 300}}, false, 0, true});
  cases.push_back({"Fp8Run256", {4, 1, 256}, 0, {{0, 20}, {190, 210}}, false, 0, true});
  cases.push_back({"Fp8RunInWindow", {4, 1, 64}, 90, {{250, 290}}, false, 0, true});
  cases.push_back({"Fp8Common", {8, 2, 128}, 0, sharing(9), false, 128, true});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(, EmulatedAttention,
                         testing::Combine(testing::ValuesIn(Cases()),
                                          testing::Values(KernelIsa::kSm90, KernelIsa::kMma)),
                         [](const auto& info) {
                           return std::string(std::get<Case>(info.param).name) +
                                  (std::get<KernelIsa>(info.param) == KernelIsa::kSm90 ? "Sm90"
                                                                                       : "Mma");
                         });

}  // namespace
}  // namespace dorad::kernels
