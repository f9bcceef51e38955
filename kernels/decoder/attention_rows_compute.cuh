// The row kernel's warps that compute. Scores are taken transposed, positions by heads, so that the
// query heads are the narrow side of the products: S[64, 8] = K Qᵀ with warp w at positions 16 w,
// and O[head_dim, 8] = Vᵀ P with the head_dim in turns of 16 over the warps, for each eight heads.
#pragma once

#include "kernels/decoder/attention_fp8.cuh"
#include "kernels/decoder/attention_rows_heads.cuh"
#include "kernels/decoder/attention_rows_parts.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/pipeline/ring.cuh"

namespace dorad::kernels::row_attention {

// Zeroes values out of reach: unwritten memory may contain NaN. All may be read after the next
// barrier.
template <typename C>
__device__ void ClearValues(const TileInfo& info, uint8_t* values) {
  constexpr int kUnits = C::head_dim / 8;  // of a row, 16 bytes each
#pragma unroll 1
  for (int i = threadIdx.x; i < kTile * kUnits; i += 32 * kWarps) {
    const int position = info.position + i / kUnits;
    if (position >= info.begin && position < info.end) continue;
    *reinterpret_cast<uint4*>(values + C::Tile::Offset(i / kUnits, i % kUnits * 8)) =
        make_uint4(0, 0, 0, 0);
  }
  // Fetches will write there next.
  C::Isa::FenceStages();
}

// The operands of two products from keys in eight bits, of 16 elements each. address: this lane's
// of LoadMatrices; `factors`: of the two positions that the lane has.
__device__ inline void LoadKeyCodes(uint32_t (&k)[2][4], uint32_t address,
                                    const uint32_t (&factors)[2]) {
  uint32_t codes[4];
  LoadMatrices(codes, address);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    k[i / 2][i % 2] = EvenElements(codes[i], factors[i % 2]);
    k[i / 2][i % 2 + 2] = OddElements(codes[i], factors[i % 2]);
  }
}

// The same from 32 values, of 16 positions each; `factors`: of the pairs of positions.
__device__ inline void LoadValueCodes(uint32_t (&v)[2][4], uint32_t address,
                                      const uint32_t (&factors)[4]) {
  uint32_t codes[4];
  LoadMatricesTransposed(codes, address);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i / 2][i % 2 * 2] = EvenElements(codes[i], factors[i]);
    v[i / 2][i % 2 * 2 + 1] = OddElements(codes[i], factors[i]);
  }
}

// The factors of a lane's values among 32: pairs of positions 8 apart. Zeros out of reach, where
// memory is unwritten.
__device__ inline void LoadValueFactors(uint32_t (&factors)[4], const uint16_t* of_values,
                                        const TileInfo& info, int first, bool is_partial) {
  const int at = first + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    factors[i] = *reinterpret_cast<const uint32_t*>(of_values + at + 8 * i);
    if (!is_partial) continue;
    const int position = info.position + at + 8 * i;
    if (position < info.begin || position >= info.end) factors[i] &= 0xFFFF0000;
    if (position + 1 < info.begin || position + 1 >= info.end) factors[i] &= 0xFFFF;
  }
}

// The stages of the ring, as the computing warps take them.
template <typename C>
struct StageReader {
  using Isa = typename C::Isa;
  static constexpr int kValues = C::Barriers::kValues;
  uint32_t full, empty;  // barriers
  RingPosition at;
  bool is_waiting = true;  // for the kernels before

  __device__ void AwaitPrevious() {
    if (is_waiting) WaitForPrevious();
    is_waiting = false;
  }
  __device__ TileInfo Await(const uint8_t* shared) const {
    BarrierWait(full + 8 * at.stage, at.parity);
    return reinterpret_cast<const TileInfo*>(shared + C::info_at)[at.stage];
  }
  // Where values come apart from keys.
  __device__ void AwaitValues() const {
    if constexpr (Isa::kApart) BarrierWait(full + kValues + 8 * at.stage, at.parity);
  }
  __device__ void ReleaseKeys() const {
    if constexpr (!Isa::kApart) return;
    __syncwarp();
    if (threadIdx.x % 32 == 0) BarrierArrive(empty + 8 * at.stage);
  }
  __device__ void Release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) BarrierArrive(empty + kValues + 8 * at.stage);
    at.Advance(C::stages);
  }
};

// All tiles of an item of up to kTiles · 8 columns; `info`: of the first.
template <typename C, int kTiles>
__device__ void ComputeItem(const Args<typename C::Isa>& p, uint8_t* shared, uint32_t base,
                            StageReader<C>& reader, TileInfo info) {
  using Tile = typename C::Tile;
  using Isa = typename C::Isa;
  constexpr int kSteps = C::head_dim / 16;
  constexpr bool kHolds = C::HoldsQueries(kTiles);
  constexpr bool kShares = kTiles != C::head_tiles;
  constexpr uint32_t kOnes[4] = {0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  float* const mosts = reinterpret_cast<float*>(shared + C::most_at);
  // Where the query of this lane's column is, of each tile of columns. Columns that are no head's
  // have any number: columns do not mix.
  const int columns = AttentionRowColumns(p.group);
  const auto query_at = [&](int n) {
    const int at = kShares ? (8 / columns * n + g / columns) * p.group + g % columns : 8 * n + g;
    return shared + C::query_at + at * C::query_pitch * 2 + 4 * t;
  };
  uint32_t q[kTiles][kHolds ? kSteps : 1][2];
  const auto load_queries = [&](int step) {
    for (int n = 0; n < kTiles; ++n) {
      uint32_t(&to)[2] = q[n][kHolds ? step : 0];
      to[0] = *reinterpret_cast<const uint32_t*>(query_at(n) + 32 * step);
      to[1] = *reinterpret_cast<const uint32_t*>(query_at(n) + 32 * step + 16);
    }
  };
  [[maybe_unused]] RowHeads<C> heads;
  if constexpr (kShares) {
    reader.AwaitPrevious();
    LoadQueries<C>(p, info, shared);
  } else {
    heads.LoadAngles(p, info.row, info.own);
    reader.AwaitPrevious();
    heads.Load(p, info.row, info.head);
    heads.StoreQueries(p, shared);
    if (info.page >= 0) {
      reader.AwaitValues();
      heads.Append(p, info, shared, reader.at.stage);
    }
  }
  NamedBarrier(kConsumerBarrier, 32 * kWarps);
  if constexpr (kHolds) {
    for (int s = 0; s < kSteps; ++s) load_queries(s);
  }
  Columns<C, kTiles> rows, chunk;
  SoftmaxState state[kTiles][2];
  ClearState(state);
  float most[kTiles][2];
  rows.Clear();
  bool begins_with_part = C::shares && !kShares && info.first >= 0;
  FirstPart<C> first = {};
  if (begins_with_part) first.Load(PartAt<C>(p, info.first, info.head), p.group);
  while (true) {
    const int stage = reader.at.stage;
    const uint32_t k_at = base + stage * C::stage_bytes, v_at = k_at + Tile::kBytes;
    const bool is_partial = info.begin > info.position || info.end < info.position + kTile;
    if (Isa::kApart && (info.page >= 0 || is_partial)) reader.AwaitValues();
    if (!kShares && info.page >= 0 && !(info.flags & kItemBegins)) {
      heads.Append(p, info, shared, stage);
      NamedBarrier(kConsumerBarrier, 32 * kWarps);
    }
    if (info.flags & kChunkBegins) {
      chunk.Clear();
      for (int n = 0; n < kTiles; ++n) most[n][0] = most[n][1] = kNoScore;
    }

    if (!C::is_fp8 && is_partial) {
      ClearValues<C>(info, shared + stage * C::stage_bytes + Tile::kBytes);
    }

    float scores[kTiles][4] = {};
    const auto add_scores = [&](int s, const uint32_t(&k)[4]) {
      if (!kHolds) load_queries(s);
      for (int n = 0; n < kTiles; ++n) {
        const uint32_t(&of)[2] = q[n][kHolds ? s : 0];
        Mma(scores[n], k, of[0], of[1]);
      }
    };
    const auto key_at = [&](int s) {
      return k_at + Tile::Offset(16 * warp + lane % 16, 16 * s + lane / 16 * 8);
    };
    [[maybe_unused]] const auto* const factors_of =
        reinterpret_cast<const uint16_t*>(shared + C::factors_at + stage * C::factor_bytes);
    if constexpr (C::is_fp8) {
      const uint16_t* const own = factors_of + 16 * warp + g;
      const uint32_t factors[2] = {own[0] * 0x10001u, own[8] * 0x10001u};
#pragma unroll kShares ? 1 : kSteps / 2
      for (int s = 0; s < kSteps; s += 2) {
        uint32_t k[2][4];
        LoadKeyCodes(k, key_at(s / 2), factors);
        add_scores(s, k[0]);
        add_scores(s + 1, k[1]);
      }
    } else {
#pragma unroll kShares ? (Isa::kHasCopyEngine ? 2 : 1) : kSteps
      for (int s = 0; s < kSteps; ++s) {
        uint32_t k[4];
        LoadMatrices(k, key_at(s));
        add_scores(s, k);
      }
    }
    reader.ReleaseKeys();
    const int position = info.position + 16 * warp + g;
    const bool is_in[2] = {position >= info.begin && position < info.end,
                           position + 8 >= info.begin && position + 8 < info.end};
    for (int n = 0; n < kTiles; ++n) {
      for (int j = 0; j < 4; ++j) {
        if (!is_in[j / 2]) scores[n][j] = -INFINITY;
      }
      for (int c = 0; c < 2; ++c) {
        float x = fmaxf(scores[n][c], scores[n][c + 2]);
        for (int offset = 4; offset < 32; offset *= 2) {
          x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, offset));
        }
        if (g == 0) mosts[(warp * kTiles + n) * 8 + 2 * t + c] = x;
      }
    }
    NamedBarrier(kConsumerBarrier, 32 * kWarps);
    float decay[kTiles][2];
    for (int n = 0; n < kTiles; ++n) {
      float p_tile[4];
      for (int c = 0; c < 2; ++c) {
        float now = most[n][c];
        for (int w = 0; w < kWarps; ++w) {
          now = fmaxf(now, mosts[(w * kTiles + n) * 8 + 2 * t + c]);
        }
        decay[n][c] = Decay(most[n][c], now, p.scale);
        most[n][c] = now;
        const float offset = ScaledOffset(now, p.scale);
        p_tile[c] = Numerator(scores[n][c], p.scale, offset);
        p_tile[c + 2] = Numerator(scores[n][c + 2], p.scale, offset);
      }
      for (int h = 0; h < 2; ++h) {
        *reinterpret_cast<uint32_t*>(shared + C::probability_at + (8 * n + g) * kProbabilityPitch +
                                     (16 * warp + 8 * h + 2 * t) * 2) =
            Transpose(PackBf16(p_tile[2 * h], p_tile[2 * h + 1]));
      }
    }
    NamedBarrier(kConsumerBarrier, 32 * kWarps);
    for (int n = 0; n < kTiles; ++n) {
      for (int c = 0; c < 2; ++c) chunk.l[n][c] *= decay[n][c];
      for (int j = 0; j < 4; ++j) {
        for (int i = 0; i < C::warp_dim_tiles; ++i) chunk.o[i][n][j] *= decay[n][j % 2];
      }
    }
    reader.AwaitValues();
#pragma unroll kShares ? 1 : 2
    for (int pair = 0; pair < kTile / 32; ++pair) {
      uint32_t b[kTiles][4];
      for (int n = 0; n < kTiles; ++n) {
        LoadMatrices(b[n], base + C::probability_at + (8 * n + lane % 8) * kProbabilityPitch +
                               (32 * pair + lane / 8 * 8) * 2);
        // All rows of the product are equal.
        float sums[4] = {chunk.l[n][0], chunk.l[n][1], chunk.l[n][0], chunk.l[n][1]};
        Mma(sums, kOnes, b[n][0], b[n][1]);
        Mma(sums, kOnes, b[n][2], b[n][3]);
        for (int c = 0; c < 2; ++c) chunk.l[n][c] = sums[c];
      }
      [[maybe_unused]] uint32_t factors[4];
      if constexpr (C::is_fp8) {
        LoadValueFactors(factors, factors_of + kTile, info, 32 * pair, is_partial);
      }
      for (int i = 0; i < C::warp_dim_tiles; ++i) {
        const int dim_tile = warp + kWarps * i;
        if (C::dim_tiles % kWarps != 0 && dim_tile >= C::dim_tiles) continue;
        const auto add_values = [&](int half, const uint32_t(&v)[4]) {
          for (int n = 0; n < kTiles; ++n) {
            Mma(chunk.o[i][n], v, b[n][2 * half], b[n][2 * half + 1]);
          }
        };
        if constexpr (C::is_fp8) {
          uint32_t v[2][4];
          LoadValueCodes(v, v_at + Tile::Offset(32 * pair + lane, 8 * dim_tile), factors);
          add_values(0, v[0]);
          add_values(1, v[1]);
        } else {
          for (int half = 0; half < 2; ++half) {
            uint32_t v[4];
            LoadMatricesTransposed(
                v, v_at + Tile::Offset(32 * pair + 16 * half + lane / 16 * 8 + lane % 8,
                                       16 * dim_tile + lane / 8 % 2 * 8));
            add_values(half, v);
          }
        }
      }
    }
    reader.Release();

    if (info.flags & kChunkEnds) {
      if constexpr (!kShares) {
        if (begins_with_part) {
          first.Take(PartAt<C>(p, info.first, info.head), p.group, rows, state);
        }
        begins_with_part = false;
      }
      JoinColumns(rows, state, chunk, most, p.scale);
      if (info.flags & kPartEnds) {
        StoreParts<C>(p, info, rows, state);
        rows.Clear();
        ClearState(state);
      }
    }
    if (info.flags & kItemEnds) break;
    info = reader.Await(shared);
  }
  if constexpr (!kShares) {
    if (info.slot < 0) StoreRow<C>(p, info, rows, state);
  }
}

template <typename C>
__device__ void Consume(const Args<typename C::Isa>& p, uint8_t* shared, uint32_t base) {
  const uint32_t full = base + C::barrier_at;
  StageReader<C> reader;
  reader.full = full;
  reader.empty = full + 8 * C::stages;
  if (p.append.qkv != nullptr) LoadNorms<C>(p, shared);
  while (true) {
    const TileInfo info = reader.Await(shared);
    if (info.flags & kStop) return;
    if (info.flags & kJoin) {
      reader.AwaitPrevious();
      reader.AwaitValues();
      Columns<C, C::head_tiles> rows;
      SoftmaxState state[C::head_tiles][2];
      ClearState(state);
      rows.Clear();
      JoinAll<C>(p, info, shared + reader.at.stage * C::stage_bytes, rows, state);
      reader.ReleaseKeys();
      reader.Release();
      StoreRow<C>(p, info, rows, state);
    } else if (C::shares && info.count > 1) {
      if constexpr (C::shares) ComputeItem<C, C::most_tiles>(p, shared, base, reader, info);
    } else {
      ComputeItem<C, C::head_tiles>(p, shared, base, reader, info);
    }
  }
}

}  // namespace dorad::kernels::row_attention
