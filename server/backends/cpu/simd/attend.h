// Attention of a few queries of one kv head over pages, with an online softmax.
//
// A query's arithmetic is laid out by absolute positions: scores run over head_dim in order, the
// softmax is rescaled at multiples of kAttentionBlock, and values are added in order of position.
// So it does not depend on the queries beside it. Positions that a query does not see (they may
// hold anything, NaN included) never enter its sums. Only included by variant.h.
#pragma once

#include "server/backends/cpu/simd/kernels.h"
#include "server/backends/cpu/simd/pointwise.h"
#include "server/backends/cpu/simd/simd.h"

namespace dorad::ops::cpu::DORAD_SIMD {

#if defined(__AVX512F__)
inline constexpr int kQueries = 6;
inline constexpr int kPagesAtOnce = 4;
#elif defined(__AVX2__) || defined(__aarch64__)
inline constexpr int kQueries = 6;
inline constexpr int kPagesAtOnce = 1;
#else
inline constexpr int kQueries = 3;
inline constexpr int kPagesAtOnce = 1;
#endif
inline constexpr int kPageVectors = kPageSize / kLanes;
inline constexpr int kBlockVectors = kAttentionBlock / kLanes;

template <typename T>
DORAD_INLINE VF LoadElements(const T* p) {
  if constexpr (sizeof(T) == 2) {
    return LoadBf16(p);
  } else {
    return Load(p);
  }
}
template <typename T>
DORAD_INLINE VF LoadElementsPartial(const T* p, int64_t count) {
  if constexpr (sizeof(T) == 2) {
    return LoadBf16Partial(p, count);
  } else {
    return LoadPartial(p, count);
  }
}

// scores[i][16 * page + position] = q_i . k for kPages consecutive pages.
template <int kCount, int kPages, typename T>
DORAD_INLINE void ScorePages(const AttentionQueries& queries, const T* k, int64_t page_stride,
                             const int32_t* pages, float (*scores)[kAttentionBlock]) {
  VF acc[kCount][kPages * kPageVectors] = {};
  const T* page[kPages];
  for (int p = 0; p < kPages; ++p) page[p] = k + pages[p] * page_stride;
  for (int64_t d = 0; d < queries.head_dim; ++d) {
    VF keys[kPages * kPageVectors];
#pragma GCC unroll 4
    for (int p = 0; p < kPages; ++p) {
#pragma GCC unroll 4
      for (int v = 0; v < kPageVectors; ++v) {
        keys[p * kPageVectors + v] = LoadElements(page[p] + d * kPageSize + v * kLanes);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      const VF q = Splat(queries.q[i][d]);
#pragma GCC unroll 4
      for (int v = 0; v < kPages * kPageVectors; ++v) acc[i][v] = Fma(q, keys[v], acc[i][v]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kPages * kPageVectors; ++v) Store(scores[i] + v * kLanes, acc[i][v]);
  }
}

// out[i][0, kVectors * kLanes) += sum over j in [j0, j1) of p[i][j] * v_j, from dimension d on.
// Whole: kVectors full vectors; otherwise one vector of `count` elements.
template <int kCount, int kVectors, bool kWhole, typename T>
DORAD_INLINE void AddValues(const AttentionPages& pages, int64_t head_dim, int64_t block,
                            int64_t j0, int64_t j1, int64_t d, int64_t count,
                            const float (*p)[kAttentionBlock], float* const* out) {
  VF acc[kCount][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      acc[i][v] = kWhole ? Load(out[i] + d + v * kLanes) : LoadPartial(out[i] + d, count);
    }
  }
  for (int64_t j = j0; j < j1;) {
    const int64_t page = (block + j) / kPageSize;
    const int64_t page_end = (page + 1) * kPageSize - block;
    const T* row = static_cast<const T*>(pages.v) + pages.pages[page] * pages.page_stride +
                   (block + j) % kPageSize * head_dim + d;
    for (const int64_t end = page_end < j1 ? page_end : j1; j < end; ++j, row += head_dim) {
      VF values[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        values[v] = kWhole ? LoadElements(row + v * kLanes) : LoadElementsPartial(row, count);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i) {
        const VF weight = Splat(p[i][j]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) acc[i][v] = Fma(weight, values[v], acc[i][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      kWhole ? Store(out[i] + d + v * kLanes, acc[i][v])
             : StorePartial(out[i] + d, acc[i][v], count);
    }
  }
}

template <int kCount, typename T>
void AddValuesAllDims(const AttentionPages& pages, int64_t head_dim, int64_t block, int64_t j0,
                      int64_t j1, const float (*p)[kAttentionBlock], float* const* out) {
  if (j0 >= j1) return;
  constexpr int kWide = kQueries <= 3 ? 2 : (kLanes == 16 ? 4 : 2);
  int64_t d = 0;
  for (; d + kWide * kLanes <= head_dim; d += kWide * kLanes) {
    AddValues<kCount, kWide, true, T>(pages, head_dim, block, j0, j1, d, 0, p, out);
  }
  for (; d + kLanes <= head_dim; d += kLanes) {
    AddValues<kCount, 1, true, T>(pages, head_dim, block, j0, j1, d, 0, p, out);
  }
  if (d < head_dim) {
    AddValues<kCount, 1, false, T>(pages, head_dim, block, j0, j1, d, head_dim - d, p, out);
  }
}

// Turns a query's scores of one block into weights exp(score - maximum), 0 outside [j0, j1), and
// rescales its state.
DORAD_INLINE void SoftmaxBlock(float scale, int64_t j0, int64_t j1, int64_t head_dim, float* scores,
                               AttentionState& state) {
  VI position;
  for (int i = 0; i < kLanes; ++i) position[i] = i;
  VF s[kBlockVectors];
  VF top = Splat(-__builtin_inff());
#pragma GCC unroll 16
  for (int v = 0; v < kBlockVectors; ++v) {
    const VI at = position + v * kLanes;
    const VI seen = (at >= static_cast<int32_t>(j0)) & (at < static_cast<int32_t>(j1));
    s[v] = Select(seen, Load(scores + v * kLanes) * Splat(scale), Splat(-__builtin_inff()));
    top = Max(s[v], top);
  }
  const float block_max = MaxLanes(top);
  const float maximum = block_max > state.maximum ? block_max : state.maximum;
  const VF correction = Exp(Splat(state.maximum - maximum));
  VF sum{};
#pragma GCC unroll 16
  for (int v = 0; v < kBlockVectors; ++v) {
    s[v] = Exp(s[v] - maximum);
    Store(scores + v * kLanes, s[v]);
    sum = sum + s[v];
  }
  if (state.maximum != maximum) {
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      StoreUpTo(state.out + d, LoadUpTo(state.out + d, head_dim - d) * correction, head_dim - d);
    }
    state.sum *= correction[0];
    state.maximum = maximum;
  }
  state.sum += SumLanes(sum);
}

template <int kCount, typename T>
void AttendBlock(const AttentionQueries& queries, const AttentionPages& pages, int64_t block,
                 const int64_t* j0, const int64_t* j1, AttentionState* states) {
  int64_t first = kAttentionBlock, last = 0;       // seen by some query
  int64_t common0 = 0, common1 = kAttentionBlock;  // seen by all
  for (int i = 0; i < kCount; ++i) {
    common0 = j0[i] > common0 ? j0[i] : common0;
    common1 = j1[i] < common1 ? j1[i] : common1;
    if (j0[i] >= j1[i]) continue;
    first = j0[i] < first ? j0[i] : first;
    last = j1[i] > last ? j1[i] : last;
  }
  if (common1 < common0) common1 = common0;
  alignas(64) float scores[kCount][kAttentionBlock];
  const T* k = static_cast<const T*>(pages.k);
  int64_t page = first / kPageSize;
  const int64_t page_end = (last + kPageSize - 1) / kPageSize;
  const int32_t* table = pages.pages + block / kPageSize;
  auto rows_from = [&](int64_t p) {
    return reinterpret_cast<float(*)[kAttentionBlock]>(&scores[0][p * kPageSize]);
  };
  if constexpr (kPagesAtOnce > 1) {
    for (; page + kPagesAtOnce <= page_end; page += kPagesAtOnce) {
      ScorePages<kCount, kPagesAtOnce>(queries, k, pages.page_stride, table + page,
                                       rows_from(page));
    }
  }
  for (; page < page_end; ++page) {
    ScorePages<kCount, 1>(queries, k, pages.page_stride, table + page, rows_from(page));
  }
  float* out[kCount];
  for (int i = 0; i < kCount; ++i) {
    out[i] = states[i].out;
    if (j0[i] < j1[i]) {
      SoftmaxBlock(queries.scale, j0[i], j1[i], queries.head_dim, scores[i], states[i]);
    }
  }
  // Ascending for each query: its positions before the common part, that part, and the rest.
  const int64_t dim = queries.head_dim;
  for (int i = 0; i < kCount; ++i) {
    const int64_t end = j1[i] < common0 ? j1[i] : common0;
    AddValuesAllDims<1, T>(pages, dim, block, j0[i], end, scores + i, out + i);
  }
  AddValuesAllDims<kCount, T>(pages, dim, block, common0, common1, scores, out);
  for (int i = 0; i < kCount; ++i) {
    const int64_t begin = j0[i] > common1 ? j0[i] : common1;
    AddValuesAllDims<1, T>(pages, dim, block, begin, j1[i], scores + i, out + i);
  }
}

template <int kCount, typename T>
void AttendCount(const AttentionQueries& queries, const AttentionPages& pages, int64_t begin,
                 int64_t end, AttentionState* states) {
  int64_t low = end, high = begin - 1;
  for (int i = 0; i < kCount; ++i) {
    states[i].maximum = -__builtin_inff();
    states[i].sum = 0.0f;
    for (int64_t d = 0; d < queries.head_dim; ++d) states[i].out[d] = 0.0f;
    low = queries.low[i] < low ? queries.low[i] : low;
    high = queries.high[i] > high ? queries.high[i] : high;
  }
  low = low > begin ? low : begin;
  high = high < end ? high : end - 1;
  for (int64_t block = low / kAttentionBlock * kAttentionBlock; block <= high;
       block += kAttentionBlock) {
    int64_t j0[kCount], j1[kCount];
    bool any = false;
    for (int i = 0; i < kCount; ++i) {
      const int64_t from = queries.low[i] - block;
      const int64_t to = (queries.high[i] < end ? queries.high[i] + 1 : end) - block;
      j0[i] = from > 0 ? from : 0;
      j1[i] = to < kAttentionBlock ? to : kAttentionBlock;
      any = any || j0[i] < j1[i];
    }
    if (any) AttendBlock<kCount, T>(queries, pages, block, j0, j1, states);
  }
}

template <typename T>
void AttendType(const AttentionQueries& queries, const AttentionPages& pages, int64_t begin,
                int64_t end, AttentionState* states) {
  switch (queries.count) {
    case 1:
      return AttendCount<1, T>(queries, pages, begin, end, states);
    case 2:
      return AttendCount<2, T>(queries, pages, begin, end, states);
    case 3:
      return AttendCount<3, T>(queries, pages, begin, end, states);
  }
  if constexpr (kQueries > 3) {
    switch (queries.count) {
      case 4:
        return AttendCount<4, T>(queries, pages, begin, end, states);
      case 5:
        return AttendCount<5, T>(queries, pages, begin, end, states);
      case 6:
        return AttendCount<6, T>(queries, pages, begin, end, states);
    }
  }
}

static void Attend(const AttentionQueries& queries, const AttentionPages& pages, int64_t begin,
                   int64_t end, AttentionState* states) {
  if (pages.bf16) {
    AttendType<uint16_t>(queries, pages, begin, end, states);
  } else {
    AttendType<float>(queries, pages, begin, end, states);
  }
}

static void Merge(AttentionState* a, const AttentionState& b, int64_t head_dim) {
  const float none = -__builtin_inff();
  if (b.maximum == none && b.sum == 0.0f) return;
  if (a->maximum == none && a->sum == 0.0f) {
    a->maximum = b.maximum;
    a->sum = b.sum;
    __builtin_memcpy(a->out, b.out, static_cast<size_t>(head_dim) * 4);
    return;
  }
  const float maximum = a->maximum > b.maximum ? a->maximum : b.maximum;
  const VF scale_a = Exp(Splat(a->maximum - maximum));
  const VF scale_b = Exp(Splat(b.maximum - maximum));
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const int64_t left = head_dim - d;
    StoreUpTo(a->out + d,
              Fma(LoadUpTo(b.out + d, left), scale_b, LoadUpTo(a->out + d, left) * scale_a), left);
  }
  a->sum = a->sum * scale_a[0] + b.sum * scale_b[0];
  a->maximum = maximum;
}

}  // namespace dorad::ops::cpu::DORAD_SIMD
