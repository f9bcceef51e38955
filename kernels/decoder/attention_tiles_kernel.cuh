// Tiles of rows (prefill): up to 128 query rows, the tokens of one sequence by the query heads of
// one key head, in two warpgroups of 64; tiles of the cache are copied into a ring of stages, on
// Hopper by a warp of its own. Heads of 256 have 64 query rows: both warpgroups compute their
// scores, and each half of their outputs, because the registers of one do not hold all. In the
// order of attention_layout.h: a chunk's numerators have separate accumulators and are added to the
// row's at the chunk's end. Defines LaunchTileAttention.
#pragma once

#include <cmath>

#include "kernels/common/status.h"
#include "kernels/decoder/attention_device.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/launch.h"
#include "kernels/isa/shared.cuh"
#include "kernels/isa/sm90/wgmma.cuh"
#include "kernels/pipeline/ring.cuh"
#include "kernels/pipeline/stage_barriers.cuh"

namespace dorad::kernels {
namespace tile_attention {

constexpr int kTile = kAttentionTile;
constexpr int kTilePages = kAttentionTilePages;
constexpr int kGroups = 2;  // warpgroups that compute
constexpr int kConsumers = 128 * kGroups;
constexpr int kRegistersConsumer = 232;
constexpr int kRegistersProducer = 40;
constexpr int kAllBarrier = 1;    // named barriers: of both groups,
constexpr int kGroupBarrier = 2;  // and of each

template <typename Isa_, int kHeadDim>
struct Config {
  using Isa = Isa_;
  using Tile = CacheTile<kHeadDim>;
  // Hopper's copying warp is in a warpgroup of its own, because registers move by groups. Elsewhere
  // one more warp would take a third of the registers: those that compute copy, too.
  static constexpr int threads = kConsumers + (Isa::kHasCopyEngine ? 128 : 0);
  static constexpr int fillers = Isa::kHasCopyEngine ? 1 : kConsumers / 32;
  static_assert(Tile::kColumns == 64);
  static constexpr int head_dim = kHeadDim;
  static constexpr int tile_rows = AttentionTileRows(kHeadDim);
  static constexpr int row_groups = tile_rows / 64;                 // of distinct rows
  static constexpr int out_dims = kHeadDim * row_groups / kGroups;  // of a group
  static constexpr int stage_bytes = 2 * Tile::kBytes;
  static constexpr int stages =
      Isa::kHasCopyEngine ? (kHeadDim > 128 ? 3 : 4) : 64 * 1024 / stage_bytes;
  using Barriers = StageBarriers<Isa, stages>;
  static constexpr int query_at = stages * stage_bytes;
  static constexpr int ones_at = query_at + row_groups * Tile::kBytes;
  static constexpr int barrier_at = ones_at + 1024;
  static constexpr int shared_bytes = barrier_at + Barriers::kBytes + 1024;  // to align the stages
  static_assert(shared_bytes <= Isa::kSharedBytes);
};

template <typename Isa>
struct Args {
  typename Isa::Map k, v;
  AttentionLayout layout;
  const __nv_bfloat16* q;
  __nv_bfloat16* out;
  const int32_t* pages;
  const int32_t* reach;  // StepRows::reach
  int32_t kv_heads;
  int32_t group;
  int32_t window;
  float scale;  // · log2(e)
};

// The tile's positions: [begin, end) is the union over its rows.
struct Span {
  AttentionRowTile tile;
  int head;
  int begin, end;
  __device__ int FirstTile() const { return begin / kTile; }
  __device__ int EndTile() const { return (end + kTile - 1) / kTile; }
};

// Hopper's copying warp.
template <typename C>
__device__ void Produce(const Args<typename C::Isa>& p, const Span& span, uint32_t base) {
  using Isa = typename C::Isa;
  const int lane = threadIdx.x % 32;
  const uint32_t full = base + C::barrier_at, empty = full + 8 * C::stages;
  const typename Isa::Policy policy = Isa::EvictLast();
  const int32_t* const pages = p.pages + span.tile.page_base;
  RingPosition ring;
  int page = 0;
  for (int tile = span.FirstTile(); tile < span.EndTile(); ++tile) {
    const int page_lane = (tile - span.FirstTile()) % 8 * kTilePages;
    if (page_lane == 0) {
      const int index = tile * kTilePages + lane;
      page = index * kKvPageTokens < span.end ? pages[index] : 0;
    }
    const int first = max(span.begin / kKvPageTokens, tile * kTilePages) - tile * kTilePages;
    const int end = min((span.end - 1) / kKvPageTokens - tile * kTilePages, kTilePages - 1) + 1;
    BarrierWait(empty + 8 * ring.stage, ring.parity ^ 1);
    if (lane == 0)
      Isa::Expect(full + 8 * ring.stage, (end - first) * kKvPageTokens * C::head_dim * 4);
    __syncwarp();
    Isa::template FetchPages<C::head_dim>(
        p.k, p.v, base + ring.stage * C::stage_bytes, full + 8 * ring.stage,
        {page, page_lane, p.kv_heads, span.head, first, end}, policy);
    ring.Advance(C::stages);
  }
}

// Where there is no copy engine: the warp's share of the tiles that the warps of a block fetch for
// each other, eight rows of each.
template <typename C>
class TileShare {
 public:
  __device__ TileShare(const Args<typename C::Isa>& p, const Span& span, uint32_t base)
      : p_(p), span_(span), base_(base) {}

  // Keys, then values of each tile in turn, to a free stage.
  __device__ void FetchKeys(int tile, int stage) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int turn = (tile - span_.FirstTile()) % 32;
    if (turn == 0) {
      const int index = (tile + lane) * kTilePages + Warp() / kWarpsOfPage;
      const bool is_in = index >= span_.begin / kKvPageTokens && index * kKvPageTokens < span_.end;
      pages_ = is_in ? p_.pages[span_.tile.page_base + index] : -1;
    }
    page_ = __shfl_sync(0xFFFFFFFF, pages_, turn);
    Fetch(p_.k, base_ + stage * C::stage_bytes, base_ + C::barrier_at + 8 * stage);
  }
  __device__ void FetchValues(int stage) {
    Fetch(p_.v, base_ + stage * C::stage_bytes + C::Tile::kBytes,
          base_ + C::barrier_at + C::Barriers::kValues + 8 * stage);
  }

 private:
  static constexpr int kRows = kTile / (kConsumers / 32);
  static constexpr int kWarpsOfPage = kKvPageTokens / kRows;

  static __device__ int Warp() { return static_cast<int>(threadIdx.x / 32); }

  __device__ void Fetch(const typename C::Isa::Map& cache, uint32_t to, uint32_t full) const {
    if (page_ >= 0) {
      const auto* const page =
          C::Isa::template PageAt<C::head_dim>(cache, page_, p_.kv_heads, span_.head);
      C::Isa::template FetchRows<C::head_dim, kRows>(
          page + Warp() % kWarpsOfPage * kRows * C::head_dim,
          to + Warp() * kRows * C::Tile::kRowBytes);
    }
    C::Isa::Complete(full);
  }

  const Args<typename C::Isa>& p_;
  const Span& span_;
  const uint32_t base_;
  int pages_ = -1;  // of this warp's rows: the next 32 tiles, by lane
  int page_ = -1;   // of the last tile whose keys were fetched
};

// The last position that a token of the tile sees.
template <typename Isa>
__device__ int LastSeenBy(const Args<Isa>& p, const AttentionRowTile& tile, int token) {
  return p.reach == nullptr ? tile.position + token : p.reach[tile.row + token];
}

// A warp's two rows of the lane: g and g + 8.
template <typename C>
__device__ void Consume(const Args<typename C::Isa>& p, const Span& span, uint8_t* shared,
                        uint32_t base) {
  using Tile = typename C::Tile;
  using Isa = typename C::Isa;
  constexpr int kValues = C::Barriers::kValues;
  constexpr int kDim = C::head_dim;
  constexpr int kOut = C::out_dims;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int row_group = group % C::row_groups, first_row = 64 * row_group;
  const int first_out = group / C::row_groups * kOut;
  const int warp = thread / 32, lane = thread % 32;
  const int g = lane / 4, t = lane % 4;
  const uint32_t full = base + C::barrier_at, empty = full + 8 * C::stages;
  const uint32_t q_at = base + C::query_at + row_group * Tile::kBytes;
  const int tile_rows = span.tile.tokens * p.group;

  TileShare<C> share(p, span, base);
  if constexpr (Isa::kApart) {
    for (int i = 0; i < C::stages && span.FirstTile() + i < span.EndTile(); ++i) {
      share.FetchKeys(span.FirstTile() + i, i);
      share.FetchValues(i);
    }
  }

  // Row r of the tile is head r % group of token r / group; heads of a token are contiguous.
  const int64_t token_stride = int64_t{p.kv_heads} * p.group * kDim;
  const int64_t first_at = span.tile.row * token_stride + int64_t{span.head} * p.group * kDim;
  for (int i = thread; i < 64 * (kDim / 8); i += 128) {
    const int row = i / (kDim / 8), column = i % (kDim / 8) * 8;
    const int tile_row = first_row + row;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (tile_row < tile_rows) {
      x = *reinterpret_cast<const uint4*>(p.q + first_at + tile_row / p.group * token_stride +
                                          tile_row % p.group * kDim + column);
    }
    // Groups with the same rows write the same.
    *reinterpret_cast<uint4*>(shared + C::query_at + row_group * Tile::kBytes +
                              Tile::Offset(row, column)) = x;
  }
  Isa::FenceStages();
  NamedBarrier(kGroupBarrier + group, 128);

  int last[2], lowest[2];
  for (int j = 0; j < 2; ++j) {
    const int token = min(first_row + 16 * warp + g + 8 * j, tile_rows - 1) / p.group;
    last[j] = LastSeenBy(p, span.tile, token);
    lowest[j] = p.window > 0 ? max(0, span.tile.position + token - p.window + 1) : 0;
  }
  // The smallest of the group's: tiles up to it need no mask.
  const int least_last = LastSeenBy(p, span.tile, min(first_row, tile_rows - 1) / p.group);
  const int most_lowest =
      p.window > 0
          ? max(0, span.tile.position + min(first_row + 63, tile_rows - 1) / p.group - p.window + 1)
          : 0;

  SoftmaxState state[2];
  float rows[kOut / 2], chunk[kOut / 2], sums[4], most[2] = {kNoScore, kNoScore};
  for (float& x : rows) x = 0.0f;
  for (float& x : chunk) x = 0.0f;
  for (float& x : sums) x = 0.0f;
  const auto join = [&] {
    const JoinFactors f[2] = {JoinChunk(state[0], most[0], sums[0], p.scale),
                              JoinChunk(state[1], most[1], sums[2], p.scale)};
#pragma unroll
    for (int i = 0; i < kOut / 2; ++i) {
      rows[i] = Join(rows[i], chunk[i], f[i / 2 % 2]);
      chunk[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
    most[0] = most[1] = kNoScore;
  };

  RingPosition ring;
  // Unwritten values may be NaN: zeroes them.
  const auto clear_values = [&](int at) {
    if (at >= span.begin && at + kTile <= span.end) return;
    for (int i = threadIdx.x; i < kTile * (kDim / 8); i += kConsumers) {
      const int row = i / (kDim / 8), column = i % (kDim / 8) * 8;
      if (at + row >= span.begin && at + row < span.end) continue;
      *reinterpret_cast<uint4*>(shared + ring.stage * C::stage_bytes + Tile::kBytes +
                                Tile::Offset(row, column)) = make_uint4(0, 0, 0, 0);
    }
    Isa::FenceStages();
    NamedBarrier(kAllBarrier, kConsumers);
  };
  // Waits for a tile's copies.
  const auto await = [&](int at) {
    BarrierWait(full + 8 * ring.stage, ring.parity);
    if constexpr (!Isa::kApart) clear_values(at);
  };
  float scores[kTile / 2];
  const auto start_scores = [&] {
    Isa::template Scores<kDim / 16>(scores, q_at, base + ring.stage * C::stage_bytes);
  };
  // Where values come and go apart from keys.
  const auto await_values = [&](int at) {
    if constexpr (!Isa::kApart) return;
    BarrierWait(full + kValues + 8 * ring.stage, ring.parity);
    clear_values(at);
  };
  const auto release_keys = [&] {
    if (Isa::kApart && lane == 0) BarrierArrive(empty + 8 * ring.stage);
  };
  const auto release = [&](int used) {
    if (lane == 0) BarrierArrive(empty + kValues + 8 * used);
  };
  // A tile further on takes the place of `tile`, whose stage that was: by now no warp should need
  // it any more.
  const auto refill_keys = [&](int tile) {
    if (!Isa::kApart || tile + C::stages >= span.EndTile()) return;
    BarrierWait(empty + 8 * ring.stage, ring.parity);
    if constexpr (Isa::kApart) share.FetchKeys(tile + C::stages, ring.stage);
  };
  const auto refill_values = [&](int tile, int used) {
    if (!Isa::kApart || tile + C::stages >= span.EndTile()) return;
    // The parity is that of the stage after it.
    BarrierWait(empty + kValues + 8 * used, used + 1 == C::stages ? ring.parity ^ 1 : ring.parity);
    if constexpr (Isa::kApart) share.FetchValues(used);
  };
  uint32_t probabilities[kTile / 16][4];
  const auto soften = [&](int at) {
    if (at + kTile > least_last + 1 || at < most_lowest) {
#pragma unroll
      for (int i = 0; i < kTile / 2; ++i) {
        const int column = at + i / 4 * 8 + 2 * t + i % 2, j = i / 2 % 2;
        if (column > last[j] || column < lowest[j]) scores[i] = -INFINITY;
      }
    }
    float decay[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float now = scores[2 * j];
#pragma unroll
      for (int i = 0; i < kTile / 8; ++i) {
        now = fmaxf(now, fmaxf(scores[4 * i + 2 * j], scores[4 * i + 2 * j + 1]));
      }
      now = fmaxf(now, __shfl_xor_sync(0xFFFFFFFF, now, 1));
      now = fmaxf(now, __shfl_xor_sync(0xFFFFFFFF, now, 2));
      now = fmaxf(most[j], now);
      decay[j] = Decay(most[j], now, p.scale);
      most[j] = now;
      const float offset = ScaledOffset(now, p.scale);
#pragma unroll
      for (int i = 0; i < kTile / 8; ++i) {
        probabilities[i / 2][i % 2 * 2 + j] =
            PackBf16(Numerator(scores[4 * i + 2 * j], p.scale, offset),
                     Numerator(scores[4 * i + 2 * j + 1], p.scale, offset));
      }
    }
#pragma unroll
    for (int i = 0; i < kOut / 2; ++i) chunk[i] *= decay[i / 2 % 2];
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] *= decay[i / 2];
  };
  const auto start_values = [&] {
    const uint32_t v_at = base + ring.stage * C::stage_bytes + Tile::kBytes +
                          first_out / Tile::kColumns * Tile::kBlockBytes;
#pragma unroll
    for (int s = 0; s < kTile / 16; ++s) {
      Isa::template Values<kOut>(chunk, probabilities[s], v_at + s * 16 * Tile::kRowBytes);
      Isa::Sums(sums, probabilities[s], base + C::ones_at);
    }
  };

  // The next tile's scores run behind this tile's values, where products run by themselves.
  const int last_tile = span.EndTile() - 1;
  await(span.FirstTile() * kTile);
  Isa::Begin(false);
  start_scores();
  Isa::End();
  release_keys();
  for (int tile = span.FirstTile(); tile < last_tile; ++tile) {
    soften(tile * kTile);
    refill_keys(tile);
    await_values(tile * kTile);
    Isa::Begin(false);
    start_values();
    const int used = ring.stage;
    if constexpr (Isa::kApart) {
      Isa::End();
      release(used);
    }
    ring.Advance(C::stages);
    await((tile + 1) * kTile);
    Isa::Begin(false);
    start_scores();
    Isa::End();
    release_keys();
    if constexpr (!Isa::kApart) release(used);
    refill_values(tile, used);
    if ((tile + 1) * kTile % kAttentionChunk == 0) join();
  }
  soften(last_tile * kTile);
  await_values(last_tile * kTile);
  Isa::Begin(false);
  start_values();
  Isa::End();
  join();

#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int row = first_row + 16 * warp + g + 8 * j;
    if (row >= tile_rows) continue;
    const float share = Share(state[j]);
    __nv_bfloat16* const out =
        p.out + first_at + row / p.group * token_stride + row % p.group * kDim + first_out;
#pragma unroll
    for (int i = 0; i < kOut / 8; ++i) {
      *reinterpret_cast<uint32_t*>(out + 8 * i + 2 * t) = PackBf16(
          __fmul_rn(rows[4 * i + 2 * j], share), __fmul_rn(rows[4 * i + 2 * j + 1], share));
    }
  }
}

// shared: 1024-byte aligned.
template <typename C>
__device__ void RunTileBlock(const Args<typename C::Isa>& p, uint8_t* shared) {
  using Isa = typename C::Isa;
  const uint32_t base = SharedAddress(shared);
  if (threadIdx.x == 0) {
    Isa::Prefetch(p.k);
    Isa::Prefetch(p.v);
    C::Barriers::Init(base + C::barrier_at, C::fillers, kConsumers / 32);
    BarrierInitFence();
  }
  if (threadIdx.x < 256) {
    reinterpret_cast<uint32_t*>(shared + C::ones_at)[threadIdx.x] = 0x3F803F80;
  }
  Isa::FenceStages();
  __syncthreads();
  WaitForPrevious();
  // Later tiles of a run have more positions: they start first.
  const int index = p.layout.header->tiles - 1 - static_cast<int>(blockIdx.x) / p.kv_heads;
  if (index < 0) return;
  Span span;
  span.tile = p.layout.tiles[index];
  span.head = static_cast<int>(blockIdx.x) % p.kv_heads;
  span.begin = p.window > 0 ? max(0, span.tile.position - p.window + 1) : 0;
  span.end = LastSeenBy(p, span.tile, span.tile.tokens - 1) + 1;
  if constexpr (Isa::kApart) {
    Consume<C>(p, span, shared, base);
  } else if (threadIdx.x < kConsumers) {
    IncreaseRegisters<kRegistersConsumer>();
    Consume<C>(p, span, shared, base);
  } else {
    DecreaseRegisters<kRegistersProducer>();
    if (threadIdx.x < kConsumers + 32) Produce<C>(p, span, base);
  }
}

template <typename C>
__global__ void __launch_bounds__(C::threads, 1)
    TileAttentionKernel(const __grid_constant__ Args<typename C::Isa> p) {
  LaunchDependents();
  RunTileBlock<C>(p, DynamicShared<1024>());
}

template <typename Isa, int kHeadDim>
cudaError_t Launch(const AttentionLaunch& launch, cudaStream_t stream) {
  using C = Config<Isa, kHeadDim>;
  const PagedAttentionParams& params = launch.params;
  Args<Isa> args;
  DORAD_CUDA_RETURN_IF_ERROR(Isa::template Encode<kHeadDim>(params.cache.k, &args.k));
  DORAD_CUDA_RETURN_IF_ERROR(Isa::template Encode<kHeadDim>(params.cache.v, &args.v));
  args.layout = launch.layout;
  args.q = params.q;
  args.out = params.out;
  args.pages = params.rows.pages;
  args.reach = params.rows.reach;
  args.kv_heads = params.shape.kv_heads;
  args.group = AttentionGroup(params.shape);
  args.window = params.window;
  args.scale = params.softmax_scale * 1.44269504088896340736f;
  const int32_t least_tokens = AttentionLeastTokens(params.shape);
  // A run of n tokens makes at most n / least_tokens tiles.
  const int32_t blocks = params.rows.rows / least_tokens * args.kv_heads;
  if (blocks == 0) return cudaSuccess;
  return LaunchEarly(TileAttentionKernel<C>, blocks, C::threads, C::shared_bytes, stream, args);
}

}  // namespace tile_attention

template <typename Isa>
cudaError_t LaunchTileAttention(const AttentionLaunch& launch, cudaStream_t stream) {
  switch (launch.params.shape.head_dim) {
    case 64:
      return tile_attention::Launch<Isa, 64>(launch, stream);
    case 128:
      return tile_attention::Launch<Isa, 128>(launch, stream);
    case 256:
      return tile_attention::Launch<Isa, 256>(launch, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace dorad::kernels
