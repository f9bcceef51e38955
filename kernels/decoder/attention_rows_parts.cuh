// Parts of rows in the row kernel: what a chunk, or several, gave for a row, in registers and in
// the workspace, where one block leaves it and another one takes it.
#pragma once

#include "kernels/decoder/attention_rows.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/memory.cuh"

namespace dorad::kernels::row_attention {

// One warp's part of kTiles · 8 columns: columns 8 n + 2 t (+ 1), dims 16 (w + 4 i) + g (+ 8). The
// columns are the query heads of one key head's group, or those of several rows, each of which has
// AttentionRowColumns of them.
template <typename C, int kTiles>
struct Columns {
  float o[C::warp_dim_tiles][kTiles][4];
  float l[kTiles][2];

  __device__ void Clear() {
    for (int n = 0; n < kTiles; ++n) {
      l[n][0] = l[n][1] = 0.0f;
      for (int j = 0; j < 4; ++j) {
        for (int i = 0; i < C::warp_dim_tiles; ++i) o[i][n][j] = 0.0f;
      }
    }
  }
};

// nvcc does not apply the members' initial values to arrays of arrays.
template <int kTiles>
__device__ void ClearState(SoftmaxState (&state)[kTiles][2]) {
  for (int n = 0; n < kTiles; ++n) state[n][0] = state[n][1] = {kNoScore, 0.0f};
}

// Numerators of dims 16 · dim_tile + g (+ 8) and heads 8 n + 2 t (+ 1), for t < pairs.
template <typename C>
__device__ float4* PartNumerators(float* part, int pairs, int dim_tile, int n, int g, int t) {
  return reinterpret_cast<float4*>(part + C::head_tiles * 16) +
         ((dim_tile * C::head_tiles + n) * 8 + g) * pairs + t;
}

template <typename C>
__device__ float* PartAt(const Args<typename C::Isa>& p, int slot, int head) {
  return p.layout.parts + (int64_t{slot} * p.kv_heads + head) * p.layout.part_floats;
}

// Stores sixteen bytes of a part; other blocks may poll for them.
__device__ inline void StorePlace(float4* place, const float (&values)[4]) {
  uint32_t bits[4];
  for (int i = 0; i < 4; ++i) bits[i] = min(__float_as_uint(values[i]), kNoPart - 1);
  StoreRelaxed(reinterpret_cast<uint4*>(place), make_uint4(bits[0], bits[1], bits[2], bits[3]));
}

// Loads a place again until it is written.
__device__ inline void AwaitPlace(uint4& bits, const uint4* place) {
  while (bits.x == kNoPart || bits.y == kNoPart || bits.z == kNoPart || bits.w == kNoPart) {
    bits = LoadRelaxed(place);
  }
}

__device__ inline void ResetPlace(uint4* place) {
  *place = make_uint4(kNoPart, kNoPart, kNoPart, kNoPart);
}

// The parts of an item's rows.
template <typename C, int kTiles>
__device__ void StoreParts(const Args<typename C::Isa>& p, const TileInfo& info,
                           const Columns<C, kTiles>& rows, const SoftmaxState (&state)[kTiles][2]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const int pairs = AttentionPartPairs(p.group), columns = AttentionRowColumns(p.group);
  const int stride = info.count > 1 ? info.first : 0;
  for (int n = 0; n < kTiles; ++n) {
    const int column = 8 * n + 2 * t;
    const int row = column / columns, head = column % columns;
    if (row >= info.count) continue;
    float* const part = PartAt<C>(p, info.slot + row * stride, info.head);
    const int head_tile = head / 8, pair = head % 8 / 2;
    if (warp == 0 && g == 0) {
      // Places of pairs that no head has are read as well.
      for (int place = pair; place < 4; place += pairs) {
        StorePlace(reinterpret_cast<float4*>(part + head_tile * 16) + place,
                   {state[n][0].most, state[n][0].sum, state[n][1].most, state[n][1].sum});
      }
    }
    for (int i = 0; i < C::warp_dim_tiles; ++i) {
      const int dim_tile = warp + kWarps * i;
      if (dim_tile >= C::dim_tiles) continue;
      const float(&o)[4] = rows.o[i][n];
      StorePlace(PartNumerators<C>(part, pairs, dim_tile, head_tile, g, pair),
                 {o[0], o[1], o[2], o[3]});
    }
  }
}

template <typename C, int kTiles>
__device__ void JoinColumns(Columns<C, kTiles>& rows, SoftmaxState (&state)[kTiles][2],
                            const Columns<C, kTiles>& chunk, const float (&most)[kTiles][2],
                            float scale) {
  for (int n = 0; n < kTiles; ++n) {
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
__device__ void JoinParts(Columns<C, C::head_tiles>& rows, SoftmaxState (&state)[C::head_tiles][2],
                          float* parts, int part_floats, int count, int group, float scale) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const int pairs = AttentionPartPairs(group);
  // Short code: it comes from memory, too.
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    float* const part = parts + i * part_floats;
    Columns<C, C::head_tiles> chunk;
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
    JoinColumns(rows, state, chunk, most, scale);
  }
}

// The part that a row begins with: loaded early, taken when it is needed.
template <typename C>
struct FirstPart {
  uint4 softmax[C::head_tiles], numerators[C::head_tiles][C::warp_dim_tiles];

  __device__ static uint4* SoftmaxAt(float* part, int n) {
    return reinterpret_cast<uint4*>(part + n * 16) + threadIdx.x % 4;
  }
  // nullptr: this lane has none there.
  __device__ static uint4* NumeratorsAt(float* part, int pairs, int n, int i) {
    const int lane = threadIdx.x % 32, dim_tile = threadIdx.x / 32 + kWarps * i;
    const bool has = lane % 4 < pairs && dim_tile < C::dim_tiles;
    return has ? reinterpret_cast<uint4*>(
                     PartNumerators<C>(part, pairs, dim_tile, n, lane / 4, lane % 4))
               : nullptr;
  }

  __device__ void Load(float* part, int group) {
    const int pairs = AttentionPartPairs(group);
    for (int n = 0; n < C::head_tiles; ++n) {
      softmax[n] = LoadRelaxed(SoftmaxAt(part, n));
      for (int i = 0; i < C::warp_dim_tiles; ++i) {
        const uint4* const at = NumeratorsAt(part, pairs, n, i);
        numerators[n][i] = at != nullptr ? LoadRelaxed(at) : make_uint4(0, 0, 0, 0);
      }
    }
  }

  // Waits for what was not there yet, and resets the part's places. All computing threads.
  __device__ void Take(float* part, int group, Columns<C, C::head_tiles>& rows,
                       SoftmaxState (&state)[C::head_tiles][2]) {
    const int pairs = AttentionPartPairs(group);
    for (int n = 0; n < C::head_tiles; ++n) {
      AwaitPlace(softmax[n], SoftmaxAt(part, n));
      state[n][0] = {__uint_as_float(softmax[n].x), __uint_as_float(softmax[n].y)};
      state[n][1] = {__uint_as_float(softmax[n].z), __uint_as_float(softmax[n].w)};
      for (int i = 0; i < C::warp_dim_tiles; ++i) {
        uint4& bits = numerators[n][i];
        if (uint4* const at = NumeratorsAt(part, pairs, n, i); at != nullptr) {
          AwaitPlace(bits, at);
          ResetPlace(at);
        }
        float(&o)[4] = rows.o[i][n];
        o[0] = __uint_as_float(bits.x);
        o[1] = __uint_as_float(bits.y);
        o[2] = __uint_as_float(bits.z);
        o[3] = __uint_as_float(bits.w);
      }
    }
    // All warps have read these.
    NamedBarrier(kConsumerBarrier, 32 * kWarps);
    if (threadIdx.x >= 4) return;
    for (int n = 0; n < C::head_tiles; ++n) ResetPlace(SoftmaxAt(part, n));
  }
};

// The parts of a row on their way to shared memory, a round of them at a time: as many as fit. All
// computing threads; each has the same places of every round.
template <typename C>
class PartRounds {
 public:
  // No more than registers hold: with items of several rows the compiler keeps fewer.
  static constexpr int kMost = C::shares ? 8192 : 20480;
  static constexpr int kBytes = C::stage_bytes / 2 < kMost ? C::stage_bytes / 2 : kMost;
  static_assert(kBytes >= C::part_bytes);

  // `places`, of a part, and `stride`, from one to the next, in units of 16 bytes.
  __device__ PartRounds(float* parts, int64_t stride, int places, int count)
      : parts_(reinterpret_cast<uint4*>(parts)), stride_(stride), places_(places), count_(count) {
    int part = static_cast<int>(threadIdx.x) / places;
    int place = static_cast<int>(threadIdx.x) % places;
    const int parts_on = kThreads / places, places_on = kThreads % places;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      at_[i] = static_cast<int>(part * stride) + place;
      part += parts_on;
      place += places_on;
      if (place < places) continue;
      place -= places;
      ++part;
    }
  }
  __device__ int most() const { return kBytes / 16 / places_; }
  __device__ int count(int first) const { return min(most(), count_ - first); }

  // Loads a round that begins with part `first`: no instruction needs it before Take.
  __device__ void Load(int first) {
    const int end = count(first) * places_;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (static_cast<int>(threadIdx.x) + kThreads * i >= end) break;
      bits_[i] = LoadRelaxed(parts_ + first * stride_ + at_[i]);
    }
  }
  // Waits for what was not there yet, and resets the parts' places to kNoPart.
  __device__ void Take(int first, uint4* to) {
    const int end = count(first) * places_;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int place = static_cast<int>(threadIdx.x) + kThreads * i;
      if (place >= end) break;
      uint4* const from = parts_ + first * stride_ + at_[i];
      AwaitPlace(bits_[i], from);
      to[place] = bits_[i];
      ResetPlace(from);
    }
  }

 private:
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kEach = kBytes / 16 / kThreads;
  static_assert(kEach * kThreads * 16 == kBytes);

  uint4* const parts_;
  const int64_t stride_;
  const int places_, count_;
  int at_[kEach];  // in a round, from its first part on
  uint4 bits_[kEach];
};

// Joins all parts of a row in the memory of one stage: in one half those of a round, while the next
// round's are on their way to the other.
template <typename C>
__device__ void JoinAll(const Args<typename C::Isa>& p, const TileInfo& info, uint8_t* stage,
                        Columns<C, C::head_tiles>& rows, SoftmaxState (&state)[C::head_tiles][2]) {
  const int part_floats = p.layout.part_floats;
  PartRounds<C> rounds(PartAt<C>(p, info.first, info.head), int64_t{p.kv_heads} * part_floats / 4,
                       part_floats / 4, info.count);
  uint8_t* half = stage;
  rounds.Load(0);
#pragma unroll 1
  for (int first = 0; first < info.count; first += rounds.most()) {
    // All have joined what was in this half: before the barrier of the round between.
    rounds.Take(first, reinterpret_cast<uint4*>(half));
    NamedBarrier(kConsumerBarrier, 32 * kWarps);
    if (first + rounds.most() < info.count) rounds.Load(first + rounds.most());
    JoinParts<C>(rows, state, reinterpret_cast<float*>(half), part_floats, rounds.count(first),
                 p.group, p.scale);
    half = half == stage ? stage + PartRounds<C>::kBytes : stage;
  }
  // Fetches will write there next.
  C::Isa::FenceStages();
}

// The result of a row.
template <typename C>
__device__ void StoreRow(const Args<typename C::Isa>& p, const TileInfo& info,
                         const Columns<C, C::head_tiles>& rows,
                         const SoftmaxState (&state)[C::head_tiles][2]) {
  __nv_bfloat16* const out =
      p.out + (int64_t{info.row} * p.kv_heads + info.head) * p.group * C::head_dim;
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
        if (8 * n + g < p.group) {
          *reinterpret_cast<uint32_t*>(out + (8 * n + g) * C::head_dim + 16 * dim_tile + 8 * h +
                                       2 * t) = pair;
        }
      }
    }
  }
}

}  // namespace dorad::kernels::row_attention
