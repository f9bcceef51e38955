// Products of packed input rows with weight rows, as dot products along K.
//
// A tile of rows x columns sums is kept in registers, each sum as one vector of lanes; the lanes
// are added at the end. Lane assignment, chunking of K and the final tree are the same for every
// tile shape, so a sum does not depend on which rows and columns are computed beside it. Only
// included by variant.h.
#pragma once

#include "server/backends/cpu/simd/kernels.h"
#include "server/backends/cpu/simd/simd.h"

namespace dorad::ops::cpu::DORAD_SIMD {

// Rows of a tile: as many as keep rows x 4 sums, 4 weights and an input in registers.
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kTileRows = 6;
#else
inline constexpr int kTileRows = 3;
#endif

template <Format kFormat>
inline constexpr int kChunkBytes = kFormat == Format::kBf16Dot ? kChunk * 2 : kChunk * 4;
template <Format kFormat>
inline constexpr int kElementBytes = kFormat == Format::kF32 ? 4 : 2;

// The loaded weights of one chunk of one row.
template <Format kFormat>
struct Words {
  VU half[kFormat == Format::kF32 ? 2 : 1];
};

template <Format kFormat>
DORAD_INLINE Words<kFormat> LoadChunk(const char* w) {
  Words<kFormat> words;
  words.half[0] = LoadAs<VU>(w);
  if constexpr (kFormat == Format::kF32) words.half[1] = LoadAs<VU>(w + kLanes * 4);
  return words;
}

// The first `count` < kChunk elements, then zeros.
template <Format kFormat>
DORAD_INLINE Words<kFormat> LoadChunkPartial(const char* w, int64_t count) {
  Words<kFormat> words;
  if constexpr (kFormat == Format::kF32) {
    const float* p = reinterpret_cast<const float*>(w);
    const bool full = count >= kLanes;
    words.half[0] = (VU)(full ? Load(p) : LoadPartial(p, count));
    words.half[1] = full ? (VU)LoadPartial(p + kLanes, count - kLanes) : VU{};
  } else {
    words.half[0] = LoadWordsPartial(reinterpret_cast<const uint16_t*>(w), count);
  }
  return words;
}

// One of the two halves of acc += x-chunk * w-chunk for a tile (bf16 dot products have only half
// 0). x: row m at x + m * x_row bytes.
template <int kHalf, int kRows, int kCols, Format kFormat>
DORAD_INLINE void MultiplyHalf(VF (&acc)[kRows][kCols], const char* x, int64_t x_row,
                               const Words<kFormat> (&w)[kCols]) {
  VF b[kCols];
#pragma GCC unroll 8
  for (int j = 0; j < kCols; ++j) {
    if constexpr (kFormat == Format::kF32) {
      b[j] = (VF)w[j].half[kHalf];
    } else if constexpr (kFormat == Format::kBf16) {
      b[j] = kHalf == 0 ? EvenOf(w[j].half[0]) : OddOf(w[j].half[0]);
    } else {
      b[j] = (VF)w[j].half[0];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
    const VF a = LoadAs<VF>(x + m * x_row + kHalf * kLanes * 4);
#pragma GCC unroll 8
    for (int j = 0; j < kCols; ++j) {
#if defined(__AVX512BF16__)
      if constexpr (kFormat == Format::kBf16Dot) {
        acc[m][j] = DotBf16(acc[m][j], (VU)a, (VU)b[j]);
        continue;
      }
#endif
      acc[m][j] = Fma(a, b[j], acc[m][j]);
    }
  }
}

template <int kRows, int kCols, Format kFormat>
DORAD_INLINE void MultiplyChunk(VF (&acc)[kRows][kCols], const char* x, int64_t x_row,
                                const Words<kFormat> (&w)[kCols]) {
  MultiplyHalf<0>(acc, x, x_row, w);
  if constexpr (kFormat != Format::kBf16Dot) MultiplyHalf<1>(acc, x, x_row, w);
}

// acc += sum over k of x * w for weight rows w, w + w_row, ...
template <int kRows, int kCols, Format kFormat>
DORAD_INLINE void Accumulate(VF (&acc)[kRows][kCols], const char* x, int64_t x_row, int64_t x_step,
                             const char* w, int64_t k, int64_t prefetch) {
  const int64_t w_row = k * kElementBytes<kFormat>;
  Words<kFormat> words[kCols];
  for (int64_t left = k; left >= kChunk; left -= kChunk) {
#pragma GCC unroll 8
    for (int j = 0; j < kCols; ++j) {
      words[j] = LoadChunk<kFormat>(w + j * w_row);
      __builtin_prefetch(w + j * w_row + prefetch);
    }
    if constexpr (kFormat == Format::kBf16 && kRows * kCols >= 24) {
      // No register is left to keep the words for the second half: they are loaded again, from an
      // address that the compiler cannot recognise as the same.
      MultiplyHalf<0>(acc, x, x_row, words);
      const char* again = w;
      asm("" : "+r"(again));
#pragma GCC unroll 8
      for (int j = 0; j < kCols; ++j) words[j] = LoadChunk<kFormat>(again + j * w_row);
      MultiplyHalf<1>(acc, x, x_row, words);
    } else {
      MultiplyChunk(acc, x, x_row, words);
    }
    x += x_step;
    w += kChunk * kElementBytes<kFormat>;
  }
  if (const int64_t rest = k % kChunk; rest != 0) {
#pragma GCC unroll 8
    for (int j = 0; j < kCols; ++j) words[j] = LoadChunkPartial<kFormat>(w + j * w_row, rest);
    MultiplyChunk(acc, x, x_row, words);
  }
}

// The low-rank extension of `kRows` rows that share one B.
template <int kRows, int kCols>
DORAD_INLINE void Extend(VF (&acc)[kRows][kCols], const WeightRows& b, int64_t n, const char* h,
                         int64_t h_step) {
  const char* data = static_cast<const char*>(b.data);
  switch (b.format) {
    case Format::kF32:
      Accumulate<kRows, kCols, Format::kF32>(acc, h, h_step, kChunkBytes<Format::kF32>,
                                             data + n * b.k * 4, b.k, 0);
      break;
    case Format::kBf16:
      Accumulate<kRows, kCols, Format::kBf16>(acc, h, h_step, kChunkBytes<Format::kBf16>,
                                              data + n * b.k * 2, b.k, 0);
      break;
    case Format::kBf16Dot:
#if defined(__AVX512BF16__)
      Accumulate<kRows, kCols, Format::kBf16Dot>(acc, h, h_step, kChunkBytes<Format::kBf16Dot>,
                                                 data + n * b.k * 2, b.k, 0);
#endif
      break;
  }
}

// The same where every row has a B of its own, or none. A recursion because acc stays in registers
// only when its indices are constants.
template <int kRow, int kRows, int kCols>
DORAD_INLINE void ExtendEach(VF (&acc)[kRows][kCols], const GemmTile& tile, int64_t n) {
  if (tile.b[kRow].data != nullptr) {
    VF row[1][kCols];
#pragma GCC unroll 8
    for (int j = 0; j < kCols; ++j) row[0][j] = acc[kRow][j];
    Extend(row, tile.b[kRow], n, tile.h + kRow * tile.h_step, 0);
#pragma GCC unroll 8
    for (int j = 0; j < kCols; ++j) acc[kRow][j] = row[0][j];
  }
  if constexpr (kRow + 1 < kRows) ExtendEach<kRow + 1>(acc, tile, n);
}

// Columns [n, n + kCols) of a tile; out: row m at out + m * tile.y_step.
template <int kRows, int kCols, Format kFormat>
void Tile(const WeightRows& weight, int64_t n, bool prefetch_next, const GemmTile& tile,
          float* out) {
  VF acc[kRows][kCols] = {};
  const int64_t w_row = weight.k * kElementBytes<kFormat>;
  Accumulate<kRows, kCols, kFormat>(acc, tile.x, kChunkBytes<kFormat>, tile.x_step,
                                    static_cast<const char*>(weight.data) + n * w_row, weight.k,
                                    prefetch_next ? kCols * w_row : 0);
  if (tile.shared) {
    Extend(acc, tile.b[0], n, tile.h, tile.h_step);
  } else if (tile.extended) {
    ExtendEach<0>(acc, tile, n);
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
    float* y = out + m * tile.y_step;
    if constexpr (kCols % 4 == 0) {
#pragma GCC unroll 2
      for (int j = 0; j < kCols; j += 4) {
        const F4 sums = SumLanes4(acc[m][j], acc[m][j + 1], acc[m][j + 2], acc[m][j + 3]);
        __builtin_memcpy(y + j, &sums, sizeof(sums));
      }
    } else {
#pragma GCC unroll 4
      for (int j = 0; j < kCols; ++j) y[j] = SumLanes(acc[m][j]);
    }
  }
}

DORAD_INLINE void ScaleAndBias(const float* g, const float* bias, int64_t count, float* y) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t n = count - i < kLanes ? count - i : kLanes;
    VF v = n == kLanes ? Load(y + i) : LoadPartial(y + i, n);
    if (g != nullptr) v = v * (n == kLanes ? Load(g + i) : LoadPartial(g + i, n));
    if (bias != nullptr) v = v + (n == kLanes ? Load(bias + i) : LoadPartial(bias + i, n));
    n == kLanes ? Store(y + i, v) : StorePartial(y + i, v, n);
  }
}

template <int kRows, Format kFormat>
void GemmRows(const WeightRows& weight, int64_t begin, int64_t end, const float* bias,
              const GemmTile& tile) {
  // One or two rows need more columns to hide the latency of a multiply-add.
  constexpr int kCols = kRows <= 2 && kTileRows > 3 ? 8 : 4;
  int64_t n = begin;
  for (; n + kCols <= end; n += kCols) {
    Tile<kRows, kCols, kFormat>(weight, n, n + 2 * kCols <= end, tile, tile.y + (n - begin));
  }
  for (; n < end; ++n) Tile<kRows, 1, kFormat>(weight, n, false, tile, tile.y + (n - begin));
  for (int m = 0; m < kRows; ++m) {
    if (tile.g[m] == nullptr && bias == nullptr) continue;
    ScaleAndBias(tile.g[m] == nullptr ? nullptr : tile.g[m] + begin,
                 bias == nullptr ? nullptr : bias + begin, end - begin, tile.y + m * tile.y_step);
  }
}

template <Format kFormat>
void GemmFormat(const WeightRows& weight, int64_t begin, int64_t end, const float* bias,
                const GemmTile& tile) {
  switch (tile.rows) {
    case 1:
      return GemmRows<1, kFormat>(weight, begin, end, bias, tile);
    case 2:
      return GemmRows<2, kFormat>(weight, begin, end, bias, tile);
    case 3:
      return GemmRows<3, kFormat>(weight, begin, end, bias, tile);
  }
  if constexpr (kTileRows > 3) {
    switch (tile.rows) {
      case 4:
        return GemmRows<4, kFormat>(weight, begin, end, bias, tile);
      case 5:
        return GemmRows<5, kFormat>(weight, begin, end, bias, tile);
      case 6:
        return GemmRows<6, kFormat>(weight, begin, end, bias, tile);
    }
  }
}

static void Gemm(const WeightRows& weight, int64_t begin, int64_t end, const float* bias,
                 const GemmTile& tile) {
  switch (weight.format) {
    case Format::kF32:
      return GemmFormat<Format::kF32>(weight, begin, end, bias, tile);
    case Format::kBf16:
      return GemmFormat<Format::kBf16>(weight, begin, end, bias, tile);
    case Format::kBf16Dot:
#if defined(__AVX512BF16__)
      return GemmFormat<Format::kBf16Dot>(weight, begin, end, bias, tile);
#else
      return;
#endif
  }
}

static double FmaPeak(Format format, int64_t steps) {
  VF acc[12];
  VF a = Splat(1.0f);
#pragma GCC unroll 12
  for (int i = 0; i < 12; ++i) acc[i] = Splat(static_cast<float>(i));
  const bool dot = format == Format::kBf16Dot;
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) {
#if defined(__AVX512BF16__)
      acc[i] = dot ? DotBf16(acc[i], (VU)a, (VU)a) : Fma(a, a, acc[i]);
#else
      acc[i] = Fma(a, a, acc[i]);
#endif
    }
    asm volatile("" : "+m"(a));  // keeps the loop
  }
  VF sum = acc[0];
#pragma GCC unroll 12
  for (int i = 1; i < 12; ++i) sum = sum + acc[i];
  asm volatile("" : : "m"(sum));
  return static_cast<double>(steps) * 12 * kLanes * (dot ? 2 : 1);
}

static void Pack(const float* src, int64_t count, float scale, bool round_bf16, Format format,
                 char* dst, int64_t step) {
  const VF s = Splat(scale);
  for (; count > 0; count -= kChunk, src += kChunk, dst += step) {
    const int64_t n0 = count < kLanes ? count : kLanes;
    const int64_t n1 = count - n0 < kLanes ? count - n0 : kLanes;
    VF v0 = (n0 == kLanes ? Load(src) : LoadPartial(src, n0)) * s;
    VF v1 = (n1 == kLanes ? Load(src + kLanes) : LoadPartial(src + n0, n1)) * s;
    if (round_bf16) {
      v0 = RoundBf16(v0);
      v1 = RoundBf16(v1);
    }
    float* out = reinterpret_cast<float*>(dst);
    switch (format) {
      case Format::kF32:
        Store(out, v0);
        Store(out + kLanes, v1);
        break;
      case Format::kBf16:
        Store(out, EvenLanes(v0, v1));
        Store(out + kLanes, OddLanes(v0, v1));
        break;
      case Format::kBf16Dot: {
        const VH h0 = NarrowBf16(v0);
        const VH h1 = NarrowBf16(v1);
        __builtin_memcpy(dst, &h0, sizeof(h0));
        __builtin_memcpy(dst + sizeof(h0), &h1, sizeof(h1));
        break;
      }
    }
  }
}

}  // namespace dorad::ops::cpu::DORAD_SIMD
