// A warpgroup has 64 query rows; tiles of keys and values are copied into a ring of stages, on
// Hopper by a warp of its own. The scores of the next tile run behind this one's outputs, where
// products run by themselves. Defines LaunchSegmentAttention.
#pragma once

#include <cstdint>

#include "kernels/common/status.h"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/launch.h"
#include "kernels/isa/mma/mma.cuh"
#include "kernels/isa/shared.cuh"
#include "kernels/isa/sm90/wgmma.cuh"
#include "kernels/pipeline/ring.cuh"
#include "kernels/pipeline/stage_barriers.cuh"
#include "kernels/vision/attention_launch.h"

namespace dorad::kernels {
namespace segment_attention {

constexpr int kGroups = kSegmentTileRows / 64;  // warpgroups that compute
constexpr int kConsumers = 128 * kGroups;
constexpr int kRegistersConsumer = 160;
constexpr int kRegistersProducer = 24;
constexpr int kKeys = 64;              // of a stage
constexpr int kBlockBytes = 64 * 128;  // 64 rows of 64 elements, swizzled

// kDim: head_dim or more. Columns from head_dim on are read as zeros.
template <typename Isa_, int kDim_>
struct Config {
  using Isa = Isa_;
  static constexpr int kDim = kDim_;
  // Hopper's copying warp is in a warpgroup of its own, because registers move by groups. Elsewhere
  // one more warp would take a quarter of the registers: those that compute copy, too.
  static constexpr int threads = kConsumers + (Isa::kHasCopyEngine ? 128 : 0);
  static constexpr int fillers = Isa::kHasCopyEngine ? 1 : kConsumers / 32;
  static constexpr int blocks = (kDim + 63) / 64;
  static constexpr int tile_bytes = blocks * kBlockBytes;  // of queries, keys or values
  static constexpr int stages = Isa::kHasCopyEngine || blocks == 1 ? 4 : 1;
  using Barriers = StageBarriers<Isa, stages>;
  static constexpr int query_at = stages * 2 * tile_bytes;
  static constexpr int barrier_at = query_at + kGroups * tile_bytes;
  static constexpr int query_barrier_at = barrier_at + Barriers::kBytes;
  static constexpr int shared_bytes = query_barrier_at + 8 + 1024;  // to align the stages
  static_assert(shared_bytes <= Isa::kSharedBytes);
};

template <typename Isa>
struct Args {
  typename Isa::Map map;  // [rows, 3 · heads, head_dim]
  const SegmentTile* tiles;
  __nv_bfloat16* out;
  int32_t heads;
  int32_t head_dim;
  int32_t first_row;
  float scale;  // · log2(e)
};

// Hopper's copying thread.
template <typename C>
__device__ void Produce(const Args<typename C::Isa>& p, const SegmentTile& tile, uint32_t base) {
  using Isa = typename C::Isa;
  constexpr int kStages = C::stages;
  const uint32_t full = base + C::barrier_at, empty = full + 8 * kStages;
  const uint32_t queries = base + C::query_barrier_at;
  const int head = static_cast<int>(blockIdx.y);
  const int groups = (tile.rows + 63) / 64;
  Isa::Expect(queries, groups * C::tile_bytes);
  for (int group = 0; group < groups; ++group) {
    Isa::template FetchHead<C::blocks>(p.map, base + C::query_at + group * C::tile_bytes, head,
                                       tile.row + 64 * group, queries);
  }
  RingPosition ring;
  for (int row = tile.begin; row < tile.end; row += kKeys) {
    BarrierWait(empty + 8 * ring.stage, ring.parity ^ 1);
    const uint32_t at = base + ring.stage * 2 * C::tile_bytes;
    Isa::Expect(full + 8 * ring.stage, 2 * C::tile_bytes);
    Isa::template FetchHead<C::blocks>(p.map, at, p.heads + head, row, full + 8 * ring.stage);
    Isa::template FetchHead<C::blocks>(p.map, at + C::tile_bytes, 2 * p.heads + head, row,
                                       full + 8 * ring.stage);
    ring.Advance(kStages);
  }
}

// Of the four lanes that share a row.
template <typename Op>
__device__ float ReduceRow(float x, Op op) {
  x = op(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
  return op(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
}

// The 64 rows of a warpgroup; of its warp's 16 a lane has rows lane / 4 and lane / 4 + 8.
template <typename Isa, int kDim>
struct GroupRows {
  float scores[kKeys / 2];
  uint32_t weights[kKeys / 16][4];
  float out[kDim / 2] = {};
  float most[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};  // of this lane's keys

  __device__ void StartScores(uint32_t queries, uint32_t keys) {
    Isa::template Scores<(kDim + 15) / 16>(scores, queries, keys);
  }

  __device__ void StartValues(uint32_t values) {
#pragma unroll
    for (int s = 0; s < kKeys / 16; ++s) {
      Isa::template Values<kDim>(out, weights[s], values + s * 16 * 128);
    }
  }

  // The softmax's numerators, rounded; the sums so far are scaled to a new maximum. `valid`: of the
  // keys.
  __device__ void Weigh(int valid, float scale) {
    if (valid < kKeys) {
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= valid) scores[i] = -INFINITY;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float now = most[half];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        now = fmaxf(now, fmaxf(scores[4 * n + 2 * half], scores[4 * n + 2 * half + 1]));
      }
      now = ReduceRow(now, [](float a, float b) { return fmaxf(a, b); });
      if (__any_sync(0xFFFFFFFF, now > most[half])) {
        const float shrink = Exp2((most[half] - now) * scale);
        most[half] = now;
        sum[half] *= shrink;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          out[4 * n + 2 * half] *= shrink;
          out[4 * n + 2 * half + 1] *= shrink;
        }
      }
      const float offset = now * scale;
      float added = 0.0f;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        const float low = Exp2(fmaf(scores[4 * n + 2 * half], scale, -offset));
        const float high = Exp2(fmaf(scores[4 * n + 2 * half + 1], scale, -offset));
        weights[n / 2][n % 2 * 2 + half] = PackBf16(low, high);
        added += low + high;
      }
      sum[half] += added;
    }
  }
};

template <typename C>
__device__ void Consume(const Args<typename C::Isa>& p, const SegmentTile& tile, uint32_t base) {
  using Isa = typename C::Isa;
  constexpr int kDim = C::kDim;
  constexpr int kStages = C::stages;
  constexpr int kValues = C::Barriers::kValues;
  const int group = threadIdx.x / 128;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const uint32_t full = base + C::barrier_at, empty = full + 8 * kStages;
  const uint32_t queries = base + C::query_at + group * C::tile_bytes;
  const int count = tile.end - tile.begin;
  const int tiles = (count + kKeys - 1) / kKeys;
  // A group without rows reads its stages, too: it must not hold up the ring.
  const bool is_idle = 64 * group >= tile.rows;
  GroupRows<Isa, kDim> rows;
  RingPosition ring;
  const auto keys = [&] { return base + ring.stage * 2 * C::tile_bytes; };
  const auto release = [&](int used) {
    if (lane == 0) BarrierArrive(empty + kValues + 8 * used);
  };
  // Where values come and go apart from keys, and all warps fetch them together.
  const auto release_keys = [&] {
    if (Isa::kApart && lane == 0) BarrierArrive(empty + 8 * ring.stage);
  };
  const auto fetch = [&](int i, int to, bool is_v) {
    if constexpr (Isa::kApart) {
      Isa::template FetchHead<kDim>(p, base + (2 * to + is_v) * C::tile_bytes,
                                    (1 + is_v) * p.heads + blockIdx.y, tile.begin + i * kKeys,
                                    threadIdx.x, kConsumers);
      Isa::Complete(full + (is_v ? kValues : 0) + 8 * to);
    }
  };
  // A tile further on takes the place of tile i, which by now no warp should need any more.
  const auto refill_keys = [&](int i) {
    if (!Isa::kApart || i + kStages >= tiles) return;
    BarrierWait(empty + 8 * ring.stage, ring.parity);
    fetch(i + kStages, ring.stage, false);
  };
  const auto refill_values = [&](int i, int used) {
    if (!Isa::kApart || i + kStages >= tiles) return;
    // The parity is that of the stage after it.
    BarrierWait(empty + kValues + 8 * used, used + 1 == kStages ? ring.parity ^ 1 : ring.parity);
    fetch(i + kStages, used, true);
  };
  const auto await_values = [&] {
    if constexpr (Isa::kApart) BarrierWait(full + kValues + 8 * ring.stage, ring.parity);
  };
  if constexpr (Isa::kApart) {
    if (!is_idle) {
      Isa::template FetchHead<kDim>(p, queries, blockIdx.y, tile.row + 64 * group,
                                    threadIdx.x % 128, 128);
    }
    Isa::Complete(base + C::query_barrier_at);
    for (int i = 0; i < min(kStages, tiles); ++i) {
      fetch(i, i, false);
      fetch(i, i, true);
    }
  }
  if (is_idle) {
    for (int i = 0; i < tiles; ++i) {
      const int used = ring.stage;
      BarrierWait(full + 8 * ring.stage, ring.parity);
      release_keys();
      refill_keys(i);
      await_values();
      release(ring.stage);
      ring.Advance(kStages);
      refill_values(i, used);
    }
    return;
  }
  BarrierWait(base + C::query_barrier_at, 0);
  BarrierWait(full, 0);
  Isa::Begin(false);
  rows.StartScores(queries, keys());
  Isa::End();
  release_keys();
  for (int i = 0; i < tiles; ++i) {
    rows.Weigh(count - i * kKeys, p.scale);
    const int used = ring.stage;
    refill_keys(i);
    await_values();
    Isa::Begin(false);
    rows.StartValues(keys() + C::tile_bytes);
    if constexpr (Isa::kApart) {
      Isa::End();
      release(used);
    }
    ring.Advance(kStages);
    if (i + 1 < tiles) {
      BarrierWait(full + 8 * ring.stage, ring.parity);
      rows.StartScores(queries, keys());
    }
    Isa::End();
    if (i + 1 < tiles) release_keys();
    if constexpr (!Isa::kApart) release(used);
    refill_values(i, used);
  }
  const int width = p.heads * p.head_dim;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float factor = 1.0f / ReduceRow(rows.sum[half], [](float a, float b) { return a + b; });
    const int row = 64 * group + 16 * warp + lane / 4 + 8 * half;
    if (row >= tile.rows) continue;
    __nv_bfloat16* const out = p.out + int64_t{tile.row - p.first_row + row} * width +
                               blockIdx.y * p.head_dim + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      if (8 * n >= p.head_dim) break;
      *reinterpret_cast<uint32_t*>(out + 8 * n) =
          PackBf16(rows.out[4 * n + 2 * half] * factor, rows.out[4 * n + 2 * half + 1] * factor);
    }
  }
}

// One block a tile and head. base: of shared memory, 1024-byte aligned.
template <typename C>
__device__ void RunSegmentBlock(const Args<typename C::Isa>& p, uint32_t base) {
  if (threadIdx.x == 0) {
    C::Barriers::Init(base + C::barrier_at, C::fillers, kConsumers / 32);
    BarrierInit(base + C::query_barrier_at, C::fillers);
    BarrierInitFence();
  }
  __syncthreads();
  WaitForPrevious();
  const SegmentTile tile = p.tiles[blockIdx.x];
  if constexpr (C::Isa::kApart) {
    Consume<C>(p, tile, base);
  } else if (threadIdx.x < kConsumers) {
    IncreaseRegisters<kRegistersConsumer>();
    Consume<C>(p, tile, base);
  } else {
    DecreaseRegisters<kRegistersProducer>();
    if (threadIdx.x == kConsumers) Produce<C>(p, tile, base);
  }
}

template <typename C>
__global__ void __launch_bounds__(C::threads, 1)
    SegmentAttentionKernel(const __grid_constant__ Args<typename C::Isa> p) {
  LaunchDependents();
  RunSegmentBlock<C>(p, SharedAddress(DynamicShared<1024>()));
}

template <typename C>
cudaError_t Launch(const SegmentAttentionParams& params, cudaStream_t stream) {
  Args<typename C::Isa> args;
  DORAD_CUDA_RETURN_IF_ERROR(C::Isa::Encode(params, &args.map));
  args.tiles = params.tiles;
  args.out = params.out;
  args.heads = params.heads;
  args.head_dim = params.head_dim;
  args.first_row = params.first_row;
  args.scale = params.softmax_scale * 1.4426950408889634f;  // exp(x) = 2^(x · log2 e)
  const dim3 grid(params.num_tiles, params.heads);
  return LaunchEarly(SegmentAttentionKernel<C>, grid, C::threads, C::shared_bytes, stream, args);
}

}  // namespace segment_attention

template <typename Isa>
cudaError_t LaunchSegmentAttention(const SegmentAttentionParams& params, cudaStream_t stream) {
  using namespace segment_attention;
  if (params.head_dim <= 64) return Launch<Config<Isa, 64>>(params, stream);
  if (params.head_dim <= 72) return Launch<Config<Isa, 72>>(params, stream);
  if (params.head_dim <= 80) return Launch<Config<Isa, 80>>(params, stream);
  return Launch<Config<Isa, 128>>(params, stream);
}

}  // namespace dorad::kernels
