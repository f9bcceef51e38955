// The row kernel's warps that compute. Scores are taken transposed, positions by heads, so that the
// query heads are the narrow side of the products: S[64, 8] = K Qᵀ with warp w at positions 16 w,
// and O[head_dim, 8] = Vᵀ P with the head_dim in turns of 16 over the warps, for each eight heads.
#pragma once

#include "kernels/decoder/attention_rotary.cuh"
#include "kernels/decoder/attention_rows_parts.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/pipeline/ring.cuh"

namespace dorad::kernels::row_attention {

// Loads the weights of the norms of query and key.
template <typename C>
__device__ void LoadNorms(const Args<typename C::Isa>& p, uint8_t* shared) {
  auto* const norms = reinterpret_cast<float*>(shared + C::norms_at);
  for (int i = threadIdx.x; i < C::head_dim; i += 32 * kWarps) {
    if (p.append.q_norm != nullptr) norms[i] = p.append.q_norm[i];
    if (p.append.k_norm != nullptr) norms[C::head_dim + i] = p.append.k_norm[i];
  }
  NamedBarrier(kConsumerBarrier, 32 * kWarps);
}

// Turns heads as RopeAppend does.
template <typename C>
struct Turn {
  static constexpr int kHalf = C::head_dim / 2;
  static constexpr int kPairs = kHalf > 64 ? 2 : 1;
  using Head = HeadPairs<kPairs>;

  __device__ static bool IsPart(const RopeAppendParams& append) {
    return AppendsParts(C::head_dim) && IsPartial(append);
  }
  __device__ static Head Angles(const RopeAppendParams& append, int row, int position) {
    return IsPart(append) ? LoadPartAngles<kPairs, false>(append, row, position)
                          : LoadAngles<kPairs>(append, row, position, kHalf);
  }
  // norm: in shared memory, read if `has_norm`.
  __device__ static void Apply(const RopeAppendParams& append, const Head& angles, Head& x,
                               bool has_norm, const float* norm) {
    if (has_norm) {
      NormHead<kPairs>(x, LoadHead<kPairs>(norm, norm + kHalf, kHalf), kHalf, append.eps);
    }
    if (IsPart(append)) {
      RotatePart<kPairs>(x, angles, append.width);
    } else {
      RotateHead<kPairs>(x, angles);
    }
  }
};

// A query head of a row before it is turned, or as it is in q.
template <typename C>
__device__ const __nv_bfloat16* QueryAt(const Args<typename C::Isa>& p, int row, int head) {
  return p.append.qkv != nullptr ? HeadAt(p.append, row, head)
                                 : p.q + (int64_t{row} * p.kv_heads * p.group + head) * C::head_dim;
}

// Turns a query, if rows are appended here, and stores it as the place-th one in shared memory.
template <typename C>
__device__ void StoreQuery(const Args<typename C::Isa>& p, typename Turn<C>::Head x,
                           const typename Turn<C>::Head& angles, uint8_t* shared, int place) {
  if (p.append.qkv != nullptr) {
    const auto* const norm = reinterpret_cast<const float*>(shared + C::norms_at);
    Turn<C>::Apply(p.append, angles, x, p.append.q_norm != nullptr, norm);
  }
  auto* const to = reinterpret_cast<__nv_bfloat16*>(shared + C::query_at) + place * C::query_pitch;
  StoreHead<Turn<C>::kPairs>(x, C::head_dim / 2, [to](int at) { return to + at; });
}

// A head as it is loaded: no instruction needs it before Value.
template <typename C>
struct RawHead {
  static constexpr int kHalf = C::head_dim / 2;
  static constexpr int kPairs = Turn<C>::kPairs;

  __nv_bfloat162 low[kPairs], high[kPairs];

  __device__ void Load(const __nv_bfloat16* from) {
    for (int j = 0; j < kPairs; ++j) {
      const int at = 2 * (threadIdx.x % 32 + 32 * j);
      if (at >= kHalf) continue;
      low[j] = *reinterpret_cast<const __nv_bfloat162*>(from + at);
      high[j] = *reinterpret_cast<const __nv_bfloat162*>(from + kHalf + at);
    }
  }
  __device__ HeadPairs<kPairs> Value() const {
    HeadPairs<kPairs> x;
    for (int j = 0; j < kPairs; ++j) {
      const bool is_in = 2 * (threadIdx.x % 32 + 32 * j) < kHalf;
      x.low[j] = is_in ? __bfloat1622float2(low[j]) : make_float2(0.0f, 0.0f);
      x.high[j] = is_in ? __bfloat1622float2(high[j]) : make_float2(0.0f, 0.0f);
    }
    return x;
  }
};

// What a warp brings to shared memory of one row and key head: queries warp, warp + 4, …; if rows
// are appended here, of two warps one the key, one the value.
template <typename C>
struct RowHeads {
  static constexpr int kQueries = 8 * C::head_tiles / kWarps;
  static constexpr int kKeyWarp = kWarps - 2;

  HeadPairs<Turn<C>::kPairs> angles = {};
  RawHead<C> queries[kQueries], fresh;

  __device__ void LoadAngles(const Args<typename C::Isa>& p, int row, int position) {
    if (p.append.qkv != nullptr) angles = Turn<C>::Angles(p.append, row, position);
  }
  __device__ void Load(const Args<typename C::Isa>& p, int row, int head) {
    const int warp = threadIdx.x / 32;
    for (int i = 0; i < kQueries; ++i) {
      const int query = warp + kWarps * i;
      if (query < p.group) queries[i].Load(QueryAt<C>(p, row, head * p.group + query));
    }
    if (p.append.qkv == nullptr || warp < kKeyWarp) return;
    const int kind = warp == kKeyWarp ? 0 : 1;
    fresh.Load(HeadAt(p.append, row, p.kv_heads * (p.group + kind) + head));
  }
  __device__ void StoreQueries(const Args<typename C::Isa>& p, uint8_t* shared) const {
    for (int i = 0; i < kQueries; ++i) {
      const int query = threadIdx.x / 32 + kWarps * i;
      if (query < p.group) StoreQuery<C>(p, queries[i].Value(), angles, shared, query);
    }
  }
  // Writes the key and the value to the tile, which has the row's own position, and to the cache.
  __device__ void Append(const Args<typename C::Isa>& p, const TileInfo& info, uint8_t* shared,
                         int stage) const {
    using Tile = typename C::Tile;
    constexpr int kHalf = C::head_dim / 2;
    constexpr int kPairs = Turn<C>::kPairs;
    const int warp = threadIdx.x / 32;
    if (warp < kKeyWarp) return;
    const bool is_key = warp == kKeyWarp;
    HeadPairs<kPairs> x = fresh.Value();
    if (is_key) {
      const auto* const norms = reinterpret_cast<const float*>(shared + C::norms_at);
      Turn<C>::Apply(p.append, angles, x, p.append.k_norm != nullptr, norms + C::head_dim);
    }
    uint8_t* const tile = shared + stage * C::stage_bytes + (is_key ? 0 : Tile::kBytes);
    StoreHead<kPairs>(x, kHalf, [&](int i) {
      return reinterpret_cast<__nv_bfloat16*>(tile + Tile::Offset(info.own - info.position, i)) +
             i % 8;
    });
    __nv_bfloat16* const at =
        (is_key ? p.append.cache.k : p.append.cache.v) +
        ((int64_t{info.page} * p.kv_heads + info.head) * kKvPageTokens + info.own % kKvPageTokens) *
            C::head_dim;
    StoreHead<kPairs>(x, kHalf, [at](int i) { return at + i; });
    // Fetches will write there next.
    C::Isa::FenceStages();
  }
};

// The queries of several rows to shared memory; the rows are divided between the warps.
template <typename C>
__device__ void LoadQueries(const Args<typename C::Isa>& p, const TileInfo& info, uint8_t* shared) {
  constexpr int kHalf = C::head_dim / 2;
  constexpr int kPairs = Turn<C>::kPairs;
  constexpr int kTogether = 4 / kPairs;  // loads of heads in flight
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < info.count; i += kWarps) {
    const int row = info.row + i;
    HeadPairs<kPairs> angles = {};
    if (p.append.qkv != nullptr) {
      angles = Turn<C>::Angles(p.append, row, p.append.rows.positions[row]);
    }
#pragma unroll 1
    for (int first = 0; first < p.group; first += kTogether) {
      HeadPairs<kPairs> query[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (first + j >= p.group) break;
        query[j] = LoadHead<kPairs>(QueryAt<C>(p, row, info.head * p.group + first + j), kHalf);
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (first + j >= p.group) break;
        StoreQuery<C>(p, query[j], angles, shared, i * p.group + first + j);
      }
    }
  }
}

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

    if (is_partial) ClearValues<C>(info, shared + stage * C::stage_bytes + Tile::kBytes);

    float scores[kTiles][4] = {};
#pragma unroll kShares ? (Isa::kHasCopyEngine ? 2 : 1) : kSteps
    for (int s = 0; s < kSteps; ++s) {
      uint32_t k[4];
      LoadMatrices(k, k_at + Tile::Offset(16 * warp + lane % 16, 16 * s + lane / 16 * 8));
      if (!kHolds) load_queries(s);
      for (int n = 0; n < kTiles; ++n) {
        const uint32_t(&of)[2] = q[n][kHolds ? s : 0];
        Mma(scores[n], k, of[0], of[1]);
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
      for (int i = 0; i < C::warp_dim_tiles; ++i) {
        const int dim_tile = warp + kWarps * i;
        if (C::dim_tiles % kWarps != 0 && dim_tile >= C::dim_tiles) continue;
        for (int half = 0; half < 2; ++half) {
          const int first = 32 * pair + 16 * half;
          uint32_t v[4];
          LoadMatricesTransposed(v, v_at + Tile::Offset(first + lane / 16 * 8 + lane % 8,
                                                        16 * dim_tile + lane / 8 % 2 * 8));
          for (int n = 0; n < kTiles; ++n) {
            Mma(chunk.o[i][n], v, b[n][2 * half], b[n][2 * half + 1]);
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
