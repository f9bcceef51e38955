// Rows by themselves (decode). Persistent blocks take (item, key head) pairs: one warp copies tiles
// of the cache into a ring of stages, ahead over item boundaries, four warps compute.
//
// Scores are taken transposed, positions by heads, so that the group of query heads is the narrow
// side of the products: S[64, 8] = K Qᵀ with warp w at positions 16 w, and O[head_dim, 8] = Vᵀ P
// with the head_dim in turns of 16 over the warps.
#include <algorithm>
#include <cmath>

#include "kernels/common/launch.h"
#include "kernels/common/status.h"
#include "kernels/decoder/attention_device.cuh"

namespace dorad::kernels {
namespace {

constexpr int kTile = kAttentionTile;
constexpr int kTilePages = kAttentionTilePages;
constexpr int kWarps = 4;  // that compute
constexpr int kThreads = 32 * (kWarps + 2);
constexpr int kQueue = 4;                          // parts that wait for the joining warp
constexpr int kProbabilityPitch = 2 * kTile + 16;  // bytes of a head's row, bank-free
constexpr int kConsumerBarrier = 1;

// What the warps must know of the tile in a stage.
struct alignas(16) TileInfo {
  int32_t position;  // of the tile's first
  int32_t begin, end;
  int32_t flags;
  int32_t row;
  int32_t head;  // key head
  int32_t slot, first;
  int32_t slots;
  int32_t unused[3];
};

// A part that is stored and not yet counted.
struct alignas(16) PartInfo {
  int32_t row;
  int32_t head;
  int32_t first;
  int32_t slots;  // 0: no more parts
};
enum : int32_t {
  kItemBegins = 1,
  kItemEnds = 2,
  kChunkBegins = 4,
  kChunkEnds = 8,
  kStop = 16,
};

// Of one multiprocessor.
constexpr int BlocksOf(int head_dim, int head_tiles) {
  return head_dim == 256 || head_tiles > 1 ? 1 : 2;
}

template <int kHeadDim, int kHeadTiles>
struct Config {
  using Tile = CacheTile<kHeadDim>;
  static constexpr int head_dim = kHeadDim;
  static constexpr int head_tiles = kHeadTiles;
  static constexpr int query_bytes = 8 * kHeadTiles * kHeadDim * 2;
  static constexpr int stage_bytes = 2 * Tile::kBytes;
  static constexpr int blocks = BlocksOf(kHeadDim, kHeadTiles);
  static constexpr int stages = (blocks == 1 ? 222000 : 105000) / (stage_bytes + query_bytes);
  static constexpr int dim_tiles = kHeadDim / 16;
  static constexpr int warp_dim_tiles = (dim_tiles + kWarps - 1) / kWarps;

  static constexpr int query_at = stages * stage_bytes;
  static constexpr int probability_at = query_at + stages * query_bytes;
  static constexpr int most_at = probability_at + 2 * 8 * kHeadTiles * kProbabilityPitch;
  static constexpr int info_at = most_at + 2 * kWarps * 8 * kHeadTiles * 4;
  static constexpr int barrier_at = info_at + stages * static_cast<int>(sizeof(TileInfo));
  static constexpr int part_at = barrier_at + 2 * stages * 8;
  static constexpr int part_barrier_at = part_at + kQueue * static_cast<int>(sizeof(PartInfo));
  static constexpr int shared_bytes = part_barrier_at + 2 * kQueue * 8 + 1024;  // to align stages
};

struct Args {
  CUtensorMap k, v;
  AttentionLayout layout;
  const __nv_bfloat16* q;
  __nv_bfloat16* out;
  const int32_t* pages;
  int32_t items_room;
  int32_t kv_heads;
  int32_t group;
  float scale;  // · log2(e)
  bool is_settled;
};

// Words of an AttentionItem, by the lanes that hold them.
enum { kRow, kBegin, kEnd, kSlot, kSlots, kFirst, kPageBase, kSettled, kPages };

// The copying warp. Items are taken in turns first, then as blocks come free; what is needed of an
// item is loaded while the one before is copied.
template <typename C>
__device__ void Produce(const Args& p, uint8_t* shared, uint32_t base) {
  constexpr int kItemTiles = 2;                // whose pages are in the item
  constexpr int kListTiles = 32 / kTilePages;  // whose pages a warp loads at once
  constexpr int kMostEarly = std::min(C::stages, 8);
  const int lane = threadIdx.x % 32;
  const uint32_t full = base + C::barrier_at, empty = full + 8 * C::stages;
  const uint64_t policy = EvictFirst();
  const int grid = static_cast<int>(gridDim.x);
  if (!p.is_settled) WaitForPrevious();
  bool is_waiting = p.is_settled;
  const auto load_item = [&](int work) {
    // Past the end, anything: it is not used.
    const int index = min(work / p.kv_heads, p.items_room - 1);
    return reinterpret_cast<const int32_t*>(p.layout.items + index)[lane % 16];
  };
  int work = blockIdx.x, next_work = work + grid;
  int item = load_item(work), next_item = load_item(next_work);
  const int total = p.layout.header->items * p.kv_heads;
  int stage = 0;
  uint32_t parity = 0;
  while (work < total) {
    const auto word = [item](int at) { return __shfl_sync(0xFFFFFFFF, item, at); };
    const int begin = word(kBegin), end = word(kEnd), row = word(kRow);
    const int slot = word(kSlot), slots = word(kSlots), first_slot = word(kFirst);
    const int head = work % p.kv_heads;
    const int32_t* const pages = p.pages + word(kPageBase);
    const int first_tile = begin / kTile, last_tile = (end - 1) / kTile;
    const auto load_pages = [&](int tile) {
      const int index = tile * kTilePages + lane;
      return index * kKvPageTokens < end ? pages[index] : 0;
    };
    int list = 0, next_list = 0;
    if (last_tile - first_tile >= kItemTiles) next_list = load_pages(first_tile + kItemTiles);
    const auto pages_begin = [&](int tile) {
      return max(begin / kKvPageTokens, tile * kTilePages) - tile * kTilePages;
    };
    const auto pages_end = [&](int tile) {
      return min((end - 1) / kKvPageTokens - tile * kTilePages, kTilePages - 1) + 1;
    };
    const auto copy = [&](int tile, int to_stage) {
      const int offset = tile - first_tile;
      const bool is_in_item = offset < kItemTiles;
      CopyPages<C::head_dim>(p.k, p.v, base + to_stage * C::stage_bytes, full + 8 * to_stage,
                             is_in_item ? item : list,
                             is_in_item ? kPages + offset * kTilePages
                                        : (offset - kItemTiles) % kListTiles * kTilePages,
                             p.kv_heads, head, pages_begin(tile), pages_end(tile), policy);
    };
    int early_tiles = 0;  // whose copies have begun
    if (is_waiting) {
      // The block's first item. Its queries, and the pages of this step, are not there yet.
      const int settled = word(kSettled);
      list = next_list;
      while (early_tiles < kMostEarly && first_tile + early_tiles <= last_tile &&
             min(end, (first_tile + early_tiles + 1) * kTile) <= settled) {
        copy(first_tile + early_tiles, early_tiles);
        ++early_tiles;
      }
      WaitForPrevious();
      is_waiting = false;
    }
    int next = 0;
    if (lane == 0) next = 2 * grid + atomicAdd(&p.layout.header->next, 1);
    for (int tile = first_tile; tile <= last_tile; ++tile) {
      const int offset = tile - first_tile;
      if (offset >= kItemTiles && (offset - kItemTiles) % kListTiles == 0) {
        list = next_list;
        if (last_tile - tile >= kListTiles) next_list = load_pages(tile + kListTiles);
      }
      BarrierWait(empty + 8 * stage, parity ^ 1);
      const uint32_t stage_full = full + 8 * stage;
      if (lane == 0) {
        TileInfo info;
        info.position = tile * kTile;
        info.begin = begin;
        info.end = end;
        constexpr int kPerChunk = kAttentionChunk / kTile;
        info.flags = (tile == first_tile ? kItemBegins : 0) |
                     (tile == last_tile ? kItemEnds | kChunkEnds : 0) |
                     (tile % kPerChunk == kPerChunk - 1 ? kChunkEnds : 0) |
                     (tile % kPerChunk == 0 || tile == first_tile ? kChunkBegins : 0);
        info.row = row;
        info.head = head;
        info.slot = slot;
        info.first = first_slot;
        info.slots = slots;
        reinterpret_cast<TileInfo*>(shared + C::info_at)[stage] = info;
        const uint32_t query_bytes = tile == first_tile ? p.group * C::head_dim * 2 : 0;
        BarrierArriveExpect(
            stage_full,
            (pages_end(tile) - pages_begin(tile)) * kKvPageTokens * C::head_dim * 4 + query_bytes);
        if (tile == first_tile) {
          CopyBytes(base + C::query_at + stage * C::query_bytes,
                    p.q + (int64_t{row} * p.kv_heads + head) * p.group * C::head_dim, query_bytes,
                    stage_full);
        }
      }
      __syncwarp();
      if (offset >= early_tiles) copy(tile, stage);
      if (++stage == C::stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    work = next_work;
    item = next_item;
    next_work = __shfl_sync(0xFFFFFFFF, next, 0);
    next_item = load_item(next_work);
  }
  if (is_waiting) WaitForPrevious();
  BarrierWait(empty + 8 * stage, parity ^ 1);
  if (lane == 0) {
    reinterpret_cast<TileInfo*>(shared + C::info_at)[stage].flags = kStop;
    BarrierArrive(full + 8 * stage);
    // The last block to come here leaves the counters as the next launch wants them.
    AttentionHeader* const header = p.layout.header;
    if (atomicAdd(&header->done, 1) == grid - 1) {
      header->next = 0;
      header->done = 0;
    }
  }
}

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

template <typename C>
__device__ void StorePart(const Rows<C>& chunk, const float (&most)[C::head_tiles][2], float* part,
                          int group) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const int pairs = AttentionPartPairs(group);
  for (int n = 0; n < C::head_tiles; ++n) {
    if (warp == 0 && g == 0) {
      __stcg(reinterpret_cast<float4*>(part + n * 16) + t,
             make_float4(most[n][0], chunk.l[n][0], most[n][1], chunk.l[n][1]));
    }
    for (int i = 0; i < C::warp_dim_tiles; ++i) {
      const int dim_tile = warp + kWarps * i;
      if (dim_tile >= C::dim_tiles || t >= pairs) continue;
      const float(&o)[4] = chunk.o[i][n];
      __stcg(PartNumerators<C>(part, pairs, dim_tile, n, g, t),
             make_float4(o[0], o[1], o[2], o[3]));
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

// Joins the parts of a row in their order and writes the row; one warp. `part` is the first one,
// `stride` floats from one to the next.
template <typename C>
__device__ void JoinParts(float* part, int64_t stride, int parts, int group, float scale,
                          __nv_bfloat16* out) {
  constexpr int kAhead = 4;     // parts whose loads are under way together
  constexpr int kTogether = 4;  // places of a lane, likewise
  const int lane = threadIdx.x % 32;
  const int pairs = AttentionPartPairs(group);
  // A lane has one pair of heads, and dims in turns of the tiles that fit a warp.
  const int tiles = 4 / pairs;
  const int t = lane % pairs, g = lane / pairs % 8, first_tile = lane / (8 * pairs);
  for (int n = 0; n < C::head_tiles; ++n) {
    for (int from = first_tile; from < C::dim_tiles; from += tiles * kTogether) {
      SoftmaxState state[2];
      float4 rows[kTogether];
      for (float4& x : rows) x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      for (int first = 0; first < parts; first += kAhead) {
        float4 ml[kAhead], o[kAhead][kTogether];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (first + a >= parts) break;
          float* const at = part + (first + a) * stride;
          ml[a] = __ldcg(reinterpret_cast<const float4*>(at + n * 16) + t);
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            const int dim_tile = from + i * tiles;
            if (dim_tile < C::dim_tiles) {
              o[a][i] = __ldcg(PartNumerators<C>(at, pairs, dim_tile, n, g, t));
            }
          }
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (first + a >= parts) break;
          const JoinFactors f0 = JoinChunk(state[0], ml[a].x, ml[a].y, scale);
          const JoinFactors f1 = JoinChunk(state[1], ml[a].z, ml[a].w, scale);
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            rows[i].x = Join(rows[i].x, o[a][i].x, f0);
            rows[i].y = Join(rows[i].y, o[a][i].y, f1);
            rows[i].z = Join(rows[i].z, o[a][i].z, f0);
            rows[i].w = Join(rows[i].w, o[a][i].w, f1);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int dim = 16 * (from + i * tiles) + g, head = 8 * n + 2 * t;
        if (dim >= C::head_dim) continue;
        __nv_bfloat16* const at = out + head * C::head_dim + dim;
        if (head < group) {
          at[0] = __float2bfloat16_rn(__fdiv_rn(rows[i].x, state[0].sum));
          at[8] = __float2bfloat16_rn(__fdiv_rn(rows[i].z, state[0].sum));
        }
        if (head + 1 < group) {
          at[C::head_dim] = __float2bfloat16_rn(__fdiv_rn(rows[i].y, state[1].sum));
          at[C::head_dim + 8] = __float2bfloat16_rn(__fdiv_rn(rows[i].w, state[1].sum));
        }
      }
    }
  }
}

// The joining warp. Takes all parts that are there at once: a fence costs as much as a tile.
template <typename C>
__device__ void JoinAll(const Args& p, const uint8_t* shared, uint32_t base) {
  const uint32_t full = base + C::part_barrier_at, empty = full + 8 * kQueue;
  const int lane = threadIdx.x % 32;
  int done = 0;
  while (true) {
    BarrierWait(full + 8 * (done % kQueue), done / kQueue % 2);
    const int mine = done + lane, at = mine % kQueue;
    const bool is_there = lane < kQueue && BarrierTest(full + 8 * at, mine / kQueue % 2);
    // Lanes up to the first without a part.
    const int count = __ffs(~__ballot_sync(0xFFFFFFFF, is_there)) - 1;
    PartInfo part{0, 0, 0, -1};
    bool is_last = false;
    if (lane < count) {
      part = reinterpret_cast<const PartInfo*>(shared + C::part_at)[at];
      BarrierArrive(empty + 8 * at);
    }
    FenceDevice();
    if (part.slots > 0) {
      int32_t* const arrived = p.layout.arrived + part.first * p.kv_heads + part.head;
      is_last = atomicAdd(arrived, 1) == part.slots - 1;
      if (is_last) *arrived = 0;
    }
    uint32_t lasts = __ballot_sync(0xFFFFFFFF, is_last);
    if (lasts != 0) FenceDevice();
    for (; lasts != 0; lasts &= lasts - 1) {
      const int owner = __ffs(lasts) - 1;
      const int64_t row = __shfl_sync(0xFFFFFFFF, part.row, owner);
      const int64_t head = __shfl_sync(0xFFFFFFFF, part.head, owner);
      const int64_t first = __shfl_sync(0xFFFFFFFF, part.first, owner);
      JoinParts<C>(p.layout.parts + (first * p.kv_heads + head) * p.layout.part_floats,
                   int64_t{p.kv_heads} * p.layout.part_floats,
                   __shfl_sync(0xFFFFFFFF, part.slots, owner), p.group, p.scale,
                   p.out + (row * p.kv_heads + head) * p.group * C::head_dim);
    }
    if (__any_sync(0xFFFFFFFF, part.slots == 0)) return;
    done += count;
  }
}

template <typename C>
__device__ void StoreRows(const Rows<C>& rows, const SoftmaxState (&state)[C::head_tiles][2],
                          __nv_bfloat16* out, int group) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  for (int n = 0; n < C::head_tiles; ++n) {
    for (int i = 0; i < C::warp_dim_tiles; ++i) {
      const int dim_tile = warp + kWarps * i;
      if (dim_tile >= C::dim_tiles) continue;
      const float(&o)[4] = rows.o[i][n];
      for (int h = 0; h < 2; ++h) {
        // Heads come along the lanes' rows.
        const uint32_t pair = Transpose(PackBf16(__fdiv_rn(o[2 * h], state[n][0].sum),
                                                 __fdiv_rn(o[2 * h + 1], state[n][1].sum)));
        if (8 * n + g < group) {
          *reinterpret_cast<uint32_t*>(out + (8 * n + g) * C::head_dim + 16 * dim_tile + 8 * h +
                                       2 * t) = pair;
        }
      }
    }
  }
}

template <typename C>
__device__ void Consume(const Args& p, uint8_t* shared, uint32_t base) {
  using Tile = typename C::Tile;
  constexpr int kHeadTiles = C::head_tiles;
  constexpr int kSteps = C::head_dim / 16;
  constexpr uint32_t kOnes[4] = {0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const uint32_t full = base + C::barrier_at, empty = full + 8 * C::stages;
  float* const mosts = reinterpret_cast<float*>(shared + C::most_at);

  uint32_t q[kHeadTiles][kSteps][2];
  Rows<C> rows, chunk;
  SoftmaxState state[kHeadTiles][2];
  float most[kHeadTiles][2];
  const uint32_t part_full = base + C::part_barrier_at, part_empty = part_full + 8 * kQueue;
  const auto queue_part = [&](int index, const PartInfo& part) {
    __syncwarp();
    if (lane != 0) return;
    if (warp == 0) reinterpret_cast<PartInfo*>(shared + C::part_at)[index % kQueue] = part;
    BarrierArrive(part_full + 8 * (index % kQueue));
  };
  int stage = 0, turn = 0, parts = 0;
  uint32_t parity = 0;
  while (true) {
    BarrierWait(full + 8 * stage, parity);
    const TileInfo info = reinterpret_cast<const TileInfo*>(shared + C::info_at)[stage];
    if (info.flags & kStop) {
      BarrierWait(part_empty + 8 * (parts % kQueue), parts / kQueue % 2 ^ 1);
      queue_part(parts, {0, 0, 0, 0});
      return;
    }
    const uint32_t k_at = base + stage * C::stage_bytes, v_at = k_at + Tile::kBytes;
    if (info.flags & kItemBegins) {
      rows.Clear();
      const uint8_t* const query = shared + C::query_at + stage * C::query_bytes;
      for (int n = 0; n < kHeadTiles; ++n) {
        state[n][0] = state[n][1] = SoftmaxState();
        // Columns past the group repeat a head: any number does but one that was never written.
        const int head = min(8 * n + g, p.group - 1);
        for (int s = 0; s < kSteps; ++s) {
          const uint8_t* const at = query + (head * C::head_dim + 16 * s + 2 * t) * 2;
          q[n][s][0] = *reinterpret_cast<const uint32_t*>(at);
          q[n][s][1] = *reinterpret_cast<const uint32_t*>(at + 16);
        }
      }
    }
    if (info.flags & kChunkBegins) {
      chunk.Clear();
      for (int n = 0; n < kHeadTiles; ++n) most[n][0] = most[n][1] = kNoScore;
    }

    float scores[kHeadTiles][4] = {};
    for (int s = 0; s < kSteps; ++s) {
      uint32_t k[4];
      LoadMatrices(k, k_at + Tile::Offset(16 * warp + lane % 16, 16 * s + lane / 16 * 8));
      for (int n = 0; n < kHeadTiles; ++n) Mma(scores[n], k, q[n][s][0], q[n][s][1]);
    }
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
    // Values out of reach were never written or never copied: they must not be NaN.
    const bool is_whole = info.begin <= info.position && info.end >= info.position + kTile;
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
          if (!is_whole) {
            for (int h = 0; h < 2; ++h) {
              const int at = info.position + first + 8 * h + 2 * t;
              const uint32_t mask = (at >= info.begin && at < info.end ? 0xFFFFu : 0u) |
                                    (at + 1 >= info.begin && at + 1 < info.end ? 0xFFFF0000u : 0u);
              v[2 * h] &= mask;
              v[2 * h + 1] &= mask;
            }
          }
          for (int n = 0; n < kHeadTiles; ++n) {
            Mma(chunk.o[i][n], v, b[n][2 * half], b[n][2 * half + 1]);
          }
        }
      }
    }
    __syncwarp();
    if (lane == 0) BarrierArrive(empty + 8 * stage);
    turn ^= 1;
    if (++stage == C::stages) {
      stage = 0;
      parity ^= 1;
    }

    if ((info.flags & kChunkEnds) && info.slot < 0) {
      JoinRows<C>(rows, state, chunk, most, p.scale);
    }
    if (!(info.flags & kItemEnds)) continue;
    if (info.slot >= 0) {
      BarrierWait(part_empty + 8 * (parts % kQueue), parts / kQueue % 2 ^ 1);
      StorePart<C>(
          chunk, most,
          p.layout.parts + (int64_t{info.slot} * p.kv_heads + info.head) * p.layout.part_floats,
          p.group);
      queue_part(parts, {info.row, info.head, info.first, info.slots});
      ++parts;
      continue;
    }
    StoreRows<C>(rows, state,
                 p.out + (int64_t{info.row} * p.kv_heads + info.head) * p.group * C::head_dim,
                 p.group);
  }
}

template <typename C>
__global__ void __launch_bounds__(kThreads, C::blocks)
    RowAttentionKernel(const __grid_constant__ Args p) {
  LaunchDependents();
  extern __shared__ uint8_t dynamic[];
  uint8_t* const shared = dynamic + (1024 - SharedAddress(dynamic) % 1024) % 1024;
  const uint32_t base = SharedAddress(shared);
  if (threadIdx.x == 0) {
    PrefetchTensorMap(&p.k);
    PrefetchTensorMap(&p.v);
    for (int i = 0; i < C::stages; ++i) {
      BarrierInit(base + C::barrier_at + 8 * i, 1);
      BarrierInit(base + C::barrier_at + 8 * (C::stages + i), kWarps);
    }
    for (int i = 0; i < kQueue; ++i) {
      BarrierInit(base + C::part_barrier_at + 8 * i, kWarps);
      BarrierInit(base + C::part_barrier_at + 8 * (kQueue + i), 1);
    }
    BarrierInitFence();
  }
  __syncthreads();
  // The producing warp waits for the kernel before, and the others for it, directly or not.
  if (threadIdx.x < 32 * kWarps) {
    Consume<C>(p, shared, base);
  } else if (threadIdx.x < 32 * (kWarps + 1)) {
    Produce<C>(p, shared, base);
  } else {
    JoinAll<C>(p, shared, base);
  }
}

cudaError_t Multiprocessors(int32_t* count) {
  int device;
  DORAD_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

template <int kHeadDim, int kHeadTiles>
cudaError_t Launch(const AttentionLaunch& launch, cudaStream_t stream) {
  using C = Config<kHeadDim, kHeadTiles>;
  static_assert(C::blocks * (C::shared_bytes + 1024) <= 228 * 1024 && C::stages >= 3);
  const PagedAttentionParams& params = launch.params;
  Args args;
  DORAD_CUDA_RETURN_IF_ERROR(EncodeCache<kHeadDim>(params.cache.k, kKvPageTokens, &args.k));
  DORAD_CUDA_RETURN_IF_ERROR(EncodeCache<kHeadDim>(params.cache.v, kKvPageTokens, &args.v));
  args.layout = launch.layout;
  args.items_room = params.rows.rows + launch.layout.slots;
  args.q = params.q;
  args.out = params.out;
  args.pages = params.rows.pages;
  args.kv_heads = params.shape.kv_heads;
  args.group = AttentionGroup(params.shape);
  args.is_settled = params.is_settled;
  args.scale = params.softmax_scale * 1.44269504088896340736f;
  int32_t blocks;
  DORAD_CUDA_RETURN_IF_ERROR(AttentionBlocks(params.shape, &blocks));
  DORAD_CUDA_RETURN_IF_ERROR(cudaFuncSetAttribute(
      RowAttentionKernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::shared_bytes));
  return LaunchEarly(RowAttentionKernel<C>, blocks, kThreads, C::shared_bytes, stream, args);
}

template <int kHeadDim>
cudaError_t LaunchGroup(const AttentionLaunch& launch, cudaStream_t stream) {
  return AttentionGroup(launch.params.shape) <= 8 ? Launch<kHeadDim, 1>(launch, stream)
                                                  : Launch<kHeadDim, 2>(launch, stream);
}

}  // namespace

cudaError_t AttentionBlocks(const AttentionShape& shape, int32_t* blocks) {
  DORAD_CUDA_RETURN_IF_ERROR(Multiprocessors(blocks));
  *blocks *= BlocksOf(shape.head_dim, (AttentionGroup(shape) + 7) / 8);
  return cudaSuccess;
}

cudaError_t LaunchRowAttention(const AttentionLaunch& launch, cudaStream_t stream) {
  switch (launch.params.shape.head_dim) {
    case 64:
      return LaunchGroup<64>(launch, stream);
    case 80:
      return LaunchGroup<80>(launch, stream);
    case 96:
      return LaunchGroup<96>(launch, stream);
    case 128:
      return LaunchGroup<128>(launch, stream);
    case 256:
      return LaunchGroup<256>(launch, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace dorad::kernels
