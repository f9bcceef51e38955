#include "server/backends/cpu/ops/attention.h"

#include <ATen/ATen.h>

#include "tests/unit/cpu/variants.h"

namespace dorad::ops {
namespace {

struct Heads {
  int64_t q, kv, dim;
};

RopeTable MakeRope(int64_t positions, int64_t dim) {
  const at::Tensor inverse = at::pow(10000.0, -at::arange(0, dim, 2).to(at::kFloat) / dim);
  const at::Tensor angles = at::outer(at::arange(positions).to(at::kFloat), inverse);
  return {at::cos(angles).contiguous(), at::sin(angles).contiguous()};
}

at::Tensor Rotated(const at::Tensor& x_THD, const RopeTable& rope, int64_t position) {
  const int64_t half = x_THD.size(2) / 2;
  const at::Tensor x = x_THD.to(at::kDouble);
  const at::Tensor c = rope.cos.slice(0, position, position + x.size(0)).unsqueeze(1);
  const at::Tensor s = rope.sin.slice(0, position, position + x.size(0)).unsqueeze(1);
  const at::Tensor a = x.slice(2, 0, half), b = x.slice(2, half);
  return at::cat({a * c - b * s, b * c + a * s}, 2);
}

// One sequence's inputs, and its pages in a scattered order.
struct Sequence {
  at::Tensor q, k, v;
  std::vector<int32_t> pages;

  Sequence(Heads h, int64_t length, std::vector<int32_t> page_list)
      : q(at::randn({length, h.q, h.dim})),
        k(at::randn({length, h.kv, h.dim})),
        v(at::randn({length, h.kv, h.dim})),
        pages(std::move(page_list)) {}

  int64_t length() const { return q.size(0); }
};

PagedKv DirtyKv(int64_t pages, Heads h, ComputeDType compute) {
  PagedKv kv = AllocatePagedKv(pages, h.kv, h.dim, compute);
  kv.k.fill_(NAN);  // what others left behind must not matter
  kv.v.fill_(NAN);
  return kv;
}

// Rows [begin, end) of some sequences as one step.
struct Slice {
  const Sequence* sequence;
  int64_t begin, end;
};

std::vector<at::Tensor> RunStep(const std::vector<Slice>& slices, const RopeTable& rope,
                                PagedKv& kv, int64_t window,
                                const std::vector<int64_t>& reach = {}) {
  std::vector<at::Tensor> q, k, v;
  std::vector<SequenceRows> rows;
  int64_t next = 0;
  for (const Slice& s : slices) {
    q.push_back(s.sequence->q.slice(0, s.begin, s.end));
    k.push_back(s.sequence->k.slice(0, s.begin, s.end));
    v.push_back(s.sequence->v.slice(0, s.begin, s.end));
    rows.push_back({next, s.end - s.begin, s.begin, s.sequence->pages, {}, {}});
    if (!reach.empty()) rows.back().reach.assign(reach.begin() + s.begin, reach.begin() + s.end);
    next += s.end - s.begin;
  }
  at::Tensor q_all = at::cat(q).contiguous(), k_all = at::cat(k).contiguous();
  RopeAndAppend(q_all, k_all, at::cat(v).contiguous(), rope, rows, kv);
  const double scale = 1.0 / std::sqrt(static_cast<double>(q_all.size(2)));
  const at::Tensor out = PagedAttention(q_all, kv, rows, scale, window);
  std::vector<at::Tensor> parts;
  for (const SequenceRows& r : rows) {
    parts.push_back(out.slice(0, r.row_begin, r.row_begin + r.count));
  }
  return parts;
}

at::Tensor Expected(const Sequence& s, const RopeTable& rope, int64_t window, bool bf16,
                    const at::Tensor& reach = {}) {
  const int64_t n = s.length();
  const int64_t group = s.q.size(1) / s.k.size(1);
  const auto stored = [&](const at::Tensor& t) {
    return (bf16 ? t.to(at::kFloat).to(at::kBFloat16) : t)
        .to(at::kDouble)
        .repeat_interleave(group, 1)
        .transpose(0, 1);
  };
  const at::Tensor q = Rotated(s.q, rope, 0).transpose(0, 1);
  const at::Tensor k = stored(Rotated(s.k, rope, 0));
  const at::Tensor v = stored(s.v);
  at::Tensor scores = at::matmul(q, k.transpose(1, 2)) / std::sqrt(s.q.size(2));
  const at::Tensor i = at::arange(n).unsqueeze(1), j = at::arange(n).unsqueeze(0);
  at::Tensor hidden = j > (reach.defined() ? reach.unsqueeze(1) : i);
  if (window > 0) hidden = hidden | (j <= i - window);
  scores = scores.masked_fill(hidden, -INFINITY);
  return at::matmul(at::softmax(scores, -1), v).transpose(0, 1);
}

bool SameBits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return x.sizes() == y.sizes() && std::memcmp(x.data_ptr(), y.data_ptr(), x.numel() * 4) == 0;
}

std::vector<int32_t> Pages(int32_t first, int64_t tokens) {
  std::vector<int32_t> pages((tokens + kPageTokens - 1) / kPageTokens);
  std::iota(pages.rbegin(), pages.rend(), first);  // descending: not the order of memory
  return pages;
}

class AttentionTest : public VariantTest {};

// Rows [20, 52) and [70, 90) see each other.
TEST_P(AttentionTest, ARowSeesUpToItsReach) {
  at::manual_seed(4);
  std::vector<int64_t> reach(100);
  std::iota(reach.begin(), reach.end(), 0);
  std::fill(reach.begin() + 20, reach.begin() + 52, 51);
  std::fill(reach.begin() + 70, reach.begin() + 90, 89);
  for (Heads h : {Heads{4, 2, 16}, {8, 1, 24}, {14, 2, 8}}) {
    const RopeTable rope = MakeRope(100, h.dim);
    for (int64_t window : {0, 1, 8, 40}) {
      const Sequence s(h, 100, Pages(3, 100));
      PagedKv kv = DirtyKv(20, h, ComputeDType::kF32);
      const at::Tensor whole = RunStep({{&s, 0, 100}}, rope, kv, window, reach)[0];
      const at::Tensor expected = Expected(s, rope, window, false, at::tensor(reach));
      EXPECT_LT((whole - expected).abs().max().item<double>(), 3e-6) << window;
      PagedKv other = DirtyKv(20, h, ComputeDType::kF32);
      std::vector<at::Tensor> parts;
      const int64_t ends[] = {0, 7, 52, 70, 95, 100};
      for (int i = 0; i < 5; ++i) {
        parts.push_back(RunStep({{&s, ends[i], ends[i + 1]}}, rope, other, window, reach)[0]);
      }
      EXPECT_TRUE(SameBits(whole, at::cat(parts))) << window;
    }
  }
}

TEST_P(AttentionTest, AgreesWithADenseSoftmaxInDouble) {
  at::manual_seed(1);
  for (Heads h : {Heads{9, 3, 64}, {4, 4, 16}, {8, 1, 128}, {14, 2, 8}, {4, 2, 36}}) {
    const RopeTable rope = MakeRope(800, h.dim);
    for (int64_t length : {1, 15, 16, 70, 701}) {
      for (int64_t window : {0, 1, 40, 600}) {
        for (ComputeDType compute : {ComputeDType::kF32, ComputeDType::kBF16}) {
          if (length > 100 && (h.dim != 64 || compute == ComputeDType::kBF16)) continue;
          const Sequence s(h, length, Pages(3, length));
          PagedKv kv = DirtyKv(100, h, compute);
          const at::Tensor out = RunStep({{&s, 0, length}}, rope, kv, window)[0];
          const bool bf16 = compute == ComputeDType::kBF16;
          const double error = (out - Expected(s, rope, window, bf16)).abs().max().item<double>();
          // A rotated key on the edge of two bf16 values may round either way.
          EXPECT_LT(error, bf16 ? 3e-2 : 3e-6)
              << h.q << "/" << h.kv << "x" << h.dim << " length " << length << " window " << window;
        }
      }
    }
  }
}

TEST_P(AttentionTest, ChunksAndSingleTokensGiveTheSameBitsAsOnePrefill) {
  at::manual_seed(2);
  for (Heads h : {Heads{9, 3, 64}, {4, 2, 20}, {8, 1, 32}}) {
    const RopeTable rope = MakeRope(800, h.dim);
    const int64_t length = 700;
    for (int64_t window : {0, 100}) {
      const Sequence s(h, length, Pages(0, length));
      PagedKv kv = DirtyKv(80, h, ComputeDType::kF32);
      const at::Tensor whole = RunStep({{&s, 0, length}}, rope, kv, window)[0];
      for (int64_t chunk : {1, 7, 64, 513}) {
        PagedKv other = DirtyKv(80, h, ComputeDType::kF32);
        const int64_t stop = chunk == 1 ? 150 : length;
        for (int64_t begin = 0; begin < stop; begin += chunk) {
          const int64_t end = std::min(begin + chunk, stop);
          const at::Tensor part = RunStep({{&s, begin, end}}, rope, other, window)[0];
          ASSERT_TRUE(SameBits(part, whole.slice(0, begin, end)))
              << "chunk " << chunk << " at " << begin << " window " << window;
        }
      }
      // Long contexts of one token are split over partitions.
      const at::Tensor last = RunStep({{&s, length - 1, length}}, rope, kv, window)[0];
      EXPECT_TRUE(SameBits(last, whole.slice(0, length - 1, length)));
    }
  }
}

TEST_P(AttentionTest, ASequenceDoesNotDependOnTheOthersInTheBatch) {
  at::manual_seed(3);
  const Heads h{6, 2, 32};
  const RopeTable rope = MakeRope(300, h.dim);
  const Sequence a(h, 250, Pages(0, 250)), b(h, 33, Pages(20, 33)), c(h, 90, Pages(30, 90));
  PagedKv mixed = DirtyKv(40, h, ComputeDType::kBF16);
  RunStep({{&a, 0, 249}, {&c, 0, 80}}, rope, mixed, 0);
  const auto together = RunStep({{&a, 249, 250}, {&b, 0, 33}, {&c, 80, 90}}, rope, mixed, 0);
  const std::vector<Slice> slices = {{&a, 249, 250}, {&b, 0, 33}, {&c, 80, 90}};
  for (size_t i = 0; i < slices.size(); ++i) {
    PagedKv alone = DirtyKv(40, h, ComputeDType::kBF16);
    if (slices[i].begin > 0) {
      RunStep({{slices[i].sequence, 0, slices[i].begin}}, rope, alone, 0);
    }
    EXPECT_TRUE(SameBits(RunStep({slices[i]}, rope, alone, 0)[0], together[i])) << i;
  }
}

DORAD_INSTANTIATE_VARIANTS(AttentionTest);

}  // namespace
}  // namespace dorad::ops
