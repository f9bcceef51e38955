// Common parts of the warps of the tile kernel (attention_tiles_kernel.cuh): shared memory, and
// what a block computes.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/decoder/attention_device.cuh"
#include "kernels/pipeline/stage_barriers.cuh"

namespace dorad::kernels::tile_attention {

constexpr int kTile = kAttentionTile;
constexpr int kTilePages = kAttentionTilePages;
constexpr int kGroups = 2;  // warpgroups that compute
constexpr int kConsumers = 128 * kGroups;
constexpr int kRegistersConsumer = 232;
constexpr int kRegistersProducer = 40;
constexpr int kAllBarrier = 1;    // named barriers: of both groups,
constexpr int kGroupBarrier = 2;  // and of each

// kFp8: the cache is in eight bits. Then Hopper's copying warp fetches codes to a ring of their
// own, and three warps beside it make bf16 stages of them.
template <typename Isa_, int kHeadDim, bool kFp8>
struct Config {
  using Isa = Isa_;
  static constexpr bool is_fp8 = kFp8;
  static constexpr int cache_dim = kFp8 ? kHeadDim / 2 : kHeadDim;  // of a position, in 16 bits
  static constexpr bool has_codes = kFp8 && Isa::kHasCopyEngine;
  static constexpr int converters = 96;  // threads
  using Tile = CacheTile<kHeadDim>;
  // Hopper's copying warp is in a warpgroup of its own, because registers move by groups. Elsewhere
  // one more warp would take a third of the registers: those that compute copy, too.
  static constexpr int threads = kConsumers + (Isa::kHasCopyEngine ? 128 : 0);
  static constexpr int fillers = !Isa::kHasCopyEngine ? kConsumers / 32
                                 : kFp8               ? converters / 32
                                                      : 1;
  static_assert(Tile::kColumns == 64);
  static constexpr int head_dim = kHeadDim;
  static constexpr int tile_rows = AttentionTileRows(kHeadDim);
  static constexpr int row_groups = tile_rows / 64;                 // of distinct rows
  static constexpr int out_dims = kHeadDim * row_groups / kGroups;  // of a group
  static constexpr int stage_bytes = 2 * Tile::kBytes;
  static constexpr int stages =
      Isa::kHasCopyEngine ? (kHeadDim > 128 ? (kFp8 ? 2 : 3) : 4) : 64 * 1024 / stage_bytes;
  using Barriers = StageBarriers<Isa, stages>;
  // Stages of keys and values in eight bits; their factors.
  using CodeTile = CacheTile<cache_dim>;
  static constexpr int code_stages = has_codes ? 2 : 0;
  static constexpr int code_stage_bytes = 2 * CodeTile::kBytes;
  static constexpr int factor_bytes = 2 * kTile * 2;
  using CodeBarriers = StageBarriers<Isa, code_stages>;
  static constexpr int codes_at = stages * stage_bytes;
  static constexpr int query_at = codes_at + code_stages * code_stage_bytes;
  static constexpr int ones_at = query_at + row_groups * Tile::kBytes;
  static constexpr int factors_at = ones_at + 1024;
  static constexpr int barrier_at = factors_at + code_stages * factor_bytes;
  static constexpr int code_barrier_at = barrier_at + Barriers::kBytes;
  static constexpr int shared_bytes =
      code_barrier_at + (has_codes ? CodeBarriers::kBytes : 0) + 1024;  // to align the stages
  static_assert(shared_bytes <= Isa::kSharedBytes);
};

template <typename Isa>
struct Args {
  typename Isa::Map k, v;
  const __nv_bfloat16* factors;  // as KvCache::factors
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

}  // namespace dorad::kernels::tile_attention
