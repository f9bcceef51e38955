// The row kernel's warps that compute. Scores are taken transposed, positions by heads, so that the
// group of query heads is the narrow side of the products: S[64, 8] = K Qᵀ with warp w at positions
// 16 w, and O[head_dim, 8] = Vᵀ P with the head_dim in turns of 16 over the warps.
#pragma once

#include "kernels/decoder/attention_rotary.cuh"
#include "kernels/decoder/attention_rows.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/memory.cuh"

namespace dorad::kernels::row_attention {

// One warp's part of one key head's group: heads 8 n + 2 t (+ 1), dims 16 (w + 4 i) + g (+ 8).
template <typename C>
struct Rows {
  float o[C::warp_dim_tiles][C::head_tiles][4];
  float l[C::head_tiles][4];

  __device__ void Clear() {
    for (int n = 0; n < C::head_tiles; ++n) {
      for (int j = 0; j < 4; ++j) {
        l[n][j] = 0.0f;
        for (int i = 0; i < C::warp_dim_tiles; ++i) o[i][n][j] = 0.0f;
      }
    }
  }
};

// Numerators of dims 16 · dim_tile + g (+ 8) and heads 8 n + 2 t (+ 1), for t < pairs.
template <typename C>
__device__ float4* PartNumerators(float* part, int pairs, int dim_tile, int n, int g, int t) {
  return reinterpret_cast<float4*>(part + C::head_tiles * 16) +
         ((dim_tile * C::head_tiles + n) * 8 + g) * pairs + t;
}

// Stores sixteen bytes of a part; other blocks may poll for them.
__device__ inline void StorePlace(float4* place, const float (&values)[4]) {
  uint32_t bits[4];
  for (int i = 0; i < 4; ++i) bits[i] = min(__float_as_uint(values[i]), kNoPart - 1);
  StoreRelaxed(reinterpret_cast<uint4*>(place), make_uint4(bits[0], bits[1], bits[2], bits[3]));
}

template <typename C>
__device__ void StorePart(const Rows<C>& chunk, const float (&most)[C::head_tiles][2], float* part,
                          int group) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const int pairs = AttentionPartPairs(group);
  for (int n = 0; n < C::head_tiles; ++n) {
    if (warp == 0 && g == 0) {
      StorePlace(reinterpret_cast<float4*>(part + n * 16) + t,
                 {most[n][0], chunk.l[n][0], most[n][1], chunk.l[n][1]});
    }
    for (int i = 0; i < C::warp_dim_tiles; ++i) {
      const int dim_tile = warp + kWarps * i;
      if (dim_tile >= C::dim_tiles || t >= pairs) continue;
      const float(&o)[4] = chunk.o[i][n];
      StorePlace(PartNumerators<C>(part, pairs, dim_tile, n, g, t), {o[0], o[1], o[2], o[3]});
    }
  }
}

template <typename C>
__device__ void JoinRows(Rows<C>& rows, SoftmaxState (&state)[C::head_tiles][2],
                         const Rows<C>& chunk, const float (&most)[C::head_tiles][2], float scale) {
  for (int n = 0; n < C::head_tiles; ++n) {
    JoinFactors f[2];
    for (int c = 0; c < 2; ++c) f[c] = JoinChunk(state[n][c], most[n][c], chunk.l[n][c], scale);
    for (int i = 0; i < C::warp_dim_tiles; ++i) {
      for (int j = 0; j < 4; ++j) {
        rows.o[i][n][j] = Join(rows.o[i][n][j], chunk.o[i][n][j], f[j % 2]);
      }
    }
  }
}

// Joins the parts of a stage, in order. Each warp has its dims.
template <typename C>
__device__ void JoinParts(Rows<C>& rows, SoftmaxState (&state)[C::head_tiles][2], float* parts,
                          int part_floats, int count, int group, float scale) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const int pairs = AttentionPartPairs(group);
  for (int i = 0; i < count; ++i) {
    float* const part = parts + i * part_floats;
    Rows<C> chunk;
    chunk.Clear();
    float most[C::head_tiles][2];
    for (int n = 0; n < C::head_tiles; ++n) {
      const float4 ml = reinterpret_cast<const float4*>(part + n * 16)[t];
      most[n][0] = ml.x;
      most[n][1] = ml.z;
      chunk.l[n][0] = ml.y;
      chunk.l[n][1] = ml.w;
      for (int d = 0; d < C::warp_dim_tiles; ++d) {
        const int dim_tile = warp + kWarps * d;
        if (dim_tile >= C::dim_tiles || t >= pairs) continue;
        const float4 o = *PartNumerators<C>(part, pairs, dim_tile, n, g, t);
        chunk.o[d][n][0] = o.x;
        chunk.o[d][n][1] = o.y;
        chunk.o[d][n][2] = o.z;
        chunk.o[d][n][3] = o.w;
      }
    }
    JoinRows<C>(rows, state, chunk, most, scale);
  }
}

template <typename C>
__device__ void StoreRows(const Rows<C>& rows, const SoftmaxState (&state)[C::head_tiles][2],
                          __nv_bfloat16* out, int group) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  for (int n = 0; n < C::head_tiles; ++n) {
    const float shares[2] = {Share(state[n][0]), Share(state[n][1])};
    for (int i = 0; i < C::warp_dim_tiles; ++i) {
      const int dim_tile = warp + kWarps * i;
      if (dim_tile >= C::dim_tiles) continue;
      const float(&o)[4] = rows.o[i][n];
      for (int h = 0; h < 2; ++h) {
        // The lanes' rows are heads.
        const uint32_t pair =
            Transpose(PackBf16(__fmul_rn(o[2 * h], shares[0]), __fmul_rn(o[2 * h + 1], shares[1])));
        if (8 * n + g < group) {
          *reinterpret_cast<uint32_t*>(out + (8 * n + g) * C::head_dim + 16 * dim_tile + 8 * h +
                                       2 * t) = pair;
        }
      }
    }
  }
}

// Copies `count` parts of `places` times 16 bytes, at a distance of `stride` places, to shared
// memory as they appear, and resets their places to kNoPart. All computing threads.
__device__ inline void TakeParts(uint4* parts, int64_t stride, int places, int count, uint4* to) {
  constexpr int kDeep = 8;  // loads in flight together
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int part = warp; part < count; part += kWarps) {
    uint4* const from = parts + part * stride;
#pragma unroll 1
    for (int base = lane; base < places; base += 32 * kDeep) {
      uint4 bits[kDeep];
#pragma unroll
      for (int i = 0; i < kDeep; ++i) {
        if (base + 32 * i < places) bits[i] = LoadRelaxed(from + base + 32 * i);
      }
#pragma unroll
      for (int i = 0; i < kDeep; ++i) {
        const int place = base + 32 * i;
        if (place >= places) break;
        while (bits[i].x == kNoPart || bits[i].y == kNoPart || bits[i].z == kNoPart ||
               bits[i].w == kNoPart) {
          bits[i] = LoadRelaxed(from + place);
        }
        to[part * places + place] = bits[i];
        from[place] = make_uint4(kNoPart, kNoPart, kNoPart, kNoPart);
      }
    }
  }
  NamedBarrier(kConsumerBarrier, 32 * kWarps);
}

// Joins all parts of a row in the memory of one stage.
template <typename C>
__device__ void JoinAll(const Args<typename C::Isa>& p, const TileInfo& info, uint8_t* stage,
                        Rows<C>& rows, SoftmaxState (&state)[C::head_tiles][2]) {
  const int part_floats = p.layout.part_floats;
  const int together = C::stage_bytes / (part_floats * 4);
  float* const parts =
      p.layout.parts + (int64_t{info.first} * p.kv_heads + info.head) * part_floats;
  const int64_t stride = int64_t{p.kv_heads} * part_floats;
#pragma unroll 1
  for (int part = 0; part < info.slots; part += together) {
    const int count = min(together, info.slots - part);
    TakeParts(reinterpret_cast<uint4*>(parts + part * stride), stride / 4, part_floats / 4, count,
              reinterpret_cast<uint4*>(stage));
    JoinParts<C>(rows, state, reinterpret_cast<float*>(stage), part_floats, count, p.group,
                 p.scale);
    NamedBarrier(kConsumerBarrier, 32 * kWarps);
  }
  // Fetches will write there next.
  C::Isa::FenceStages();
}

// Loads the weights of the norms of query and key for StartRow.
template <typename C>
__device__ void LoadNorms(const Args<typename C::Isa>& p, uint8_t* shared) {
  auto* const norms = reinterpret_cast<float*>(shared + C::norms_at);
  for (int i = threadIdx.x; i < C::head_dim; i += 32 * kWarps) {
    if (p.append.q_norm != nullptr) norms[i] = p.append.q_norm[i];
    if (p.append.k_norm != nullptr) norms[C::head_dim + i] = p.append.k_norm[i];
  }
  NamedBarrier(kConsumerBarrier, 32 * kWarps);
}

// Loads the queries of a new item to shared memory. If rows are appended here: norms and rotates
// the queries and, if the tile has the row's own position, its key, and writes that key and value
// to the tile and to the cache.
template <typename C>
__device__ void StartRow(const Args<typename C::Isa>& p, const TileInfo& info, uint8_t* shared,
                         int stage, bool is_waiting) {
  using Tile = typename C::Tile;
  constexpr int kHalf = C::head_dim / 2;
  constexpr int kPairs = kHalf > 64 ? 2 : 1;
  constexpr int kKeyWarp = kWarps - 2;
  using Head = HeadPairs<kPairs>;
  const int warp = threadIdx.x / 32;
  const RopeAppendParams& append = p.append;
  const bool is_appending = append.qkv != nullptr;
  const int heads = p.kv_heads * p.group;
  Head angles;
  const bool is_part = AppendsParts(C::head_dim) && IsPartial(append);
  if (is_appending) {
    angles = is_part ? LoadPartAngles<kPairs, false>(append, info.row, info.own)
                     : LoadAngles<kPairs>(append, info.row, info.own, kHalf);
  }
  const auto head_at = [&](int head) {
    return is_appending ? HeadAt(append, info.row, head)
                        : p.q + (int64_t{info.row} * heads + head) * C::head_dim;
  };
  if (is_waiting) WaitForPrevious();
  const auto* const norms = reinterpret_cast<const float*>(shared + C::norms_at);
  const auto turn = [&](Head& x, bool has_norm, const float* norm) {
    if (has_norm) {
      NormHead<kPairs>(x, LoadHead<kPairs>(norm, norm + kHalf, kHalf), kHalf, append.eps);
    }
    if (is_part) {
      RotatePart<kPairs>(x, angles, append.width);
    } else {
      RotateHead<kPairs>(x, angles);
    }
  };
  const bool is_key = warp == kKeyWarp;
  const bool appends = info.page >= 0 && warp >= kKeyWarp;
  Head fresh;
  if (appends) {
    const int head = heads + (is_key ? 0 : p.kv_heads) + info.head;
    fresh = LoadHead<kPairs>(head_at(head), kHalf);
  }
  if (info.flags & kItemBegins) {
    auto* const queries = reinterpret_cast<__nv_bfloat16*>(shared + C::query_at);
#pragma unroll 1
    for (int head = warp; head < p.group; head += kWarps) {
      Head query = LoadHead<kPairs>(head_at(info.head * p.group + head), kHalf);
      if (is_appending) turn(query, append.q_norm != nullptr, norms);
      StoreHead<kPairs>(query, kHalf, [&](int i) { return queries + head * C::query_pitch + i; });
    }
  }
  if (appends) {
    if (is_key) turn(fresh, append.k_norm != nullptr, norms + C::head_dim);
    uint8_t* const tile = shared + stage * C::stage_bytes + (is_key ? 0 : Tile::kBytes);
    StoreHead<kPairs>(fresh, kHalf, [&](int i) {
      return reinterpret_cast<__nv_bfloat16*>(tile + Tile::Offset(info.own - info.position, i)) +
             i % 8;
    });
    __nv_bfloat16* const at =
        (is_key ? append.cache.k : append.cache.v) +
        ((int64_t{info.page} * p.kv_heads + info.head) * kKvPageTokens + info.own % kKvPageTokens) *
            C::head_dim;
    StoreHead<kPairs>(fresh, kHalf, [at](int i) { return at + i; });
    // Fetches will write there next.
    C::Isa::FenceStages();
  }
  NamedBarrier(kConsumerBarrier, 32 * kWarps);
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

template <typename C>
__device__ void Consume(const Args<typename C::Isa>& p, uint8_t* shared, uint32_t base) {
  using Tile = typename C::Tile;
  using Isa = typename C::Isa;
  constexpr int kHeadTiles = C::head_tiles;
  constexpr int kValues = C::Barriers::kValues;
  constexpr int kSteps = C::head_dim / 16;
  constexpr uint32_t kOnes[4] = {0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const uint32_t full = base + C::barrier_at, empty = full + 8 * C::stages;
  float* const mosts = reinterpret_cast<float*>(shared + C::most_at);

  uint32_t q[kHeadTiles][C::holds_queries ? kSteps : 1][2];
  Rows<C> rows, chunk;
  SoftmaxState state[kHeadTiles][2];
  float most[kHeadTiles][2];
  int stage = 0, turn = 0;
  uint32_t parity = 0;
  bool is_waiting = true;  // for the kernels before
  if (p.append.qkv != nullptr) LoadNorms<C>(p, shared);
  while (true) {
    BarrierWait(full + 8 * stage, parity);
    const TileInfo info = reinterpret_cast<const TileInfo*>(shared + C::info_at)[stage];
    if (info.flags & kStop) return;
    const uint32_t k_at = base + stage * C::stage_bytes, v_at = k_at + Tile::kBytes;
    // Where values come apart from keys.
    const auto await_values = [&] {
      if constexpr (Isa::kApart) BarrierWait(full + kValues + 8 * stage, parity);
    };
    const auto release_keys = [&] {
      if constexpr (!Isa::kApart) return;
      __syncwarp();
      if (lane == 0) BarrierArrive(empty + 8 * stage);
    };
    const auto release_stage = [&] {
      __syncwarp();
      if (lane == 0) BarrierArrive(empty + kValues + 8 * stage);
      if (++stage == C::stages) {
        stage = 0;
        parity ^= 1;
      }
    };
    const auto store_rows = [&] {
      StoreRows<C>(rows, state,
                   p.out + (int64_t{info.row} * p.kv_heads + info.head) * p.group * C::head_dim,
                   p.group);
    };
    if (info.flags & (kItemBegins | kJoin)) {
      rows.Clear();
      for (int n = 0; n < kHeadTiles; ++n) state[n][0] = state[n][1] = SoftmaxState();
    }
    if (info.flags & kJoin) {
      if (is_waiting) WaitForPrevious();
      is_waiting = false;
      await_values();
      JoinAll<C>(p, info, shared + stage * C::stage_bytes, rows, state);
      release_keys();
      release_stage();
      store_rows();
      continue;
    }
    const auto is_partial = [&] {
      return info.begin > info.position || info.end < info.position + kTile;
    };
    if (Isa::kApart && (info.page >= 0 || is_partial())) await_values();
    if ((info.flags & kItemBegins) || info.page >= 0) {
      StartRow<C>(p, info, shared, stage, is_waiting);
      is_waiting = false;
    }
    const auto load_queries = [&](int begin, int end) {
      const uint8_t* const query = shared + C::query_at;
      for (int n = 0; n < kHeadTiles; ++n) {
        // Columns past the group repeat a head: any written number would do.
        const int head = min(8 * n + g, p.group - 1);
        for (int s = begin; s < end; ++s) {
          const uint8_t* const at = query + (head * C::query_pitch + 16 * s + 2 * t) * 2;
          uint32_t(&to)[2] = q[n][C::holds_queries ? s : 0];
          to[0] = *reinterpret_cast<const uint32_t*>(at);
          to[1] = *reinterpret_cast<const uint32_t*>(at + 16);
        }
      }
    };
    if (C::holds_queries && (info.flags & kItemBegins)) load_queries(0, kSteps);
    if (info.flags & kChunkBegins) {
      chunk.Clear();
      for (int n = 0; n < kHeadTiles; ++n) most[n][0] = most[n][1] = kNoScore;
    }

    if (is_partial()) ClearValues<C>(info, shared + stage * C::stage_bytes + Tile::kBytes);

    float scores[kHeadTiles][4] = {};
    for (int s = 0; s < kSteps; ++s) {
      uint32_t k[4];
      LoadMatrices(k, k_at + Tile::Offset(16 * warp + lane % 16, 16 * s + lane / 16 * 8));
      if (!C::holds_queries) load_queries(s, s + 1);
      for (int n = 0; n < kHeadTiles; ++n) {
        const uint32_t(&of)[2] = q[n][C::holds_queries ? s : 0];
        Mma(scores[n], k, of[0], of[1]);
      }
    }
    release_keys();
    const int position = info.position + 16 * warp + g;
    const bool is_in[2] = {position >= info.begin && position < info.end,
                           position + 8 >= info.begin && position + 8 < info.end};
    float* const turn_mosts = mosts + turn * kWarps * 8 * kHeadTiles;
    for (int n = 0; n < kHeadTiles; ++n) {
      for (int j = 0; j < 4; ++j) {
        if (!is_in[j / 2]) scores[n][j] = -INFINITY;
      }
      for (int c = 0; c < 2; ++c) {
        float x = fmaxf(scores[n][c], scores[n][c + 2]);
        for (int offset = 4; offset < 32; offset *= 2) {
          x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, offset));
        }
        if (g == 0) turn_mosts[(warp * kHeadTiles + n) * 8 + 2 * t + c] = x;
      }
    }
    NamedBarrier(kConsumerBarrier, 32 * kWarps);
    const uint32_t probability = C::probability_at + turn * 8 * kHeadTiles * kProbabilityPitch;
    float decay[kHeadTiles][2];
    for (int n = 0; n < kHeadTiles; ++n) {
      float p_tile[4];
      for (int c = 0; c < 2; ++c) {
        float now = most[n][c];
        for (int w = 0; w < kWarps; ++w) {
          now = fmaxf(now, turn_mosts[(w * kHeadTiles + n) * 8 + 2 * t + c]);
        }
        decay[n][c] = Decay(most[n][c], now, p.scale);
        most[n][c] = now;
        const float offset = ScaledOffset(now, p.scale);
        p_tile[c] = Numerator(scores[n][c], p.scale, offset);
        p_tile[c + 2] = Numerator(scores[n][c + 2], p.scale, offset);
      }
      for (int h = 0; h < 2; ++h) {
        *reinterpret_cast<uint32_t*>(shared + probability + (8 * n + g) * kProbabilityPitch +
                                     (16 * warp + 8 * h + 2 * t) * 2) =
            Transpose(PackBf16(p_tile[2 * h], p_tile[2 * h + 1]));
      }
    }
    NamedBarrier(kConsumerBarrier, 32 * kWarps);
    for (int n = 0; n < kHeadTiles; ++n) {
      for (int j = 0; j < 4; ++j) {
        chunk.l[n][j] *= decay[n][j % 2];
        for (int i = 0; i < C::warp_dim_tiles; ++i) chunk.o[i][n][j] *= decay[n][j % 2];
      }
    }
    await_values();
    for (int pair = 0; pair < kTile / 32; ++pair) {
      uint32_t b[kHeadTiles][4];
      for (int n = 0; n < kHeadTiles; ++n) {
        LoadMatrices(b[n], base + probability + (8 * n + lane % 8) * kProbabilityPitch +
                               (32 * pair + lane / 8 * 8) * 2);
        Mma(chunk.l[n], kOnes, b[n][0], b[n][1]);
        Mma(chunk.l[n], kOnes, b[n][2], b[n][3]);
      }
      for (int i = 0; i < C::warp_dim_tiles; ++i) {
        const int dim_tile = warp + kWarps * i;
        if (C::dim_tiles % kWarps != 0 && dim_tile >= C::dim_tiles) continue;
        for (int half = 0; half < 2; ++half) {
          const int first = 32 * pair + 16 * half;
          uint32_t v[4];
          LoadMatricesTransposed(v, v_at + Tile::Offset(first + lane / 16 * 8 + lane % 8,
                                                        16 * dim_tile + lane / 8 % 2 * 8));
          for (int n = 0; n < kHeadTiles; ++n) {
            Mma(chunk.o[i][n], v, b[n][2 * half], b[n][2 * half + 1]);
          }
        }
      }
    }
    release_stage();
    turn ^= 1;

    if ((info.flags & kChunkEnds) && info.slot < 0) {
      JoinRows<C>(rows, state, chunk, most, p.scale);
    }
    if (!(info.flags & kItemEnds)) continue;
    if (info.slot >= 0) {
      StorePart<C>(
          chunk, most,
          p.layout.parts + (int64_t{info.slot} * p.kv_heads + info.head) * p.layout.part_floats,
          p.group);
      continue;
    }
    store_rows();
  }
}

}  // namespace dorad::kernels::row_attention
