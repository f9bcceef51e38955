// The heads of rows on their way into the row kernel: queries to shared memory, and the key and the
// value of a row that is appended here to the stage's tile and to the cache.
#pragma once

#include "kernels/decoder/attention_fp8.cuh"
#include "kernels/decoder/attention_rotary.cuh"
#include "kernels/decoder/attention_rows.cuh"
#include "kernels/isa/barrier.cuh"

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
    const int place = info.own - info.position;
    __nv_bfloat16* const at =
        (is_key ? p.append.cache.k : p.append.cache.v) +
        ((int64_t{info.page} * p.kv_heads + info.head) * kKvPageTokens + info.own % kKvPageTokens) *
            C::cache_dim;
    if constexpr (C::is_fp8) {
      const int scale = HeadScale<kPairs>(x);
      StoreCodes<kPairs>(x, scale, kHalf, [&](int i) { return tile + Tile::Offset(place, i / 2); });
      StoreCodes<kPairs>(x, scale, kHalf, [&](int i) { return at + i / 2; });
      if (threadIdx.x % 32 == 0) {
        const __nv_bfloat16 factor = ScaleFactor(scale);
        auto* const of_stage =
            reinterpret_cast<__nv_bfloat16*>(shared + C::factors_at + stage * C::factor_bytes);
        of_stage[(is_key ? 0 : kTile) + place] = factor;
        p.append.cache
            .factors[FactorsAt(info.page, p.kv_heads, info.head, is_key ? 0 : 1, C::head_dim) +
                     info.own % kKvPageTokens] = factor;
      }
    } else {
      StoreHead<kPairs>(x, kHalf, [&](int i) {
        return reinterpret_cast<__nv_bfloat16*>(tile + Tile::Offset(place, i)) + i % 8;
      });
      StoreHead<kPairs>(x, kHalf, [at](int i) { return at + i; });
    }
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

}  // namespace dorad::kernels::row_attention
