#include "server/backends/cpu/ops/delta.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "server/backends/cpu/simd/parallel.h"
#include "server/platform/check.h"

namespace dorad::ops {
namespace {

void CheckRows(const at::Tensor& t, int64_t rows, int64_t columns) {
  DORAD_CHECK(t.scalar_type() == at::kFloat && t.is_contiguous());
  DORAD_CHECK(t.dim() == 2 && t.size(0) == rows && t.size(1) == columns);
}

// torch.nn.functional.softplus.
float Softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// x / sqrt(sum(x^2) + eps) * scale, as transformers' l2norm has it.
void Normalise(const float* x, int64_t size, float scale, float* to) {
  constexpr float kEps = 1e-6f;
  float sum = 0.0f;
  for (int64_t i = 0; i < size; ++i) sum += x[i] * x[i];
  const float inverse = 1.0f / std::sqrt(sum + kEps);
  for (int64_t i = 0; i < size; ++i) to[i] = x[i] * inverse * scale;
}

// copy(block, at, count) for the blocks of the convolution's rows: each has `count` of their
// elements, from `at` on.
template <typename Copy>
void ForRowBlocks(const DeltaShape& shape, Copy copy) {
  const int64_t size = (shape.sizes.convolution - 1) * shape.sizes.qkv_size();
  for (int64_t at = 0, i = shape.state_blocks; at < size; at += shape.block_size, ++i) {
    copy(i, at, std::min(shape.block_size, size - at));
  }
}

// The rows of the convolution's state, [K - 1, C].
std::vector<float> LastRows(const DeltaRows& sequence, const DeltaShape& shape) {
  const int64_t size = (shape.sizes.convolution - 1) * shape.sizes.qkv_size();
  std::vector<float> rows(static_cast<size_t>(size), 0.0f);
  if (sequence.from.empty()) return rows;
  ForRowBlocks(shape, [&](int64_t block, int64_t at, int64_t count) {
    std::copy_n(sequence.from[block], count, rows.begin() + at);
  });
  return rows;
}

// One head's rows, with what they have in common with other columns.
struct HeadRow {
  const float* q;  // [key_dim]
  const float* k;
  const float* v;  // [value_dim]
  float* out;      // [value_dim]
  float decay;
  float beta;
};

// Columns [first, first + columns) of the head. state: [key_dim, columns].
void RunTile(const std::vector<HeadRow>& rows, int64_t first, int64_t columns, int64_t key_dim,
             float* state) {
  std::vector<float> sums(static_cast<size_t>(columns));
  for (const HeadRow& row : rows) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t d = 0; d < key_dim; ++d) {
      float* const s = state + d * columns;
      for (int64_t c = 0; c < columns; ++c) {
        s[c] *= row.decay;
        sums[c] += s[c] * row.k[d];
      }
    }
    for (int64_t c = 0; c < columns; ++c) sums[c] = (row.v[first + c] - sums[c]) * row.beta;
    float* const out = row.out + first;
    std::fill_n(out, columns, 0.0f);
    for (int64_t d = 0; d < key_dim; ++d) {
      float* const s = state + d * columns;
      for (int64_t c = 0; c < columns; ++c) {
        s[c] += row.k[d] * sums[c];
        out[c] += s[c] * row.q[d];
      }
    }
  }
}

}  // namespace

at::Tensor DeltaConvolution(const at::Tensor& qkv_TC, const at::Tensor& weight,
                            absl::Span<const DeltaRows> sequences, const DeltaShape& shape) {
  const int64_t channels = shape.sizes.qkv_size();
  const int64_t taps = shape.sizes.convolution;
  CheckRows(qkv_TC, qkv_TC.size(0), channels);
  DORAD_CHECK(weight.sizes() == at::IntArrayRef({channels, 1, taps}) && weight.is_contiguous());
  at::Tensor out = at::empty_like(qkv_TC);
  const float* const x = qkv_TC.const_data_ptr<float>();
  const float* const w = weight.const_data_ptr<float>();
  float* const y = out.mutable_data_ptr<float>();
  for (const DeltaRows& s : sequences) {
    std::vector<float> last = LastRows(s, shape);
    const auto row_at = [&](int64_t row) {  // of the sequence; below 0: before the step
      return row < 0 ? last.data() + (row + taps - 1) * channels
                     : x + (s.row_begin + row) * channels;
    };
    cpu::ForRows(s.count, taps * channels, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        float* const to = y + (s.row_begin + row) * channels;
        std::fill_n(to, channels, 0.0f);
        for (int64_t j = 0; j < taps; ++j) {
          const float* const from = row_at(row + j + 1 - taps);
          for (int64_t c = 0; c < channels; ++c) to[c] += w[c * taps + j] * from[c];
        }
        for (int64_t c = 0; c < channels; ++c) to[c] /= 1.0f + std::exp(-to[c]);
      }
    });
    std::vector<float> kept;
    for (int64_t row = s.count - taps + 1; row < s.count; ++row) {
      kept.insert(kept.end(), row_at(row), row_at(row) + channels);
    }
    ForRowBlocks(shape, [&](int64_t block, int64_t at, int64_t count) {
      std::copy_n(kept.begin() + at, count, s.to[block]);
    });
  }
  return out;
}

at::Tensor GatedDeltaRule(const at::Tensor& qkv_TC, const at::Tensor& b_TH, const at::Tensor& a_TH,
                          const at::Tensor& decay_log_H, const at::Tensor& time_bias_H,
                          absl::Span<const DeltaRows> sequences, const DeltaShape& shape) {
  const model::DeltaSizes& sizes = shape.sizes;
  const int64_t total = qkv_TC.size(0);
  CheckRows(qkv_TC, total, sizes.qkv_size());
  CheckRows(b_TH, total, sizes.value_heads);
  CheckRows(a_TH, total, sizes.value_heads);
  at::Tensor out = at::empty({total, sizes.value_heads, sizes.value_dim}, at::kFloat);
  const float* const qkv = qkv_TC.const_data_ptr<float>();
  const float* const b = b_TH.const_data_ptr<float>();
  const float* const a = a_TH.const_data_ptr<float>();
  const float* const decay_log = decay_log_H.const_data_ptr<float>();
  const float* const time_bias = time_bias_H.const_data_ptr<float>();
  float* const y = out.mutable_data_ptr<float>();
  const int64_t shared = sizes.value_heads / sizes.key_heads;  // value heads of a key head
  const int64_t tiles = sizes.value_dim / shape.tile;
  const float scale = 1.0f / std::sqrt(static_cast<float>(sizes.key_dim));
  for (const DeltaRows& s : sequences) {
    const int64_t cost = s.count * sizes.key_dim * sizes.value_dim;
    cpu::ForRows(sizes.value_heads, cost, [&](int64_t begin, int64_t end) {
      std::vector<HeadRow> rows(static_cast<size_t>(s.count));
      std::vector<float> keys(static_cast<size_t>(2 * s.count * sizes.key_dim));
      std::vector<float> state(static_cast<size_t>(sizes.key_dim * shape.tile));
      for (int64_t head = begin; head < end; ++head) {
        for (int64_t i = 0; i < s.count; ++i) {
          const int64_t row = s.row_begin + i;
          const float* const q = qkv + row * sizes.qkv_size() + head / shared * sizes.key_dim;
          float* const to = keys.data() + 2 * i * sizes.key_dim;
          Normalise(q, sizes.key_dim, scale, to);
          Normalise(q + sizes.key_size(), sizes.key_dim, 1.0f, to + sizes.key_dim);
          const int64_t cell = row * sizes.value_heads + head;
          const float step = Softplus(a[cell] + time_bias[head]);
          rows[i] = {to,
                     to + sizes.key_dim,
                     qkv + row * sizes.qkv_size() + 2 * sizes.key_size() + head * sizes.value_dim,
                     y + cell * sizes.value_dim,
                     std::exp(-std::exp(decay_log[head]) * step),
                     1.0f / (1.0f + std::exp(-b[cell]))};
        }
        for (int64_t tile = 0; tile < tiles; ++tile) {
          const int64_t block = head * tiles + tile;
          if (s.from.empty()) {
            std::fill(state.begin(), state.end(), 0.0f);
          } else {
            std::copy_n(s.from[block], state.size(), state.begin());
          }
          RunTile(rows, tile * shape.tile, shape.tile, sizes.key_dim, state.data());
          std::copy(state.begin(), state.end(), s.to[block]);
        }
      }
    });
  }
  return out;
}

}  // namespace dorad::ops
