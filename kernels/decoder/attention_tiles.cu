// Tiles of rows (prefill): up to 128 query rows, the tokens of one sequence by the query heads of
// one key head, in two warpgroups of 64; a warp of a third one copies tiles of the cache into a
// ring of stages. Heads of 256 have 64 query rows: both warpgroups compute their scores, and each
// half of their outputs, because the registers of one do not hold all. Scores and outputs by wgmma,
// in the order of attention_layout.h: a chunk's numerators have separate accumulators and are added
// to the row's at the chunk's end.
#include <cmath>

#include "kernels/common/status.h"
#include "kernels/decoder/attention_device.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/launch.h"
#include "kernels/isa/sm90/copy.cuh"

namespace dorad::kernels {
namespace {

constexpr int kTile = kAttentionTile;
constexpr int kTilePages = kAttentionTilePages;
constexpr int kGroups = 2;  // warpgroups that compute
constexpr int kConsumers = 128 * kGroups;
constexpr int kThreads = kConsumers + 128;
constexpr int kRegistersConsumer = 232;
constexpr int kRegistersProducer = 40;
constexpr int kAllBarrier = 1;    // named barriers: of both groups,
constexpr int kGroupBarrier = 2;  // and of each

template <int kHeadDim>
struct Config {
  using Tile = CacheTile<kHeadDim>;
  static_assert(Tile::kColumns == 64);
  static constexpr int head_dim = kHeadDim;
  static constexpr int tile_rows = AttentionTileRows(kHeadDim);
  static constexpr int row_groups = tile_rows / 64;                 // of distinct rows
  static constexpr int out_dims = kHeadDim * row_groups / kGroups;  // of a group
  static constexpr int stages = kHeadDim > 128 ? 3 : 4;
  static constexpr int stage_bytes = 2 * Tile::kBytes;
  static constexpr int query_at = stages * stage_bytes;
  static constexpr int ones_at = query_at + row_groups * Tile::kBytes;
  static constexpr int barrier_at = ones_at + 1024;
  static constexpr int shared_bytes = barrier_at + 2 * stages * 8 + 1024;  // to align the stages
};

struct Args {
  CUtensorMap k, v;
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

template <typename C>
__device__ void Produce(const Args& p, const Span& span, uint32_t base) {
  const int lane = threadIdx.x % 32;
  const uint32_t full = base + C::barrier_at, empty = full + 8 * C::stages;
  const uint64_t policy = EvictLast();
  const int32_t* const pages = p.pages + span.tile.page_base;
  int stage = 0;
  uint32_t parity = 0;
  int page = 0;
  for (int tile = span.FirstTile(); tile < span.EndTile(); ++tile) {
    const int page_lane = (tile - span.FirstTile()) % 8 * kTilePages;
    if (page_lane == 0) {
      const int index = tile * kTilePages + lane;
      page = index * kKvPageTokens < span.end ? pages[index] : 0;
    }
    const int first = max(span.begin / kKvPageTokens, tile * kTilePages) - tile * kTilePages;
    const int end = min((span.end - 1) / kKvPageTokens - tile * kTilePages, kTilePages - 1) + 1;
    BarrierWait(empty + 8 * stage, parity ^ 1);
    if (lane == 0) {
      BarrierArriveExpect(full + 8 * stage, (end - first) * kKvPageTokens * C::head_dim * 4);
    }
    __syncwarp();
    CopyPages<C::head_dim>(p.k, p.v, base + stage * C::stage_bytes, full + 8 * stage, page,
                           page_lane, p.kv_heads, span.head, first, end, policy);
    if (++stage == C::stages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// The last position that a token of the tile sees.
__device__ int LastSeenBy(const Args& p, const AttentionRowTile& tile, int token) {
  return p.reach == nullptr ? tile.position + token : p.reach[tile.row + token];
}

// A warp's two rows of the lane: g and g + 8.
template <typename C>
__device__ void Consume(const Args& p, const Span& span, uint8_t* shared, uint32_t base) {
  using Tile = typename C::Tile;
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
  FenceProxyAsync();
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

  int stage = 0;
  uint32_t parity = 0;
  // Waits for a tile's copies.
  const auto await = [&](int at) {
    BarrierWait(full + 8 * stage, parity);
    if (at >= span.begin && at + kTile <= span.end) return;
    // Unwritten values may be NaN: zero them.
    for (int i = threadIdx.x; i < kTile * (kDim / 8); i += kConsumers) {
      const int row = i / (kDim / 8), column = i % (kDim / 8) * 8;
      if (at + row >= span.begin && at + row < span.end) continue;
      *reinterpret_cast<uint4*>(shared + stage * C::stage_bytes + Tile::kBytes +
                                Tile::Offset(row, column)) = make_uint4(0, 0, 0, 0);
    }
    FenceProxyAsync();
    NamedBarrier(kAllBarrier, kConsumers);
  };
  float scores[kTile / 2];
  const auto start_scores = [&] {
    const uint32_t k_at = base + stage * C::stage_bytes;
#pragma unroll
    for (int s = 0; s < kDim / 16; ++s) {
      const uint32_t offset = s / 4 * Tile::kBlockBytes;
      Wgmma<kTile>(scores, WgmmaTile(q_at + offset) + 2 * (s % 4),
                   WgmmaTile(k_at + offset) + 2 * (s % 4), s > 0);
    }
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
    const uint32_t v_at = base + stage * C::stage_bytes + Tile::kBytes +
                          first_out / Tile::kColumns * Tile::kBlockBytes;
#pragma unroll
    for (int s = 0; s < kTile / 16; ++s) {
      WgmmaByK<kOut>(chunk, probabilities[s],
                     WgmmaTileByK(v_at + s * 16 * Tile::kRowBytes, Tile::kBlockBytes));
      WgmmaNarrow(sums, probabilities[s], WgmmaTile(base + C::ones_at));
    }
  };

  // The next tile's scores run behind this tile's values.
  const int last_tile = span.EndTile() - 1;
  await(span.FirstTile() * kTile);
  WgmmaFence();
  start_scores();
  WgmmaCommit();
  WgmmaWait<0>();
  for (int tile = span.FirstTile(); tile < last_tile; ++tile) {
    soften(tile * kTile);
    WgmmaFence();
    start_values();
    const int used = stage;
    if (++stage == C::stages) {
      stage = 0;
      parity ^= 1;
    }
    await((tile + 1) * kTile);
    WgmmaFence();
    start_scores();
    WgmmaCommit();
    WgmmaWait<0>();
    if (lane == 0) BarrierArrive(empty + 8 * used);
    if ((tile + 1) * kTile % kAttentionChunk == 0) join();
  }
  soften(last_tile * kTile);
  WgmmaFence();
  start_values();
  WgmmaCommit();
  WgmmaWait<0>();
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

template <typename C>
__global__ void __launch_bounds__(kThreads, 1) TileAttentionKernel(const __grid_constant__ Args p) {
  LaunchDependents();
  extern __shared__ uint8_t dynamic[];
  uint8_t* const shared = dynamic + (1024 - SharedAddress(dynamic) % 1024) % 1024;
  const uint32_t base = SharedAddress(shared);
  if (threadIdx.x == 0) {
    PrefetchTensorMap(&p.k);
    PrefetchTensorMap(&p.v);
    for (int i = 0; i < C::stages; ++i) {
      BarrierInit(base + C::barrier_at + 8 * i, 1);
      BarrierInit(base + C::barrier_at + 8 * (C::stages + i), kConsumers / 32);
    }
    BarrierInitFence();
  }
  if (threadIdx.x < 256) {
    reinterpret_cast<uint32_t*>(shared + C::ones_at)[threadIdx.x] = 0x3F803F80;
  }
  FenceProxyAsync();
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
  if (threadIdx.x < kConsumers) {
    IncreaseRegisters<kRegistersConsumer>();
    Consume<C>(p, span, shared, base);
  } else {
    DecreaseRegisters<kRegistersProducer>();
    if (threadIdx.x < kConsumers + 32) Produce<C>(p, span, base);
  }
}

template <int kHeadDim>
cudaError_t Launch(const AttentionLaunch& launch, cudaStream_t stream) {
  using C = Config<kHeadDim>;
  static_assert(C::shared_bytes <= 227 * 1024);
  const PagedAttentionParams& params = launch.params;
  Args args;
  DORAD_CUDA_RETURN_IF_ERROR(EncodeCache<kHeadDim>(params.cache.k, kKvPageTokens, &args.k));
  DORAD_CUDA_RETURN_IF_ERROR(EncodeCache<kHeadDim>(params.cache.v, kKvPageTokens, &args.v));
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
  return LaunchEarly(TileAttentionKernel<C>, blocks, kThreads, C::shared_bytes, stream, args);
}

}  // namespace

bool HasTileAttention(const AttentionShape& shape) {
  return shape.head_dim == 64 || shape.head_dim == 128 || shape.head_dim == 256;
}

cudaError_t LaunchTileAttention(const AttentionLaunch& launch, cudaStream_t stream) {
  switch (launch.params.shape.head_dim) {
    case 64:
      return Launch<64>(launch, stream);
    case 128:
      return Launch<128>(launch, stream);
    case 256:
      return Launch<256>(launch, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace dorad::kernels
