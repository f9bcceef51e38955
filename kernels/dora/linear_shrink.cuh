// h = s · (A x) for all adapters of a batch, before the projection: see linear.h.
//
// A cluster of kLinearSlices blocks takes a unit, kLinearBoxRows rows of A of one segment; each
// block a slice of K. The batch is the M operand of wgmma, A the N operand. The blocks' sums meet
// in shared memory, 8 rows of every 64 of the batch in each block, and are added in the order of K.
//
// Warps: 4 consumers | producer of A | producer of x.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/common/barrier.cuh"
#include "kernels/common/wgmma.cuh"
#include "kernels/dora/linear_ring.cuh"
#include "kernels/dora/linear_tables.cuh"

namespace dorad::kernels {

// kM: tiles of 64 rows of the batch.
template <int kM>
struct ShrinkConfig {
  static constexpr int kConsumerWarps = 4;
  static constexpr int kThreads = 32 * (kConsumerWarps + 2);
  static constexpr int kMaxStages = 8;
  static constexpr int kFactorBytes = kLinearBoxRows * 2 * kLinearStageK;
  // Of one block and 64 rows of the batch, in one other block: 8 rows of sums.
  static constexpr int kShareBytes = 8 * kLinearBoxRows * 4;
  static constexpr int kExchangeBytes = kLinearSlices * kM * kShareBytes;
};

template <int kM>
class ShrinkBlock {
 public:
  using Config = ShrinkConfig<kM>;

  struct Shared {
    LinearTables tables;
    LinearRingBarriers<Config::kMaxStages> ring;
    uint64_t met;   // the sums of all slices have come
    uint64_t free;  // all blocks have added theirs: the exchange may be written again
  };

  __device__ ShrinkBlock(const LinearArgs& args, Shared& shared, uint32_t dynamic)
      : args_(args),
        tables_(shared.tables),
        ring_(shared.ring, dynamic, args.stages, Config::kFactorBytes,
              Config::kFactorBytes + args.x_rows * 2 * kLinearStageK),
        met_(SharedAddress(&shared.met)),
        free_(SharedAddress(&shared.free)),
        exchange_(dynamic + args.stages * (Config::kFactorBytes + args.x_rows * 2 * kLinearStageK)),
        slice_(blockIdx.x % kLinearSlices),
        first_(slice_ * args.plan.a_chunks),
        end_(min(first_ + args.plan.a_chunks, args.plan.chunks)),
        lane_(threadIdx.x % 32) {}

  __device__ static void InitBarriers(const LinearArgs& args, Shared& shared) {
    shared.ring.Init(args.stages, 1, Config::kConsumerWarps);
    BarrierInit(SharedAddress(&shared.met), 1);
    BarrierInit(SharedAddress(&shared.free), kLinearSlices * Config::kConsumerWarps);
    BarrierInitFence();
  }

  // One thread.
  __device__ void ProduceFactors() {
    ForEach([&](int segment, int part, int row) {
      const CUtensorMap* map = MapsOf(args_, tables_.slot[segment], part);
      AcquireTensorMap(map);
#pragma unroll 1
      for (int chunk = first_; chunk < end_; ++chunk) {
        ring_.WaitEmpty();
        BarrierArriveExpect(ring_.weights_full(), Config::kFactorBytes);
        CopyTensorBoxOnce(ring_.weights(), map, chunk * kLinearStageK, row, ring_.weights_full());
        ring_.Advance();
      }
    });
  }

  // One thread. x_map has boxes of min(64, x_rows) rows. Earlier kernels are complete.
  __device__ void ProduceBatch(const CUtensorMap* x_map) {
    const int box_bytes = min(64, args_.x_rows) * 2 * kLinearStageK;
    ForEach([&](int segment, int, int) {
      const int first_tile = tables_.begin[segment] / 64;
      const int last_tile = (tables_.end[segment] - 1) / 64;
#pragma unroll 1
      for (int chunk = first_; chunk < end_; ++chunk) {
        ring_.WaitEmpty();
        BarrierArriveExpect(ring_.batch_full(), (last_tile - first_tile + 1) * box_bytes);
#pragma unroll 1
        for (int tile = first_tile; tile <= last_tile; ++tile) {
          CopyTensorBox(ring_.batch() + tile * 8192, x_map, chunk * kLinearStageK, tile * 64,
                        ring_.batch_full());
        }
        ring_.Advance();
      }
    });
  }

  // Consumers: a whole warpgroup.
  __device__ void Consume() {
    uint32_t parity = 0;  // of the phases that this unit completes
    bool later = false;
    ForEach([&](int segment, int part, int row) {
      const int first_tile = tables_.begin[segment] / 64;
      const int last_tile = (tables_.end[segment] - 1) / 64;
      const Span tiles = {first_tile, last_tile, later, parity};
      // Tensor-core code wants to know its registers: one loop for each number of tiles.
      const int count = __shfl_sync(0xFFFFFFFF, last_tile - first_tile + 1, 0);
      if (count == 1) {
        MultiplyAndSend<1>(tiles);
      } else if (kM == 2 || (kM > 2 && count == 2)) {
        MultiplyAndSend<(kM > 1 ? 2 : 1)>(tiles);
      } else {
        MultiplyAndSend<kM>(tiles);
      }
      const int tile = static_cast<int>(threadIdx.x / 32);
      if (tile >= first_tile && tile <= last_tile) {
        BarrierWait(met_, parity);
        Finish(tile, segment, part, row);
      }
      __syncwarp();
      if (lane_ < kLinearSlices) BarrierArriveRemote(RemoteAddress(free_, lane_));
      parity ^= 1;
      later = true;
    });
    NamedBarrier(1, 32 * Config::kConsumerWarps);
    if (threadIdx.x == 0) {
      WaitForPrevious();  // blocks without a unit have not; the projection before clears signals
      SignalRelease(&args_.signals->h_ready);
    }
  }

 private:
  template <typename F>
  __device__ void ForEach(F f) const {
    ForEachUnit(args_, tables_, blockIdx.x / kLinearSlices, gridDim.x / kLinearSlices, f);
  }

  // Tiles [first, last] of the batch have rows of a unit.
  struct Span {
    int first;
    int last;
    bool later;  // not this cluster's first unit
    uint32_t parity;
  };

  // The products of this block's slice for a unit, at most kCount tiles.
  template <int kCount>
  __device__ void MultiplyAndSend(const Span& tiles) {
    // What is computed of tiles that were not fetched is not used.
    const int base = __shfl_sync(0xFFFFFFFF, min(tiles.first, kM - kCount), 0);
    float d[kCount][kLinearBoxRows / 2];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int j = 0; j < kLinearBoxRows / 2; ++j) d[i][j] = 0.0f;
    }
    int previous = 0;
    const int stages = __shfl_sync(0xFFFFFFFF, end_ - first_, 0);
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      ring_.WaitFull();
      const uint64_t factors = WgmmaTile(ring_.weights());
      const uint32_t batch = ring_.batch() + base * 8192;
      WgmmaFence();
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          Wgmma<kLinearBoxRows>(d[i], WgmmaTile(batch + i * 8192) + 2 * step, factors + 2 * step,
                                1);
        }
      }
      WgmmaCommit();
      WgmmaWait<1>();
      if (stage > 0 && lane_ == 0) BarrierArrive(ring_.empty(previous));
      previous = ring_.stage();
      ring_.Advance();
    }
    WgmmaWait<0>();
    if (stages > 0 && lane_ == 0) BarrierArrive(ring_.empty(previous));
    if (tiles.later) BarrierWait(free_, tiles.parity ^ 1);
    if (threadIdx.x == 0) {
      BarrierArriveExpect(met_,
                          kLinearSlices * (tiles.last - tiles.first + 1) * Config::kShareBytes);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (base + i >= tiles.first && base + i <= tiles.last) Send(d[i], base + i);
    }
  }

  // Where the sums of a slice for this lane lie in a block.
  __device__ uint32_t Share(int slice, int tile) const {
    return exchange_ + (slice * kM + tile) * Config::kShareBytes + lane_ * 16;
  }

  // Warp w holds rows 16 w.. + 15 of the tile: 8 of block 2 w and 8 of the next one.
  __device__ void Send(const float (&d)[kLinearBoxRows / 2], int tile) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t to = RemoteAddress(Share(slice_, tile), 2 * warp + j);
      const uint32_t barrier = RemoteAddress(met_, 2 * warp + j);
#pragma unroll
      for (int i = 0; i < kLinearBoxRows / 16; ++i) {
        const int at = 8 * i + 2 * j;
        StoreRemote(to + i * 512, make_float4(d[at], d[at + 1], d[at + 4], d[at + 5]), barrier);
      }
    }
  }

  // One warp: this block's 8 rows of a tile.
  __device__ void Finish(int tile, int segment, int part, int factor_row) {
    const int row = 64 * tile + 8 * slice_ + lane_ / 4;
    const bool valid = row >= tables_.begin[segment] && row < tables_.end[segment];
    const int rank = tables_.rank[part][segment];
    const float scale =
        args_.p.table.factors[ModuleIndex(args_, tables_.slot[segment], part)].scale;
    __nv_bfloat16* h = args_.h + (static_cast<int64_t>(part) * args_.p.rows + row) * args_.ldh;
#pragma unroll
    for (int i = 0; i < kLinearBoxRows / 16; ++i) {
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int slice = 0; slice < kLinearSlices; ++slice) {
        const float4 value = LoadShared(Share(slice, tile) + i * 512);
        sum.x += value.x;
        sum.y += value.y;
        sum.z += value.z;
        sum.w += value.w;
      }
      const int column = factor_row + 16 * i + 2 * (lane_ % 4);
      if (valid && column < rank) {
        *reinterpret_cast<__nv_bfloat162*>(h + column) =
            __floats2bfloat162_rn(scale * sum.x, scale * sum.y);
      }
      if (valid && column + 8 < rank) {
        *reinterpret_cast<__nv_bfloat162*>(h + column + 8) =
            __floats2bfloat162_rn(scale * sum.z, scale * sum.w);
      }
    }
  }

  const LinearArgs& args_;
  const LinearTables& tables_;
  LinearRing ring_;
  const uint32_t met_;
  const uint32_t free_;
  const uint32_t exchange_;
  const int slice_;
  const int first_;  // chunks of the slice
  const int end_;
  const int lane_;
};

// Waits for the kernels before the shrink, and lets the projection know.
__device__ inline void FollowPrevious(const LinearArgs& args) {
  WaitForPrevious();
  if (blockIdx.x == 0) StoreRelease(&args.signals->x_ready, args.launch);
}

// The kernel, of all threads, in shared memory that it is given; `dynamic`: 1024-byte aligned.
template <int kM>
__device__ void RunShrink(const CUtensorMap* x_map, const LinearArgs& args,
                          typename ShrinkBlock<kM>::Shared& shared, uint32_t dynamic) {
  using Config = ShrinkConfig<kM>;
  using Block = ShrinkBlock<kM>;
  LaunchDependents();
  if (threadIdx.x == 0) {
    PrefetchTensorMap(x_map);
    Block::InitBarriers(args, shared);
  }
  const bool adapted = FillTables<Config::kThreads>(args, shared.tables);
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
  const bool is_batch_producer = warp == Config::kConsumerWarps + 1 && threadIdx.x % 32 == 0;
  if (__syncthreads_or(adapted) == 0) {
    if (is_batch_producer) FollowPrevious(args);
    return;
  }
  ClusterBarrier();
  Block block(args, shared, dynamic);
  if (warp < Config::kConsumerWarps) {
    block.Consume();
  } else if (warp == Config::kConsumerWarps && threadIdx.x % 32 == 0) {
    block.ProduceFactors();
  } else if (is_batch_producer) {
    FollowPrevious(args);
    block.ProduceBatch(x_map);
  }
  __syncwarp();
  ClusterBarrier();  // others still write to this block's shared memory
}

template <int kM>
__global__ void __launch_bounds__(ShrinkConfig<kM>::kThreads)
    ShrinkKernel(const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ LinearArgs args) {
  extern __shared__ uint8_t dynamic[];
  __shared__ typename ShrinkBlock<kM>::Shared shared;
  RunShrink<kM>(&x_map, args, shared, (SharedAddress(dynamic) + 1023) / 1024 * 1024);
}

}  // namespace dorad::kernels
