// Tiles of rows (prefill): up to 128 query rows, the tokens of one sequence by the query heads of
// one key head, in two warpgroups of 64; tiles of the cache are copied into a ring of stages, on
// Hopper by a warp of its own. Heads of 256 have 64 query rows: both warpgroups compute their
// scores, and each half of their outputs, because the registers of one do not hold all. In the
// order of attention_layout.h: a chunk's numerators have separate accumulators and are added to the
// row's at the chunk's end. Defines LaunchTileAttention.
#pragma once

#include <cmath>

#include "kernels/common/status.h"
#include "kernels/decoder/attention_tiles.cuh"
#include "kernels/decoder/attention_tiles_copy.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/launch.h"
#include "kernels/isa/shared.cuh"
#include "kernels/isa/sm90/wgmma.cuh"
#include "kernels/pipeline/ring.cuh"

namespace dorad::kernels {
namespace tile_attention {

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

  TileShare<C> share(p, span, shared, base);
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
    if constexpr (C::has_codes) {
      C::CodeBarriers::Init(base + C::code_barrier_at, 1, C::converters / 32);
    }
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
    if (threadIdx.x < kConsumers + 32) {
      Produce<C>(p, span, base);
    } else if constexpr (C::has_codes) {
      Convert<C>(span, shared, base);
    }
  }
}

template <typename C>
__global__ void __launch_bounds__(C::threads, 1)
    TileAttentionKernel(const __grid_constant__ Args<typename C::Isa> p) {
  LaunchDependents();
  RunTileBlock<C>(p, DynamicShared<1024>());
}

template <typename Isa, int kHeadDim, bool kFp8>
cudaError_t LaunchAs(const AttentionLaunch& launch, cudaStream_t stream) {
  using C = Config<Isa, kHeadDim, kFp8>;
  const PagedAttentionParams& params = launch.params;
  Args<Isa> args;
  DORAD_CUDA_RETURN_IF_ERROR(Isa::template Encode<C::cache_dim>(params.cache.k, &args.k));
  DORAD_CUDA_RETURN_IF_ERROR(Isa::template Encode<C::cache_dim>(params.cache.v, &args.v));
  args.factors = params.cache.factors;
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

template <typename Isa, int kHeadDim>
cudaError_t Launch(const AttentionLaunch& launch, cudaStream_t stream) {
  return launch.params.cache.factors == nullptr ? LaunchAs<Isa, kHeadDim, false>(launch, stream)
                                                : LaunchAs<Isa, kHeadDim, true>(launch, stream);
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
