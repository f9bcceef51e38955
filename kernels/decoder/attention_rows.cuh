// Common parts of the warps of the row kernel (attention_rows_kernel.cuh): the ring of stages in
// shared memory and the description of each stage.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/decoder/attention_device.cuh"
#include "kernels/pipeline/stage_barriers.cuh"

namespace dorad::kernels::row_attention {

constexpr int kTile = kAttentionTile;
constexpr int kTilePages = kAttentionTilePages;
constexpr int kWarps = 4;                          // that compute
constexpr int kProbabilityPitch = 2 * kTile + 16;  // bytes of a head's row, bank-free
constexpr int kConsumerBarrier = 1;

enum : int32_t {
  kItemBegins = 1,
  kItemEnds = 2,
  kChunkBegins = 4,
  kChunkEnds = 8,
  kJoin = 16,  // not a tile but `count` parts to join
  kStop = 32,
  kPartEnds = 64,  // with kChunkEnds: what is joined so far is a part, or the last of it
};

// The description of a stage's tile for the computing warps.
struct alignas(16) TileInfo {
  int32_t position;  // of the tile's first
  int32_t begin, end;
  int32_t flags;
  int32_t row;
  int32_t head;                // key head
  int32_t slot, count, first;  // as the item's; the slot is that of the tile's part
  int32_t own;                 // the row's own position
  int32_t page;                // of that, if it is appended in this tile; else -1
  int32_t unused;
};

// Shared memory: stages of keys and values, then smaller arrays.
// kShares: there are items of several rows. kFp8: the cache is in eight bits.
template <typename Isa_, int kHeadDim, int kHeadTiles, bool kShares, bool kFp8>
struct Config {
  using Isa = Isa_;
  static constexpr int head_dim = kHeadDim;
  static constexpr bool is_fp8 = kFp8;
  static constexpr int cache_dim = kFp8 ? kHeadDim / 2 : kHeadDim;  // of a position, in 16 bits
  using Tile = CacheTile<cache_dim>;
  static constexpr int head_tiles = kHeadTiles;  // of eight heads of one row
  static constexpr bool shares = kShares;
  static constexpr int most_tiles = kShares ? kAttentionSharedTiles : kHeadTiles;
  // A tile, or two rounds of parts to join (PartRounds).
  static constexpr int part_bytes = kHeadTiles * (8 * kHeadDim + 16) * 4;
  static constexpr int stage_bytes =
      2 * (Tile::kBytes >= part_bytes ? Tile::kBytes : (part_bytes + 2047) / 2048 * 2048);
  // Of a multiprocessor. Two leave 168 registers for each thread, and items of several rows need
  // more: the computing warps take them from the others, if they can. Warps give registers away by
  // fours, so three stand idle beside the one that copies.
  static constexpr bool moves_registers = kShares && Isa::kMovesRegisters;
  static constexpr int blocks = kHeadDim == 256 || kHeadTiles > 1 || (kShares && !moves_registers)
                                    ? 1
                                : kFp8 && !kShares && Isa::kHasCopyEngine ? 3
                                                                          : 2;
  static constexpr int threads = 32 * (kWarps + (moves_registers ? 4 : 1));
  static constexpr int consumer_registers = 208;
  static constexpr int producer_registers = 48;
  // By cp.async so much that two blocks fit into a multiprocessor of compute capability 8.0. Stages
  // in eight bits are more, with a description and barriers each.
  static constexpr int ring_bytes = !Isa::kHasCopyEngine ? 64 * 1024
                                    : blocks == 1        ? (kFp8 ? 200000 : 212000)
                                    : blocks == 3        ? 62000
                                                         : (kFp8 ? 96000 : 105000);
  // Of a stage's keys in eight bits, then of its values.
  static constexpr int factor_bytes = kFp8 ? 2 * kTile * 2 : 0;
  static constexpr int stages = ring_bytes / (stage_bytes + factor_bytes);
  using Barriers = StageBarriers<Isa, stages>;
  static constexpr int dim_tiles = kHeadDim / 16;
  static constexpr int warp_dim_tiles = (dim_tiles + kWarps - 1) / kWarps;

  // Whether warps hold the queries of `tiles` in registers. Else they read them for each tile of
  // the cache, from rows in different banks.
  static constexpr bool HoldsQueries(int tiles) {
    return tiles == kHeadTiles && (Isa::kHasCopyEngine || tiles * kHeadDim <= 256);
  }
  static constexpr int query_pitch = kHeadDim + 8;  // elements

  static constexpr int factors_at = stages * stage_bytes;
  static constexpr int query_at = factors_at + stages * factor_bytes;  // of the running item
  static constexpr int norms_at =
      query_at + 8 * most_tiles * query_pitch * 2;  // weights: query, key
  static constexpr int probability_at = norms_at + 2 * kHeadDim * 4;
  static constexpr int most_at = probability_at + 8 * most_tiles * kProbabilityPitch;
  static constexpr int info_at = most_at + kWarps * 8 * most_tiles * 4;
  static constexpr int barrier_at = info_at + stages * static_cast<int>(sizeof(TileInfo));
  static constexpr int shared_bytes = barrier_at + Barriers::kBytes + 1024;  // to align stages
};

template <typename Isa>
struct Args {
  typename Isa::Map k, v;
  const __nv_bfloat16* factors;  // as KvCache::factors
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
