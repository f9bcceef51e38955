// Appending to the cache: norm, rotation and attention in one kernel or in two.
#include "tests/unit/kernels/attention_step.h"

namespace dorad::kernels {
namespace {

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
  // No cache in eight bits for other shapes, or parts of heads that no pairs turn.
  EXPECT_FALSE(HasFp8Attention({4, 4, 80}, 80));
  EXPECT_FALSE(HasFp8Attention({17, 1, 128}, 128));
  EXPECT_FALSE(HasFp8Attention({4, 4, 256}, 160));
  EXPECT_TRUE(HasFp8Attention({4, 4, 256}, 64));
  params.shape = {4, 4, 80};
  params.cache.factors = reinterpret_cast<Bf16*>(small.get());
  EXPECT_EQ(PagedAttention(params, nullptr), cudaErrorInvalidValue);
}

// A projection's heads, and the part of them that turns.
struct Heads {
  AttentionShape shape;
  int width = 0;
  bool has_gates = false;

  int turned() const { return width == 0 ? shape.head_dim : width; }
  // Of a row.
  int all() const { return (has_gates ? 2 : 1) * shape.heads + 2 * shape.kv_heads; }
  // The place in a row of a query, key or value head.
  int At(int head) const {
    return head + (has_gates ? std::min(head, static_cast<int>(shape.heads)) : 0);
  }
};

// Norm, rotation and append against fp64, values passed through, and nothing else touched.
TEST_F(AttentionEdges, RopeAppendWritesQueriesAndTheCache) {
  for (const Heads& of : {Heads{{32, 8, 128}},
                          {{6, 2, 80}},
                          {{3, 3, 96}},
                          {{4, 1, 256}},
                          {{9, 3, 64}},
                          {{2, 1, 18}},
                          {{6, 2, 256}, 64, true},
                          {{4, 1, 256}, 128},
                          {{6, 2, 128}, 64, true},
                          {{2, 1, 16}, 8, true},
                          {{2, 1, 16}, 12},
                          {{4, 2, 24}, 6, true},
                          {{2, 1, 18}, 10, true}}) {
    for (const bool has_norm : {true, false}) {
      for (const int rows : {1, 5, 200}) {
        const auto [heads, kv_heads, dim] = of.shape;
        const int all = heads + 2 * kv_heads, half = of.turned() / 2;
        std::mt19937 random(rows);
        std::normal_distribution<float> normal;
        std::vector<Bf16> qkv(int64_t{rows} * of.all() * dim);
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
        params.shape = of.shape;
        params.width = of.width;
        params.has_gates = of.has_gates;
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
            const Bf16* const row = qkv.data() + (int64_t{r} * of.all() + of.At(head)) * dim;
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
              const auto value = [&](int at_dim) {
                return x(at_dim) * (has_norm ? scale * double{norm[at_dim]} : 1.0);
              };
              double expected = head < heads + kv_heads ? value(i) : x(i);
              if (head < heads + kv_heads && i < of.turned()) {
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

// Codes and factors stand for what is written in bf16.
TEST_F(AttentionEdges, RopeAppendRoundsToEightBits) {
  for (const AttentionShape& shape :
       {AttentionShape{6, 2, 128}, AttentionShape{3, 3, 64}, AttentionShape{2, 1, 256}}) {
    for (const int rows : {3, 100}) {  // few and many: by one head and by four
      const auto [heads, kv_heads, dim] = shape;
      const int all = heads + 2 * kv_heads;
      std::mt19937 random(dim);
      std::normal_distribution<float> normal;
      std::vector<Bf16> qkv(int64_t{rows} * all * dim);
      for (size_t i = 0; i < qkv.size(); ++i) {
        const auto head = static_cast<int>(i / dim);
        // Heads of all sizes, one of zeros, and one with a number far from the others.
        float x = normal(random) * std::exp2(static_cast<float>(head * 7 % 41 - 30));
        if (head == all - 1) x = 0.0f;
        if (head == 2 * all - 1 && i % dim == 5) x = 1e4f;
        qkv[i] = __float2bfloat16(x);
      }
      std::vector<int32_t> positions, sequences, pages;
      for (int r = 0; r < rows; ++r) {
        positions.push_back(r);
        sequences.push_back(0);
        if (r % kKvPageTokens == 0) pages.push_back(r / kKvPageTokens);
      }
      std::reverse(pages.begin(), pages.end());
      std::vector<float> cos(rows * dim / 2), sin(cos.size());
      for (size_t i = 0; i < cos.size(); ++i) {
        cos[i] = std::cos(static_cast<float>(i));
        sin[i] = std::sin(static_cast<float>(i));
      }
      const DeviceBuffer<Bf16> d_qkv(qkv), q(int64_t{rows} * heads * dim);
      const DeviceBuffer<float> d_cos(cos), d_sin(sin);
      const DeviceBuffer<int32_t> d_positions(positions), d_sequences(sequences),
          begin(std::vector<int32_t>{0}), d_pages(pages);
      const auto count = static_cast<int64_t>(pages.size());
      const DeviceBuffer<Bf16> k(count * kv_heads * kKvPageTokens * dim), v(k.size());
      Fp8Cache cache(shape, count);
      const Fp8Cache::OnDevice on_device(cache);
      RopeAppendParams params;
      params.rows = {rows,        nullptr,      d_positions.get(), d_sequences.get(),
                     begin.get(), d_pages.get()};
      params.shape = shape;
      params.qkv = d_qkv.get();
      params.cos = d_cos.get();
      params.sin = d_sin.get();
      params.q = q.get();
      for (const KvCache& to : {KvCache{k.get(), v.get()}, on_device.cache()}) {
        params.cache = to;
        DORAD_ASSERT_CUDA(RopeAppend(params, nullptr));
      }
      DORAD_ASSERT_CUDA(cudaDeviceSynchronize());
      on_device.Read(&cache);
      const std::vector<Bf16> values[] = {k.Read(), v.Read()};
      for (int r = 0; r < rows; ++r) {
        const int64_t page = pages[r / kKvPageTokens];
        const int place = r % kKvPageTokens;
        for (int head = 0; head < kv_heads; ++head) {
          for (const Kind kind : {kKey, kValue}) {
            const Bf16* const x =
                values[kind].data() + ((page * kv_heads + head) * kKvPageTokens + place) * dim;
            float most = 0.0f, most_code = 0.0f;
            for (int d = 0; d < dim; ++d) {
              most = std::max(most, std::abs(__bfloat162float(x[d])));
              const auto code = static_cast<float>(cache.Code(kind, page, head, place, d));
              most_code = std::max(most_code, std::abs(code));
            }
            EXPECT_EQ(most_code > 220.0f, most > 0.0f) << "all of the codes' range is used";
            for (int d = 0; d < dim; ++d) {
              const float want = __bfloat162float(x[d]);
              const float got = cache.Get(kind, page, head, place, d);
              // Half of a place of three bits, and bf16's own; below 2^-6 of e4m3's unit all are
              // 2^-9 apart.
              ASSERT_NEAR(got, want,
                          std::abs(want) * (1.0f / 16 + 1.0f / 256) + most / 448 * 0.004f)
                  << dim << " row " << r << " kind " << kind << " dim " << d;
            }
          }
        }
      }
    }
  }
}

using AppendAttentionTest = IsaTest;

DORAD_FOR_EACH_ISA(AppendAttentionTest);

// The same bits in the output and all over the cache as by RopeAppend and PagedAttention.
TEST_P(AppendAttentionTest, IsBothInOne) {
  const std::vector<int> lengths = {1, 2, 16, 17, 63, 64, 65, 128, 129, 300, 656, 1500};
  for (const Heads& of : {Heads{{32, 8, 128}},
                          {{6, 2, 80}},
                          {{3, 3, 96}},
                          {{4, 1, 256}},
                          {{9, 3, 64}},
                          {{16, 1, 128}},
                          {{2, 1, 18}},
                          {{6, 1, 256}, 64, true},
                          {{4, 2, 256}, 128},
                          {{4, 2, 256}, 160},
                          {{4, 1, 128}, 32, true}}) {
    for (const bool has_norm : {true, false}) {
      const int window = has_norm ? 0 : 100;
      for (const auto& [rows, is_fp8] : {std::pair(size_t{1}, false),
                                         {lengths.size(), false},
                                         {size_t{90}, false},
                                         {lengths.size(), true},
                                         {size_t{90}, true}}) {
        const auto [heads, kv_heads, dim] = of.shape;
        if (is_fp8 && !HasFp8Attention(of.shape, of.width)) continue;
        const int half = of.turned() / 2;
        std::mt19937 random(static_cast<uint32_t>(rows) + dim);
        std::normal_distribution<float> normal;
        // Rows have whole chunks in common with the one before them.
        std::vector<int32_t> positions, sequences, page_begin, pages, rotary;
        int32_t page_count = 0;
        for (size_t r = 0; r < rows; ++r) {
          rotary.insert(rotary.end(), 3, static_cast<int32_t>(random() % 1500));
          const int length = rows == 1 ? 656 : lengths[r % lengths.size()];
          const int least = r == 0 ? 0 : std::min(positions.back(), length - 1);
          positions.push_back(length - 1);
          sequences.push_back(static_cast<int32_t>(r));
          page_begin.push_back(static_cast<int32_t>(pages.size()));
          for (int at = 0; at < length; at += kKvPageTokens) {
            pages.push_back(at < least / 128 * 128 ? pages[page_begin[r - 1] + at / kKvPageTokens]
                                                   : page_count++);
          }
        }
        std::vector<int32_t> shuffled(page_count);
        std::iota(shuffled.begin(), shuffled.end(), 0);
        std::shuffle(shuffled.begin(), shuffled.end(), random);
        for (int32_t& page : pages) page = shuffled[page];
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
        const int64_t plane = int64_t{page_count} * kv_heads * kKvPageTokens * dim;
        // In eight bits: any codes.
        const std::vector<Bf16> cache = rounded(plane);
        std::vector<Bf16> factors(plane / 2);
        for (Bf16& x : factors) {
          x = __float2bfloat16(std::ldexp(1.0f, 112 + static_cast<int>(random() % 3)));
        }
        const DeviceBuffer<Bf16> qkv(rounded(static_cast<int64_t>(rows) * of.all() * dim));
        const DeviceBuffer<Bf16> other_qkv(rounded(static_cast<int64_t>(rows) * of.all() * dim));
        const DeviceBuffer<float> q_norm(normals(dim)), k_norm(normals(dim)),
            cos(normals(int64_t{1500} * half)), sin(normals(int64_t{1500} * half));
        const DeviceBuffer<int32_t> d_positions(positions), d_sequences(sequences),
            d_page_begin(page_begin), d_pages(pages), d_rotary(rotary);
        const size_t bytes = AttentionWorkspaceBytes(of.shape, static_cast<int32_t>(rows), 1500);
        const DeviceBuffer<char> workspace(std::max<size_t>(bytes, 1));
        std::vector<std::vector<Bf16>> results;
        for (const bool in_one : {false, true}) {
          for (const AttentionSplit split : {AttentionSplit::kByLoad, AttentionSplit::kAlways}) {
            const DeviceBuffer<Bf16> k(cache), v(cache), f(factors), q(rows * heads * dim),
                out(rows * heads * dim);
            RopeAppendParams append;
            append.rows = {static_cast<int32_t>(rows),
                           nullptr,
                           d_positions.get(),
                           d_sequences.get(),
                           d_page_begin.get(),
                           d_pages.get(),
                           has_norm ? nullptr : d_rotary.get()};
            append.shape = of.shape;
            append.width = of.width;
            append.has_gates = of.has_gates;
            append.q_norm = has_norm ? q_norm.get() : nullptr;
            append.k_norm = has_norm ? k_norm.get() : nullptr;
            append.eps = 1e-6f;
            append.cos = cos.get();
            append.sin = sin.get();
            append.q = q.get();
            append.cache = {k.get(), v.get(), is_fp8 ? f.get() : nullptr};
            AttentionPlanParams plan;
            plan.rows = append.rows;
            plan.shape = of.shape;
            plan.window = window;
            plan.row_tiles = false;
            plan.split = split;
            plan.shares = in_one;
            plan.isa = GetParam();
            plan.is_fp8 = is_fp8;
            plan.workspace = {bytes == 0 ? nullptr : workspace.get(), bytes,
                              static_cast<int32_t>(rows)};
            DORAD_ASSERT_CUDA(PlanAttention(plan, nullptr));
            PagedAttentionParams params;
            params.rows = append.rows;
            params.shape = of.shape;
            params.q = q.get();
            params.cache = append.cache;
            params.softmax_scale = 0.1f;
            params.window = window;
            params.row_tiles = false;
            params.shares = plan.shares;
            params.isa = GetParam();
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
            for (const auto* buffer : {&k, &v, &f}) {
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
              << "head_dim " << dim << ", width " << of.turned() << ", " << rows << " rows, norm "
              << has_norm << ", window " << window << ", fp8 " << is_fp8 << ", way " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace dorad::kernels
