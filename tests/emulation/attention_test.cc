// Attention by mma.sync in the emulator, against a double reference and against itself: whole rows,
// rows in parts, rows that read common pages together, rows appended on the way, and tiles of rows
// have the same bits. Unused places of the cache are NaN.
#include <cmath>
#include <numeric>
#include <string>

#include "gtest/gtest.h"
#include "kernels/decoder/attention_layout.h"
#include "kernels/decoder/attention_mma.cuh"
#include "kernels/decoder/attention_rows_kernel.cuh"
#include "kernels/decoder/attention_tiles_kernel.cuh"
#include "tests/emulation/emulator.h"

namespace dorad::kernels {
namespace {

using emulation::Emulator;
using emulation::Grid;
using Bf16 = __nv_bfloat16;

struct Case {
  const char* name;
  AttentionShape shape;
  int window = 0;
  // Each sequence's rows [first, end), by position. A row sees the whole run, or none behind it.
  std::vector<std::pair<int, int>> runs;
  bool sees_run = false;
  int common = 0;  // positions whose pages all sequences have in common
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class Step {
 public:
  Step(const Case& c, std::mt19937* random) : case_(c), random_(*random) {
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
        rows_.push_back({static_cast<int>(s), position, c.sees_run ? end - 1 : position});
        reach_.push_back(rows_.back().last);
      }
    }
    q_.resize(rows_.size() * heads * dim);
    for (Bf16& x : q_) x = __float2bfloat16(normal(random_));
  }

  // run: in parts of chunks, which are joined, with so many chunks an item; 0: rows are whole.
  // shares: reads common pages once for several rows.
  struct How {
    int run = 0;
    bool appends = false;
    bool shares = false;
    bool has_join_blocks = false;
  };
  // Outputs of all rows by themselves.
  std::vector<Bf16> Rows(const How& how) {
    std::vector<Bf16> out(q_.size(), __float2bfloat16(NAN));
    WithConfig(how.shares, [&](auto config) { RunRows<decltype(config)>(how, out.data()); });
    return out;
  }

  // The same in tiles of rows.
  std::vector<Bf16> Tiles() {
    std::vector<Bf16> out(q_.size(), __float2bfloat16(NAN));
    switch (case_.shape.head_dim) {
      case 64:
        RunTiles<tile_attention::Config<MmaPages, 64>>(out.data());
        break;
      case 128:
        RunTiles<tile_attention::Config<MmaPages, 128>>(out.data());
        break;
      default:
        RunTiles<tile_attention::Config<MmaPages, 256>>(out.data());
    }
    return out;
  }

  // The largest error of a row's heads, in units of the output's size.
  double Error(const std::vector<Bf16>& out) const {
    const auto [heads, kv_heads, dim] = case_.shape;
    double worst = 0.0;
    for (size_t row = 0; row < rows_.size(); ++row) {
      for (int head = 0; head < heads; ++head) {
        const Row& at = rows_[row];
        const Bf16* const q = q_.data() + (row * heads + head) * dim;
        std::vector<double> sum(dim, 0.0);
        double total = 0.0;
        for (int j = First(at); j <= at.last; ++j) {
          const int64_t place = At(at.sequence, j, head / (heads / kv_heads));
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
  bool CanAppend() const {
    return !case_.sees_run && rows_.size() == case_.runs.size() && case_.shape.head_dim != 80;
  }
  // Their blocks would take the emulator long.
  bool HasFewJoins() const { return rows_.size() * case_.shape.kv_heads <= 10; }

 private:
  struct Row {
    int sequence;
    int position;
    int last;  // that it sees
  };

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(case_.shape.head_dim)); }
  int First(const Row& row) const {
    return case_.window > 0 ? std::max(0, row.position - case_.window + 1) : 0;
  }
  int64_t At(size_t sequence, int position, int kv_head) const {
    const int64_t page = pages_[page_begin_[sequence] + position / kKvPageTokens];
    return ((page * case_.shape.kv_heads + kv_head) * kKvPageTokens + position % kKvPageTokens) *
           case_.shape.head_dim;
  }

  template <typename F>
  void WithConfig(bool shares, F f) {
    ASSERT_EQ(row_attention::WithConfig<MmaPages>(case_.shape, shares,
                                                  [&](auto config) {
                                                    f(config);
                                                    return cudaSuccess;
                                                  }),
              cudaSuccess);
  }

  struct Work {
    std::vector<AttentionItem> items, joins;
    int slots = 0;
  };
  // Adds one item for each run of chunks, which have a slot each, or one for all.
  void AddItems(AttentionItem item, int run, Work* work) const {
    const int end = item.end;
    while (item.begin < end) {
      if (run > 0) {
        item.end = std::min(end, (item.begin / kAttentionChunk + run) * kAttentionChunk);
      }
      const int first_page = item.begin / kAttentionTile * kAttentionTilePages;
      for (int j = 0; j < 2 * kAttentionTilePages; ++j) {
        const int page = first_page + j;
        const bool is_in = page * kKvPageTokens < item.end && page >= item.begin / kKvPageTokens;
        item.pages[j] = is_in ? pages_[item.page_base + page] : -1;
      }
      work->items.push_back(item);
      item.begin = item.end;
      item.slot += run;
    }
  }
  int ChunksOf(int row) const {
    return rows_[row].last / kAttentionChunk + 1 - First(rows_[row]) / kAttentionChunk;
  }

  // As PlanAttention does it, in groups of as many rows as may be.
  Work Plan(const How& how) const {
    Work work, own;
    const int most = how.shares ? AttentionSharedRows(case_.shape) : 1;
    for (int first = 0; first < static_cast<int>(rows_.size()); first += most) {
      const int end = std::min(first + most, static_cast<int>(rows_.size()));
      int chunks = case_.common / kAttentionChunk, most_chunks = 0;
      for (int row = first; row < end; ++row) {
        chunks = std::min(chunks, rows_[row].position / kAttentionChunk);
        most_chunks = std::max(most_chunks, ChunksOf(row));
      }
      if (end - first == 1) chunks = 0;
      const bool is_split = how.run > 0 && most_chunks > 1;
      const int slot = work.slots, stride = is_split ? most_chunks : 1;
      if (chunks > 0 || is_split) work.slots += stride * (end - first);
      const int page_base = page_begin_[rows_[first].sequence];
      AddItems(
          {first, 0, chunks * kAttentionChunk, slot, end - first, stride, page_base, INT32_MAX, {}},
          is_split ? how.run : 0, &work);
      for (int row = first; row < end; ++row) {
        const Row& at = rows_[row];
        const int part = slot + (row - first) * stride;
        AddItems({row,
                  std::max(First(at), chunks * kAttentionChunk),
                  at.last + 1,
                  is_split ? part + chunks : -1,
                  1,
                  is_split || chunks == 0 ? -1 : part,
                  page_begin_[at.sequence],
                  at.position,
                  {}},
                 is_split ? how.run : 0, &own);
        if (is_split) own.joins.push_back({row, 0, 0, -1, ChunksOf(row), part, 0, 0, {}});
      }
    }
    work.items.insert(work.items.end(), own.items.begin(), own.items.end());
    work.joins = std::move(own.joins);
    return work;
  }

  template <typename C>
  void RunRows(const How& how, Bf16* out) {
    auto [items, joins, slots] = Plan(how);
    const int all_joins = static_cast<int>(joins.size()) * case_.shape.kv_heads;
    AttentionHeader header = {static_cast<int32_t>(items.size()),
                              static_cast<int32_t>(joins.size()),
                              0,
                              how.has_join_blocks ? all_joins : 0,
                              0,
                              0};
    items.insert(items.end(), joins.rbegin(), joins.rend());
    row_attention::Args<MmaPages> args = {};
    args.layout.header = &header;
    args.layout.items = items.data();
    args.layout.items_room = static_cast<int32_t>(items.size());
    args.layout.part_floats = AttentionPartFloats(case_.shape);
    std::vector<uint32_t> parts(
        size_t{1} * slots * case_.shape.kv_heads * args.layout.part_floats + 4, kNoPart);
    args.layout.parts = reinterpret_cast<float*>(parts.data());
    std::vector<Bf16> k = k_, v = v_, qkv;
    const std::vector<float> cos(4096 * 128, 1.0f), sin(4096 * 128, 0.0f);
    std::vector<int32_t> positions;
    args.k = k.data();
    args.v = v.data();
    args.q = q_.data();
    args.out = out;
    args.pages = pages_.data();
    args.kv_heads = case_.shape.kv_heads;
    args.kv_heads_inverse = (uint64_t{1} << 32) / case_.shape.kv_heads + 1;
    args.group = AttentionGroup(case_.shape);
    args.scale = scale() * 1.44269504088896340736f;
    if (how.appends) {
      // Rows turn by no angle: what is appended is what was in the cache.
      const auto [heads, kv_heads, dim] = case_.shape;
      for (size_t row = 0; row < rows_.size(); ++row) {
        qkv.insert(qkv.end(), q_.begin() + row * heads * dim, q_.begin() + (row + 1) * heads * dim);
        for (std::vector<Bf16>* cache : {&k, &v}) {
          for (int head = 0; head < kv_heads; ++head) {
            const auto at = cache->begin() + At(rows_[row].sequence, rows_[row].position, head);
            qkv.insert(qkv.end(), at, at + dim);
            std::fill(at, at + dim, __float2bfloat16(NAN));
          }
        }
      }
      for (const Row& row : rows_) positions.push_back(row.position);
      args.append.rows.positions = positions.data();
      args.append.shape = case_.shape;
      args.append.qkv = qkv.data();
      args.append.cos = cos.data();
      args.append.sin = sin.data();
      args.append.cache = {k.data(), v.data()};
    }
    int delay = static_cast<int>(random_() % 200);
    Grid grid(
        3 + header.join_blocks, C::threads, 1, C::shared_bytes, [&delay] { return --delay < 0; },
        [&] { row_attention::RunRowBlock<C>(args, emulation::ThisBlock().shared); });
    Emulator::Get().Run({&grid});
    EXPECT_EQ(header.next, 0);
    EXPECT_EQ(header.done, 0);
    EXPECT_TRUE(std::all_of(parts.begin(), parts.end(), [](uint32_t x) { return x == kNoPart; }));
    EXPECT_EQ(std::memcmp(k.data(), k_.data(), k.size() * sizeof(Bf16)), 0);
    EXPECT_EQ(std::memcmp(v.data(), v_.data(), v.size() * sizeof(Bf16)), 0);
  }

  template <typename C>
  void RunTiles(Bf16* out) {
    std::vector<AttentionRowTile> tiles;
    const int most = AttentionTileTokens(case_.shape);
    for (size_t row = 0; row < rows_.size();) {
      const Row& at = rows_[row];
      const int left = case_.runs[at.sequence].second - at.position;
      tiles.push_back(
          {static_cast<int32_t>(row), std::min(left, most), at.position, page_begin_[at.sequence]});
      row += tiles.back().tokens;
    }
    AttentionHeader header = {0, 0, static_cast<int32_t>(tiles.size()), 0, 0, 0};
    tile_attention::Args<MmaPages> args = {};
    args.layout.header = &header;
    args.layout.tiles = tiles.data();
    args.k = k_.data();
    args.v = v_.data();
    args.q = q_.data();
    args.out = out;
    args.pages = pages_.data();
    args.reach = case_.sees_run ? reach_.data() : nullptr;
    args.kv_heads = case_.shape.kv_heads;
    args.group = AttentionGroup(case_.shape);
    args.window = case_.window;
    args.scale = scale() * 1.44269504088896340736f;
    const int blocks = (static_cast<int>(tiles.size()) + 1) * args.kv_heads;  // some without a tile
    Grid grid(
        blocks, C::threads, 1, C::shared_bytes, [] { return true; },
        [&] { tile_attention::RunTileBlock<C>(args, emulation::ThisBlock().shared); });
    Emulator::Get().Run({&grid});
  }

  const Case case_;
  std::mt19937& random_;
  std::vector<Row> rows_;
  std::vector<Bf16> k_, v_, q_;
  std::vector<int32_t> pages_, page_begin_, reach_;
};

class EmulatedAttention : public testing::TestWithParam<Case> {};

TEST_P(EmulatedAttention, HasTheSameBitsInAllWays) {
  Emulator emulator(3);
  Step step(GetParam(), &emulator.random());
  std::vector<Bf16> whole;
  ASSERT_NO_THROW(whole = step.Rows({}));
  EXPECT_LT(step.Error(whole), 4e-3);  // of bf16's rounding
  const auto expect_same = [&](const char* way, auto compute) {
    std::vector<Bf16> other;
    ASSERT_NO_THROW(other = compute()) << way;
    int different = 0, first = -1;
    for (size_t i = 0; i < whole.size(); ++i) {
      if (std::memcmp(&whole[i], &other[i], sizeof(Bf16)) == 0) continue;
      if (first < 0) first = static_cast<int>(i);
      ++different;
    }
    EXPECT_EQ(different, 0) << way << ", first at " << first;
  };
  const bool shares = GetParam().common > 0;
  for (int way = 1; way < 24; ++way) {
    const Step::How how{way % 3, (way / 3 & 1) != 0, (way / 6 & 1) != 0, way >= 12};
    if ((how.appends && !step.CanAppend()) || (how.shares && !shares)) continue;
    if (how.has_join_blocks && (how.run == 0 || !step.HasFewJoins())) continue;
    std::string name;
    if (how.run > 0) name += "in parts of " + std::to_string(how.run) + ", ";
    if (how.appends) name += "appended, ";
    if (how.shares) name += "common pages together, ";
    if (how.has_join_blocks) name += "joined by blocks of their own";
    expect_same(name.c_str(), [&] { return step.Rows(how); });
  }
  if (HasTileAttention(GetParam().shape)) expect_same("in tiles", [&] { return step.Tiles(); });
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
  return cases;
}

INSTANTIATE_TEST_SUITE_P(, EmulatedAttention, testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace dorad::kernels
