#include "server/backends/cpu/ops/attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "server/backends/cpu/simd/backend.h"
#include "server/backends/cpu/simd/kernels.h"
#include "server/backends/cpu/simd/parallel.h"
#include "server/platform/check.h"

namespace dorad::ops {
namespace {

static_assert(kPageTokens == cpu::kPageSize);

void CheckHeads(const at::Tensor& t, int64_t rows, int64_t head_dim) {
  DORAD_CHECK(t.scalar_type() == at::kFloat && t.dim() == 3 && t.is_contiguous());
  DORAD_CHECK(t.size(0) == rows && t.size(2) == head_dim);
}

void CheckPages(const PagedKv& kv, int64_t kv_heads, int64_t head_dim) {
  const at::ScalarType type = kv.k.scalar_type();
  DORAD_CHECK(type == at::kFloat || type == at::kBFloat16);
  DORAD_CHECK(kv.v.scalar_type() == type && kv.k.is_contiguous() && kv.v.is_contiguous());
  const int64_t pages = kv.k.size(0);
  DORAD_CHECK(kv.k.sizes() == at::IntArrayRef({pages, kv_heads, head_dim, kPageTokens}));
  DORAD_CHECK(kv.v.sizes() == at::IntArrayRef({pages, kv_heads, kPageTokens, head_dim}));
}

// window: of the rows' reach back; 1: they see themselves alone.
void CheckSequences(absl::Span<const SequenceRows> sequences, int64_t rows, int64_t pages,
                    int64_t window) {
  for (const SequenceRows& s : sequences) {
    DORAD_CHECK(s.row_begin >= 0 && s.count >= 0 && s.row_begin + s.count <= rows);
    DORAD_CHECK(s.position >= 0);
    DORAD_CHECK(s.rotary.empty() || static_cast<int64_t>(s.rotary.size()) == s.count);
    DORAD_CHECK(s.reach.empty() || static_cast<int64_t>(s.reach.size()) == s.count);
    for (size_t i = 0; i < s.reach.size(); ++i) {
      DORAD_CHECK(s.reach[i] >= s.position + static_cast<int64_t>(i));
      DORAD_CHECK(s.reach[i] < s.position + s.count && (i == 0 || s.reach[i - 1] <= s.reach[i]));
    }
    const int64_t used = (s.position + s.count + kPageTokens - 1) / kPageTokens;
    DORAD_CHECK(static_cast<int64_t>(s.pages.size()) >= used);
    const int64_t first = window > 0 ? std::max<int64_t>(0, s.position - window + 1) : 0;
    for (int64_t p = first / kPageTokens; p < used; ++p) {
      DORAD_CHECK(s.pages[p] >= 0 && s.pages[p] < pages);
    }
  }
}

// Writes one row's keys and values into its page. The row's keys become a column of the page.
template <typename T>
void StoreRow(const T* k, const T* v, int64_t kv_heads, int64_t head_dim, int64_t page,
              int64_t offset, PagedKv& kv) {
  const int64_t stride = head_dim * kPageTokens;
  T* k_page = static_cast<T*>(kv.k.data_ptr()) + page * kv_heads * stride;
  T* v_page = static_cast<T*>(kv.v.data_ptr()) + page * kv_heads * stride;
  for (int64_t h = 0; h < kv_heads; ++h) {
    for (int64_t d = 0; d < head_dim; ++d) {
      k_page[h * stride + d * kPageTokens + offset] = k[h * head_dim + d];
    }
    std::memcpy(v_page + h * stride + offset * head_dim, v + h * head_dim, head_dim * sizeof(T));
  }
}

// The cos and sin of one row's pairs.
class RowAngles {
 public:
  explicit RowAngles(const RopeTable& table)
      : axes_(table.axes),
        cos_(table.cos.const_data_ptr<float>()),
        sin_(table.sin.const_data_ptr<float>()),
        half_(table.cos.size(1)),
        own_(2 * half_) {}

  void MoveTo(const SequenceRows& sequence, int64_t row) {
    const int64_t position = sequence.position + row;
    const std::array<int64_t, 3> rotary = sequence.rotary.empty()
                                              ? std::array<int64_t, 3>{position, position, position}
                                              : sequence.rotary[static_cast<size_t>(row)];
    row_cos_ = cos_ + rotary[0] * half_;
    row_sin_ = sin_ + rotary[0] * half_;
    if (axes_.empty() || (rotary[1] == rotary[0] && rotary[2] == rotary[0])) return;
    for (int64_t i = 0; i < half_; ++i) {
      const int64_t from = rotary[axes_[static_cast<size_t>(i)]] * half_ + i;
      own_[i] = cos_[from];
      own_[half_ + i] = sin_[from];
    }
    row_cos_ = own_.data();
    row_sin_ = own_.data() + half_;
  }

  void Rotate(float* heads, int64_t count, int64_t head_dim) const {
    for (int64_t h = 0; h < count; ++h) {
      cpu::ActiveKernels().rotate(heads + h * head_dim, row_cos_, row_sin_, half_);
    }
  }

 private:
  absl::Span<const uint8_t> axes_;
  const float* const cos_;
  const float* const sin_;
  const int64_t half_;
  std::vector<float> own_;
  const float* row_cos_ = nullptr;
  const float* row_sin_ = nullptr;
};

}  // namespace

PagedKv AllocatePagedKv(int64_t pages, int64_t kv_heads, int64_t head_dim, ComputeDType compute) {
  const at::ScalarType type = compute == ComputeDType::kBF16 ? at::kBFloat16 : at::kFloat;
  return {at::empty({pages, kv_heads, head_dim, kPageTokens}, type),
          at::empty({pages, kv_heads, kPageTokens, head_dim}, type)};
}

void RopeAndAppend(at::Tensor& q_THD, at::Tensor& k_TKD, const at::Tensor& v_TKD,
                   const RopeTable& rope, absl::Span<const SequenceRows> sequences, PagedKv& kv) {
  const int64_t rows = q_THD.size(0);
  const int64_t heads = q_THD.size(1);
  const int64_t kv_heads = k_TKD.size(1);
  const int64_t dim = q_THD.size(2);
  CheckHeads(q_THD, rows, dim);
  CheckHeads(k_TKD, rows, dim);
  CheckHeads(v_TKD, rows, dim);
  DORAD_CHECK(v_TKD.size(1) == kv_heads && dim % 2 == 0);
  CheckPages(kv, kv_heads, dim);
  CheckSequences(sequences, rows, kv.k.size(0), /*window=*/1);
  for (const at::Tensor& t : {rope.cos, rope.sin}) {
    DORAD_CHECK(t.scalar_type() == at::kFloat && t.is_contiguous() && t.dim() == 2);
    DORAD_CHECK(t.size(1) <= dim / 2);
    for (const SequenceRows& s : sequences) {
      DORAD_CHECK(s.position + s.count <= t.size(0));
      for (const std::array<int64_t, 3>& row : s.rotary) {
        for (const int64_t position : row) DORAD_CHECK(position >= 0 && position < t.size(0));
      }
    }
  }
  const cpu::Kernels& kernels = cpu::ActiveKernels();
  float* q = q_THD.mutable_data_ptr<float>();
  float* k = k_TKD.mutable_data_ptr<float>();
  const float* v = v_TKD.const_data_ptr<float>();
  const bool bf16 = kv.k.scalar_type() == at::kBFloat16;
  const int64_t kv_size = kv_heads * dim;
  for (const SequenceRows& s : sequences) {
    cpu::ForRows(s.count, (heads + 4 * kv_heads) * dim, [&](int64_t begin, int64_t end) {
      std::vector<uint16_t> rounded(bf16 ? 2 * kv_size : 0);
      RowAngles angles(rope);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t position = s.position + i;
        const int64_t page = s.pages[position / kPageTokens];
        const int64_t offset = position % kPageTokens;
        float* q_row = q + (s.row_begin + i) * heads * dim;
        float* k_row = k + (s.row_begin + i) * kv_size;
        const float* v_row = v + (s.row_begin + i) * kv_size;
        angles.MoveTo(s, i);
        angles.Rotate(q_row, heads, dim);
        angles.Rotate(k_row, kv_heads, dim);
        if (bf16) {
          kernels.to_bf16(k_row, kv_size, rounded.data());
          kernels.to_bf16(v_row, kv_size, rounded.data() + kv_size);
          StoreRow<uint16_t>(rounded.data(), rounded.data() + kv_size, kv_heads, dim, page, offset,
                             kv);
        } else {
          StoreRow<float>(k_row, v_row, kv_heads, dim, page, offset, kv);
        }
      }
    });
  }
}

at::Tensor PagedAttention(const at::Tensor& q_THD, const PagedKv& kv,
                          absl::Span<const SequenceRows> sequences, double softmax_scale,
                          int64_t window) {
  CheckHeads(q_THD, q_THD.size(0), q_THD.size(2));
  DORAD_CHECK(kv.k.dim() == 4 && window >= 0);
  CheckPages(kv, kv.k.size(1), q_THD.size(2));
  DORAD_CHECK(kv.k.size(1) > 0 && q_THD.size(1) % kv.k.size(1) == 0);
  CheckSequences(sequences, q_THD.size(0), kv.k.size(0), window);
  at::Tensor out = at::empty_like(q_THD);
  cpu::PagedAttention(q_THD, kv, sequences, static_cast<float>(softmax_scale), window, out);
  return out;
}

}  // namespace dorad::ops
