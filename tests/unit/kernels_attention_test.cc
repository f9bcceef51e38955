// The attention kernels against fp64 on the host, on caches whose pages are shuffled and whose
// unused places are NaN; and against themselves, to the last bit, in other company.
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "kernels/decoder/attention.h"
#include "tests/unit/kernels_device.h"

namespace dorad::kernels {
namespace {

using Bf16 = __nv_bfloat16;
using Bits = std::vector<uint16_t>;

// Rows [first, first + rows) of one sequence, by position.
struct Run {
  int first = 0;
  int rows = 1;
};

struct Case {
  std::string name;
  AttentionShape shape;
  int window = 0;
  std::vector<Run> runs;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

// A step on the device, with every sequence's whole cache.
class Step {
 public:
  Step(const Case& c, uint32_t seed) : case_(c) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    int pages = 3;
    std::vector<int32_t> lengths;
    for (const Run& run : c.runs) {
      lengths.push_back(run.first + run.rows);
      pages += (lengths.back() + kKvPageTokens - 1) / kKvPageTokens;
    }
    std::vector<int32_t> shuffled(pages);
    std::iota(shuffled.begin(), shuffled.end(), 0);
    std::shuffle(shuffled.begin(), shuffled.end(), random);

    const auto [heads, kv_heads, dim] = c.shape;
    const Bf16 nan = __float2bfloat16(NAN);
    k_.assign(int64_t{pages} * kv_heads * kKvPageTokens * dim, nan);
    v_ = k_;
    for (size_t s = 0; s < c.runs.size(); ++s) {
      page_begin_.push_back(static_cast<int32_t>(pages_.size()));
      for (int at = 0; at < lengths[s]; at += kKvPageTokens) {
        pages_.push_back(shuffled.back());
        shuffled.pop_back();
      }
      // Past queries of the run, no sequence has keys.
      for (int position = 0; position < lengths[s]; ++position) {
        for (int head = 0; head < kv_heads; ++head) {
          const int64_t at = At(static_cast<int>(s), position, head);
          for (int d = 0; d < dim; ++d) {
            k_[at + d] = __float2bfloat16(normal(random));
            v_[at + d] = __float2bfloat16(normal(random));
          }
        }
      }
      for (int row = 0; row < c.runs[s].rows; ++row) {
        sequences_.push_back(static_cast<int32_t>(s));
        positions_.push_back(c.runs[s].first + row);
        for (int i = 0; i < heads * dim; ++i) {
          // Now and then scores that leave no room for other positions.
          q_.push_back(__float2bfloat16(normal(random) * (row % 7 == 3 ? 4.0f : 1.0f)));
        }
      }
    }
    device_k_ = std::make_unique<DeviceBuffer<Bf16>>(k_);
    device_v_ = std::make_unique<DeviceBuffer<Bf16>>(v_);
    device_pages_ = std::make_unique<DeviceBuffer<int32_t>>(pages_);
    device_page_begin_ = std::make_unique<DeviceBuffer<int32_t>>(page_begin_);
  }

  int rows() const { return static_cast<int>(positions_.size()); }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(case_.shape.head_dim)); }

  struct How {
    bool simple = false;
    bool row_tiles = true;
    AttentionSplit split = AttentionSplit::kByLoad;
    size_t workspace = ~size_t{0};  // bytes at most
  };
  // Of the rows named, in that order.
  void Compute(const std::vector<int>& which, const How& how, Bits* out) const {
    const auto [heads, kv_heads, dim] = case_.shape;
    const int64_t width = int64_t{heads} * dim;
    std::vector<int32_t> positions, sequences;
    std::vector<Bf16> q;
    for (const int row : which) {
      positions.push_back(positions_[row]);
      sequences.push_back(sequences_[row]);
      q.insert(q.end(), q_.begin() + row * width, q_.begin() + (row + 1) * width);
    }
    DeviceBuffer<int32_t> device_positions(positions), device_sequences(sequences);
    DeviceBuffer<Bf16> device_q(q), device_out(q.size());
    const int rows = static_cast<int>(which.size());
    const size_t bytes = std::min(how.workspace, AttentionWorkspaceBytes(case_.shape, rows, 4096));
    DeviceBuffer<char> workspace(std::max<size_t>(bytes, 1));

    PagedAttentionParams params;
    params.rows = {rows,
                   nullptr,
                   device_positions.get(),
                   device_sequences.get(),
                   device_page_begin_->get(),
                   device_pages_->get()};
    params.shape = case_.shape;
    params.q = device_q.get();
    params.cache = {device_k_->get(), device_v_->get()};
    params.softmax_scale = scale();
    params.window = case_.window;
    params.row_tiles = how.row_tiles;
    params.out = device_out.get();
    if (!how.simple && bytes > 0) {
      params.workspace = {workspace.get(), bytes, rows};
      AttentionPlanParams plan;
      plan.rows = params.rows;
      plan.shape = params.shape;
      plan.window = params.window;
      plan.row_tiles = how.row_tiles;
      plan.split = how.split;
      plan.workspace = params.workspace;
      DORAD_ASSERT_CUDA(PlanAttention(plan, nullptr));
      // As layers do: more than one launch for a plan.
      DORAD_ASSERT_CUDA(PagedAttention(params, nullptr));
      cudaMemsetAsync(device_out.get(), 0xFF, q.size() * sizeof(Bf16), nullptr);
    }
    DORAD_ASSERT_CUDA(PagedAttention(params, nullptr));
    DORAD_ASSERT_CUDA(cudaDeviceSynchronize());
    const std::vector<Bf16> values = device_out.Read();
    out->resize(values.size());
    std::memcpy(out->data(), values.data(), values.size() * sizeof(Bf16));
  }

  std::vector<int> All() const {
    std::vector<int> rows_of(rows());
    std::iota(rows_of.begin(), rows_of.end(), 0);
    return rows_of;
  }

  // Of one row: ‖out - reference‖ / ‖reference‖, the worst of its heads.
  double Error(int row, const uint16_t* out) const {
    const auto [heads, kv_heads, dim] = case_.shape;
    const int position = positions_[row];
    const int begin = case_.window > 0 ? std::max(0, position - case_.window + 1) : 0;
    double worst = 0.0;
    for (int head = 0; head < heads; ++head) {
      const Bf16* q = q_.data() + (int64_t{row} * heads + head) * dim;
      std::vector<double> scores;
      for (int j = begin; j <= position; ++j) {
        const Bf16* k = k_.data() + At(sequences_[row], j, head / (heads / kv_heads));
        double dot = 0.0;
        for (int d = 0; d < dim; ++d) {
          dot += double{__bfloat162float(q[d])} * double{__bfloat162float(k[d])};
        }
        scores.push_back(dot * static_cast<double>(scale()));
      }
      const double most = *std::max_element(scores.begin(), scores.end());
      std::vector<double> sum(dim, 0.0);
      double total = 0.0;
      for (int j = begin; j <= position; ++j) {
        const double weight = std::exp(scores[j - begin] - most);
        total += weight;
        const Bf16* v = v_.data() + At(sequences_[row], j, head / (heads / kv_heads));
        for (int d = 0; d < dim; ++d) sum[d] += weight * double{__bfloat162float(v[d])};
      }
      double difference = 0.0, size = 0.0;
      for (int d = 0; d < dim; ++d) {
        const Bf16 got = __ushort_as_bfloat16(out[head * dim + d]);
        const double reference = sum[d] / total;
        difference += std::pow(double{__bfloat162float(got)} - reference, 2);
        size += reference * reference;
      }
      const double error = std::sqrt(difference / size);
      if (!(error <= worst)) worst = error;
    }
    return worst;
  }

 private:
  int64_t At(int sequence, int position, int kv_head) const {
    const int64_t page = pages_[page_begin_[sequence] + position / kKvPageTokens];
    return ((page * case_.shape.kv_heads + kv_head) * kKvPageTokens + position % kKvPageTokens) *
           case_.shape.head_dim;
  }

  const Case case_;
  std::vector<Bf16> k_, v_, q_;
  std::vector<int32_t> pages_, page_begin_, positions_, sequences_;
  std::unique_ptr<DeviceBuffer<Bf16>> device_k_, device_v_;
  std::unique_ptr<DeviceBuffer<int32_t>> device_pages_, device_page_begin_;
};

class AttentionTest : public KernelTest, public testing::WithParamInterface<Case> {};

TEST_P(AttentionTest, IsTheSoftmaxAverage) {
  const Step step(GetParam(), 1);
  const int64_t width = int64_t{GetParam().shape.heads} * GetParam().shape.head_dim;
  for (const bool simple : {true, false}) {
    Bits out;
    step.Compute(step.All(), {.simple = simple}, &out);
    if (HasFatalFailure()) return;
    // Long runs: the rows at borders, and some others.
    for (int row = 0; row<step.rows(); row += step.rows()> 64 && row % 64 > 2 ? 5 : 1) {
      // Rounded probabilities and outputs: 2^-9 each at most, mostly far less.
      ASSERT_LT(step.Error(row, out.data() + row * width), 4e-3)
          << "row " << row << (simple ? " simple" : "");
    }
  }
}

TEST_P(AttentionTest, RowsAreTheSameInAnyCompany) {
  const Step step(GetParam(), 2);
  const int64_t width = int64_t{GetParam().shape.heads} * GetParam().shape.head_dim;
  Bits whole;
  step.Compute(step.All(), {}, &whole);
  const Step::How hows[] = {
      {.row_tiles = false},
      {.split = AttentionSplit::kAlways},
      {.row_tiles = false, .split = AttentionSplit::kAlways},
      {.row_tiles = false, .split = AttentionSplit::kNever},
      // Room for some parts only.
      {.row_tiles = false,
       .split = AttentionSplit::kAlways,
       .workspace = AttentionWorkspaceBytes(GetParam().shape, step.rows(), 128) + 100000},
  };
  for (size_t i = 0; i < std::size(hows); ++i) {
    Bits other;
    step.Compute(step.All(), hows[i], &other);
    if (HasFatalFailure()) return;
    int different = 0, first = -1;
    for (size_t at = 0; at < whole.size(); ++at) {
      if (whole[at] == other[at]) continue;
      if (first < 0) first = static_cast<int>(at / width);
      ++different;
    }
    EXPECT_EQ(different, 0) << "way " << i << ", first in row " << first;
  }
  // Each alone, and in reverse order.
  std::vector<int> reversed = step.All();
  std::reverse(reversed.begin(), reversed.end());
  Bits backwards;
  step.Compute(reversed, {}, &backwards);
  for (int row = 0; row < step.rows(); row += std::max(1, step.rows() / 16)) {
    Bits alone;
    step.Compute({row}, {}, &alone);
    if (HasFatalFailure()) return;
    const auto begin = whole.begin() + row * width;
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), begin)) << "row " << row;
    EXPECT_TRUE(
        std::equal(alone.begin(), alone.end(), backwards.begin() + (step.rows() - 1 - row) * width))
        << "row " << row;
  }
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  // Contexts at the borders of pages, tiles and chunks.
  const std::vector<Run> borders = {{0},   {1},   {15},  {16},  {63},  {64},  {65},  {127},
                                    {128}, {191}, {255}, {256}, {300}, {383}, {384}, {655}};
  cases.push_back({"qwen3", {32, 8, 128}, 0, borders});
  cases.push_back({"one_row", {32, 8, 128}, 0, {{700}}});
  cases.push_back({"first_position", {32, 8, 128}, 0, {{0}}});
  cases.push_back({"long", {8, 2, 128}, 0, {{3000}, {17}, {2047}}});
  for (const int group : {1, 2, 3, 5, 6, 7, 8, 9, 12, 16, 20}) {
    cases.push_back(
        {"group_" + std::to_string(group), {2 * group, 2, 128}, 0, {{5}, {333}, {128}}});
  }
  for (const int dim : {16, 64, 80, 96, 256}) {
    cases.push_back({"dim_" + std::to_string(dim), {6, 2, dim}, 0, borders});
    cases.push_back({"wide_dim_" + std::to_string(dim), {12, 1, dim}, 0, {{5}, {333}, {128}}});
    cases.push_back(
        {"dim_" + std::to_string(dim) + "_runs", {6, 2, dim}, 0, {{0, 150}, {77}, {130, 60}}});
  }
  for (const int window : {1, 16, 100, 128, 500}) {
    cases.push_back({"window_" + std::to_string(window), {8, 2, 128}, window, borders});
    cases.push_back({"window_" + std::to_string(window) + "_runs",
                     {8, 2, 128},
                     window,
                     {{0, 200}, {600}, {250, 70}}});
  }
  cases.push_back({"prefill", {8, 2, 128}, 0, {{0, 300}}});
  cases.push_back({"prefill_group_1", {2, 2, 128}, 0, {{0, 300}}});
  cases.push_back({"prefill_group_7", {14, 2, 128}, 0, {{0, 100}, {40, 50}}});
  cases.push_back({"prefill_group_16", {16, 1, 128}, 0, {{0, 100}, {40, 50}}});
  cases.push_back({"later_chunk", {8, 2, 128}, 0, {{517, 130}}});
  cases.push_back({"mixed",
                   {32, 8, 128},
                   0,
                   {{100}, {0, 64}, {655}, {90, 40}, {7, 5}, {256, 33}, {64, 16}, {130}}});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Shapes, AttentionTest, testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

using AttentionEdges = KernelTest;

TEST_F(AttentionEdges, RefusesWhatItCannotHold) {
  PagedAttentionParams params;
  params.rows.rows = 1;
  params.shape = {6, 4, 128};
  EXPECT_EQ(PagedAttention(params, nullptr), cudaErrorInvalidValue);
  params.shape = {4, 4, 258};
  EXPECT_EQ(PagedAttention(params, nullptr), cudaErrorInvalidValue);
  AttentionPlanParams plan;
  plan.rows.rows = 1000;
  plan.shape = {4, 4, 128};
  DeviceBuffer<char> small(1000);
  plan.workspace = {small.get(), 1000, 1000};
  EXPECT_EQ(PlanAttention(plan, nullptr), cudaErrorInvalidValue);
}

// Norm, rotation and append against fp64, values passed through, and nothing else touched.
TEST_F(AttentionEdges, RopeAppendWritesQueriesAndTheCache) {
  for (const AttentionShape shape :
       {AttentionShape{32, 8, 128}, {6, 2, 80}, {3, 3, 96}, {4, 1, 256}, {9, 3, 64}, {2, 1, 18}}) {
    for (const bool has_norm : {true, false}) {
      for (const int rows : {1, 5, 200}) {
        const auto [heads, kv_heads, dim] = shape;
        const int all = heads + 2 * kv_heads, half = dim / 2;
        std::mt19937 random(rows);
        std::normal_distribution<float> normal;
        std::vector<Bf16> qkv(int64_t{rows} * all * dim);
        std::vector<float> q_norm(dim), k_norm(dim);
        for (Bf16& x : qkv) x = __float2bfloat16(normal(random));
        for (float& x : q_norm) x = normal(random);
        for (float& x : k_norm) x = normal(random);
        std::vector<int32_t> positions, sequences, page_begin, pages;
        for (int r = 0; r < rows; ++r) {
          positions.push_back((r * 7 + 3) % 48);
          sequences.push_back(r);
          page_begin.push_back(3 * r);
          for (int i = 0; i < 3; ++i) pages.push_back(3 * (rows - 1 - r) + (i + 1) % 3);
        }
        std::vector<float> cos(48 * half), sin(48 * half);
        for (size_t i = 0; i < cos.size(); ++i) {
          cos[i] = std::cos(0.1f * static_cast<float>(i));
          sin[i] = std::sin(0.1f * static_cast<float>(i));
        }
        DeviceBuffer<Bf16> d_qkv(qkv);
        DeviceBuffer<float> d_q_norm(q_norm), d_k_norm(k_norm), d_cos(cos), d_sin(sin);
        DeviceBuffer<int32_t> d_positions(positions), d_sequences(sequences),
            d_page_begin(page_begin), d_pages(pages);
        const int64_t plane = int64_t{3} * rows * kv_heads * kKvPageTokens * dim;
        DeviceBuffer<Bf16> d_q(int64_t{rows} * heads * dim), d_k(plane), d_v(plane);
        RopeAppendParams params;
        params.rows = {
            rows, nullptr, d_positions.get(), d_sequences.get(), d_page_begin.get(), d_pages.get()};
        params.shape = shape;
        params.qkv = d_qkv.get();
        params.q_norm = has_norm ? d_q_norm.get() : nullptr;
        params.k_norm = has_norm ? d_k_norm.get() : nullptr;
        params.eps = 1e-6f;
        params.cos = d_cos.get();
        params.sin = d_sin.get();
        params.q = d_q.get();
        params.cache = {d_k.get(), d_v.get()};
        DORAD_ASSERT_CUDA(RopeAppend(params, nullptr));
        DORAD_ASSERT_CUDA(cudaDeviceSynchronize());
        const auto q = d_q.Read(), k = d_k.Read(), v = d_v.Read();
        int64_t written = 0;
        for (const Bf16 x : k) written += !std::isnan(__bfloat162float(x));
        EXPECT_EQ(written, int64_t{rows} * kv_heads * dim);
        for (int r = 0; r < rows; ++r) {
          const int position = positions[r];
          const int64_t page = pages[page_begin[r] + position / kKvPageTokens];
          for (int head = 0; head < all; ++head) {
            const Bf16* const row = qkv.data() + (int64_t{r} * all + head) * dim;
            const auto x = [row](int i) { return double{__bfloat162float(row[i])}; };
            const bool is_query = head < heads;
            const int kv_head = (head - heads) % kv_heads;
            const int64_t at =
                is_query
                    ? (int64_t{r} * heads + head) * dim
                    : ((page * kv_heads + kv_head) * kKvPageTokens + position % kKvPageTokens) *
                          dim;
            const Bf16* got = (is_query ? q : head < heads + kv_heads ? k : v).data() + at;
            double squares = 0.0;
            for (int i = 0; i < dim; ++i) squares += x(i) * x(i);
            const double scale = has_norm ? 1.0 / std::sqrt(squares / dim + 1e-6) : 1.0;
            const std::vector<float>& norm = is_query ? q_norm : k_norm;
            for (int i = 0; i < dim; ++i) {
              double expected = x(i);
              if (head < heads + kv_heads) {
                const auto value = [&](int at_dim) {
                  return x(at_dim) * (has_norm ? scale * double{norm[at_dim]} : 1.0);
                };
                const double c = double{cos[position * half + i % half]};
                const double s = double{sin[position * half + i % half]};
                expected = i < half ? value(i) * c - value(i + half) * s
                                    : value(i) * c + value(i - half) * s;
              }
              ASSERT_NEAR(double{__bfloat162float(got[i])}, expected,
                          std::abs(expected) * 0.004 + 1e-5)
                  << dim << " row " << r << " head " << head << " dim " << i;
            }
          }
        }
      }
    }
  }
}

// The same bits in the output and all over the cache as by RopeAppend and PagedAttention.
TEST_F(AttentionEdges, AppendAttentionIsBothInOne) {
  const std::vector<int> lengths = {1, 2, 16, 17, 63, 64, 65, 128, 129, 300, 656, 1500};
  for (const AttentionShape shape : {AttentionShape{32, 8, 128},
                                     {6, 2, 80},
                                     {3, 3, 96},
                                     {4, 1, 256},
                                     {9, 3, 64},
                                     {16, 1, 128},
                                     {2, 1, 18}}) {
    for (const bool has_norm : {true, false}) {
      const int window = has_norm ? 0 : 100;
      for (const size_t rows : {size_t{1}, lengths.size(), size_t{90}}) {
        const auto [heads, kv_heads, dim] = shape;
        const int all = heads + 2 * kv_heads, half = dim / 2;
        std::mt19937 random(static_cast<uint32_t>(rows) + dim);
        std::normal_distribution<float> normal;
        std::vector<int32_t> positions, sequences, page_begin, pages;
        for (size_t r = 0; r < rows; ++r) {
          const int length = rows == 1 ? 656 : lengths[r % lengths.size()];
          positions.push_back(length - 1);
          sequences.push_back(static_cast<int32_t>(r));
          page_begin.push_back(static_cast<int32_t>(pages.size()));
          for (int at = 0; at < length; at += kKvPageTokens) {
            pages.push_back(static_cast<int32_t>(pages.size()));
          }
        }
        std::shuffle(pages.begin(), pages.end(), random);
        const auto normals = [&](int64_t size) {
          std::vector<float> values(size);
          for (float& x : values) x = normal(random);
          return values;
        };
        const auto rounded = [&](int64_t size) {
          std::vector<Bf16> values(size);
          for (Bf16& x : values) x = __float2bfloat16(normal(random));
          return values;
        };
        const int64_t plane = static_cast<int64_t>(pages.size()) * kv_heads * kKvPageTokens * dim;
        const std::vector<Bf16> cache = rounded(plane);
        const DeviceBuffer<Bf16> qkv(rounded(static_cast<int64_t>(rows) * all * dim));
        const DeviceBuffer<Bf16> other_qkv(rounded(static_cast<int64_t>(rows) * all * dim));
        const DeviceBuffer<float> q_norm(normals(dim)), k_norm(normals(dim)),
            cos(normals(int64_t{1500} * half)), sin(normals(int64_t{1500} * half));
        const DeviceBuffer<int32_t> d_positions(positions), d_sequences(sequences),
            d_page_begin(page_begin), d_pages(pages);
        const size_t bytes = AttentionWorkspaceBytes(shape, static_cast<int32_t>(rows), 1500);
        const DeviceBuffer<char> workspace(std::max<size_t>(bytes, 1));
        std::vector<std::vector<Bf16>> results;
        for (const bool in_one : {false, true}) {
          for (const AttentionSplit split : {AttentionSplit::kByLoad, AttentionSplit::kAlways}) {
            const DeviceBuffer<Bf16> k(cache), v(cache), q(rows * heads * dim),
                out(rows * heads * dim);
            RopeAppendParams append;
            append.rows = {static_cast<int32_t>(rows), nullptr,
                           d_positions.get(),          d_sequences.get(),
                           d_page_begin.get(),         d_pages.get()};
            append.shape = shape;
            append.q_norm = has_norm ? q_norm.get() : nullptr;
            append.k_norm = has_norm ? k_norm.get() : nullptr;
            append.eps = 1e-6f;
            append.cos = cos.get();
            append.sin = sin.get();
            append.q = q.get();
            append.cache = {k.get(), v.get()};
            AttentionPlanParams plan;
            plan.rows = append.rows;
            plan.shape = shape;
            plan.window = window;
            plan.row_tiles = false;
            plan.split = split;
            plan.workspace = {bytes == 0 ? nullptr : workspace.get(), bytes,
                              static_cast<int32_t>(rows)};
            DORAD_ASSERT_CUDA(PlanAttention(plan, nullptr));
            PagedAttentionParams params;
            params.rows = append.rows;
            params.shape = shape;
            params.q = q.get();
            params.cache = append.cache;
            params.softmax_scale = 0.1f;
            params.window = window;
            params.row_tiles = false;
            params.workspace = plan.workspace;
            params.out = out.get();
            // The second time, nothing of the first may be left.
            for (const auto* input : {&other_qkv, &qkv}) {
              append.qkv = input->get();
              if (in_one) {
                DORAD_ASSERT_CUDA(AppendAttention(append, params, nullptr));
              } else {
                DORAD_ASSERT_CUDA(RopeAppend(append, nullptr));
                DORAD_ASSERT_CUDA(PagedAttention(params, nullptr));
              }
            }
            DORAD_ASSERT_CUDA(cudaDeviceSynchronize());
            std::vector<Bf16> result = out.Read();
            for (const auto* buffer : {&k, &v}) {
              const std::vector<Bf16> values = buffer->Read();
              result.insert(result.end(), values.begin(), values.end());
            }
            results.push_back(std::move(result));
          }
        }
        for (size_t i = 1; i < results.size(); ++i) {
          ASSERT_EQ(
              std::memcmp(results[i].data(), results[0].data(), results[0].size() * sizeof(Bf16)),
              0)
              << "head_dim " << dim << ", " << rows << " rows, norm " << has_norm << ", window "
              << window << ", way " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace dorad::kernels
