// Common parts of the warps of the row kernel (attention_rows_kernel.cuh): the ring of stages in
// shared memory and the description of each stage.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/common/stage_barriers.cuh"
#include "kernels/decoder/attention_device.cuh"

namespace dorad::kernels::row_attention {

constexpr int kTile = kAttentionTile;
constexpr int kTilePages = kAttentionTilePages;
constexpr int kWarps = 4;  // that compute
constexpr int kThreads = 32 * (kWarps + 1);
constexpr int kProbabilityPitch = 2 * kTile + 16;  // bytes of a head's row, bank-free
constexpr int kConsumerBarrier = 1;

enum : int32_t {
  kItemBegins = 1,
  kItemEnds = 2,
  kChunkBegins = 4,
  kChunkEnds = 8,
  kJoin = 16,  // not a tile but `slots` parts to join
  kStop = 32,
};

// The description of a stage's tile for the computing warps.
struct alignas(16) TileInfo {
  int32_t position;  // of the tile's first
  int32_t begin, end;
  int32_t flags;
  int32_t row;
  int32_t head;  // key head
  int32_t slot, first;
  int32_t slots;
  int32_t own;   // the row's own position
  int32_t page;  // of that, if it is appended in this tile; else -1
  int32_t unused;
};

// Of one multiprocessor, if it holds as many.
constexpr int BlocksOf(int head_dim, int head_tiles) {
  return head_dim == 256 || head_tiles > 1 ? 1 : 2;
}

// Shared memory: stages of keys and values, then smaller arrays.
template <typename Isa_, int kHeadDim, int kHeadTiles>
struct Config {
  using Isa = Isa_;
  using Tile = CacheTile<kHeadDim>;
  static constexpr int head_dim = kHeadDim;
  static constexpr int head_tiles = kHeadTiles;
  static constexpr int stage_bytes = 2 * Tile::kBytes;
  static constexpr int blocks = BlocksOf(kHeadDim, kHeadTiles);
  // By cp.async so much that two blocks fit into a multiprocessor of compute capability 8.0.
  static constexpr int ring_bytes = !Isa::kHasCopyEngine ? 64 * 1024
                                    : blocks == 1        ? 212000
                                                         : 105000;
  static constexpr int stages = ring_bytes / stage_bytes;
  using Barriers = StageBarriers<Isa, stages>;
  static constexpr int dim_tiles = kHeadDim / 16;
  static constexpr int warp_dim_tiles = (dim_tiles + kWarps - 1) / kWarps;

  // Whether warps hold the queries in registers. Else they read them for each tile, from rows in
  // different banks.
  static constexpr bool holds_queries = Isa::kHasCopyEngine || kHeadTiles * kHeadDim <= 256;
  static constexpr int query_pitch = kHeadDim + (holds_queries ? 0 : 8);  // elements

  static constexpr int query_at = stages * stage_bytes;  // of the running item
  static constexpr int norms_at =
      query_at + 8 * kHeadTiles * query_pitch * 2;  // weights: query, key
  static constexpr int probability_at = norms_at + 2 * kHeadDim * 4;
  static constexpr int most_at = probability_at + 2 * 8 * kHeadTiles * kProbabilityPitch;
  static constexpr int info_at = most_at + 2 * kWarps * 8 * kHeadTiles * 4;
  static constexpr int barrier_at = info_at + stages * static_cast<int>(sizeof(TileInfo));
  static constexpr int shared_bytes = barrier_at + Barriers::kBytes + 1024;  // to align stages
};

template <typename Isa>
struct Args {
  typename Isa::Map k, v;
  AttentionLayout layout;
  const __nv_bfloat16* q;
  __nv_bfloat16* out;
  const int32_t* pages;
  int32_t kv_heads;
  uint64_t kv_heads_inverse;  // 2^32 / kv_heads, rounded up
  int32_t group;
  float scale;  // · log2(e)
  // The rows' queries, keys and values from the projection, to be normed, rotated and appended
  // here; qkv null: queries are in q, and the cache is complete.
  RopeAppendParams append;
};

}  // namespace dorad::kernels::row_attention
