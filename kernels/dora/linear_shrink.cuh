// h = s · (A x) for all adapters of a batch, before the projection: see linear.h.
//
// Boxes of kLinearBoxRows rows of A, of all segments and parts, are dealt evenly to clusters of
// kLinearSlices blocks, each of which has a slice of K. A cluster takes a few boxes at once, so
// that x is fetched once for them: the batch is the M operand of wgmma, the boxes side by side the
// N operand. The blocks' sums meet in shared memory, 8 rows of every 64 of the batch in each block,
// and are added in the order of K while the next boxes are multiplied.
//
// Warps: 4 multiply | 4 add | producer of A | producer of x.
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
  static constexpr int kMultipliers = 4;  // warps
  static constexpr int kAdders = 4;
  static constexpr int kThreads = 32 * (kMultipliers + kAdders + 2);
  static constexpr int kMaxStages = 8;
  static constexpr int kMaxBoxes = kM <= 2 ? 2 : 1;  // at once
  static constexpr int kBoxBytes = kLinearBoxRows * 2 * kLinearStageK;
  static constexpr int kFactorBytes = kMaxBoxes * kBoxBytes;  // of a stage
  // Of one block, a box and 64 rows of the batch, in one other block: 8 rows of sums.
  static constexpr int kShareBytes = 8 * kLinearBoxRows * 4;
  static constexpr int kSliceBytes = kM * kMaxBoxes * kShareBytes;
  static constexpr int kExchanges = 2;  // one is written while the other one is added
  static constexpr int kExchangeBytes = kExchanges * kLinearSlices * kSliceBytes;
};

// Boxes that a cluster takes at once.
template <int kMaxBoxes>
struct ShrinkGroup {
  int boxes = 0;
  int segment[kMaxBoxes];
  int part[kMaxBoxes];
  int row[kMaxBoxes];  // of A, the first one
  int first_tile;      // of the batch, of all boxes' segments
  int last_tile;
};

template <int kM>
class ShrinkBlock {
 public:
  using Config = ShrinkConfig<kM>;
  using Group = ShrinkGroup<Config::kMaxBoxes>;

  struct Shared {
    LinearTables tables;
    LinearRingBarriers<Config::kMaxStages> ring;
    uint64_t met[Config::kExchanges];    // the sums of all slices have come
    uint64_t added[Config::kExchanges];  // all blocks have added theirs: it may be written again
  };

  __device__ ShrinkBlock(const LinearArgs& args, Shared& shared, uint32_t dynamic)
      : args_(args),
        tables_(shared.tables),
        ring_(shared.ring, dynamic, args.stages, Config::kFactorBytes,
              Config::kFactorBytes + args.x_rows * 2 * kLinearStageK),
        met_(SharedAddress(shared.met)),
        added_(SharedAddress(shared.added)),
        exchange_(dynamic + args.stages * (Config::kFactorBytes + args.x_rows * 2 * kLinearStageK)),
        slice_(blockIdx.x % kLinearSlices),
        first_(slice_ * args.plan.a_chunks),
        end_(min(first_ + args.plan.a_chunks, args.plan.chunks)),
        lane_(threadIdx.x % 32) {}

  __device__ static void InitBarriers(const LinearArgs& args, Shared& shared) {
    shared.ring.Init(args.stages, 1, Config::kMultipliers);
#pragma unroll
    for (int i = 0; i < Config::kExchanges; ++i) {
      BarrierInit(SharedAddress(&shared.met[i]), 1);
      BarrierInit(SharedAddress(&shared.added[i]), kLinearSlices * Config::kAdders);
    }
    BarrierInitFence();
  }

  // One thread.
  __device__ void ProduceFactors() {
    ForEachGroup([&](const Group& group) {
#pragma unroll
      for (int i = 0; i < Config::kMaxBoxes; ++i) {
        if (i >= group.boxes) break;
        AcquireTensorMap(MapsOf(args_, tables_.slot[group.segment[i]], group.part[i]));
      }
#pragma unroll 1
      for (int chunk = first_; chunk < end_; ++chunk) {
        ring_.WaitEmpty();
        BarrierArriveExpect(ring_.weights_full(), group.boxes * Config::kBoxBytes);
#pragma unroll
        for (int i = 0; i < Config::kMaxBoxes; ++i) {
          if (i >= group.boxes) break;
          CopyTensorBoxOnce(ring_.weights() + i * Config::kBoxBytes,
                            MapsOf(args_, tables_.slot[group.segment[i]], group.part[i]),
                            chunk * kLinearStageK, group.row[i], ring_.weights_full());
        }
        ring_.Advance();
      }
    });
  }

  // One thread. x_map has boxes of min(64, x_rows) rows. Earlier kernels are complete.
  __device__ void ProduceBatch(const CUtensorMap* x_map) {
    const int box_bytes = min(64, args_.x_rows) * 2 * kLinearStageK;
    ForEachGroup([&](const Group& group) {
#pragma unroll 1
      for (int chunk = first_; chunk < end_; ++chunk) {
        ring_.WaitEmpty();
        BarrierArriveExpect(ring_.batch_full(),
                            (group.last_tile - group.first_tile + 1) * box_bytes);
#pragma unroll 1
        for (int tile = group.first_tile; tile <= group.last_tile; ++tile) {
          CopyTensorBox(ring_.batch() + tile * 8192, x_map, chunk * kLinearStageK, tile * 64,
                        ring_.batch_full());
        }
        ring_.Advance();
      }
    });
  }

  // A whole warpgroup.
  __device__ void Multiply() {
    int round = 0;
    ForEachGroup([&](const Group& group) {
      // Tensor-core code wants to know its registers: one loop for each case.
      const int boxes = __shfl_sync(0xFFFFFFFF, group.boxes, 0);
      if (boxes == 1) {
        MultiplyBoxes<1>(group, round);
      } else if (boxes == 2) {
        MultiplyBoxes<(Config::kMaxBoxes >= 2 ? 2 : 1)>(group, round);
      } else {
        MultiplyBoxes<Config::kMaxBoxes>(group, round);
      }
      ++round;
    });
  }

  // kAdders warps, `adder` one of them.
  __device__ void Add(int adder) {
    int round = 0;
    ForEachGroup([&](const Group& group) {
      const int exchange = round % Config::kExchanges;
      BarrierWait(met_ + 8 * exchange, round / Config::kExchanges & 1);
      const int tiles = group.last_tile - group.first_tile + 1;
#pragma unroll 1
      for (int i = adder; i < tiles * group.boxes; i += Config::kAdders) {
        const int box = i / tiles;
        int segment = group.segment[0];
        int part = group.part[0];
        int row = group.row[0];
#pragma unroll
        for (int j = 1; j < Config::kMaxBoxes; ++j) {
          if (j != box) continue;
          segment = group.segment[j];
          part = group.part[j];
          row = group.row[j];
        }
        Finish(exchange, group.first_tile + i % tiles, box, segment, part, row);
      }
      __syncwarp();
      if (lane_ < kLinearSlices) {
        BarrierArriveRemote(RemoteAddress(added_ + 8 * exchange, lane_));
      }
      ++round;
    });
    NamedBarrier(1, 32 * Config::kAdders);
    if (adder == 0 && lane_ == 0) {
      WaitForPrevious();  // blocks without a box have not; the projection before clears signals
      SignalRelease(&args_.signals->h_ready);
    }
  }

 private:
  // f(group) for the boxes of this cluster: the same in all blocks and roles.
  template <typename F>
  __device__ void ForEachGroup(F f) const {
    const int cluster = blockIdx.x / kLinearSlices;
    const int clusters = gridDim.x / kLinearSlices;
    int total = 0;
    ForEachFactor([&](int, int, int boxes) { total += boxes; });
    const int begin = total * cluster / clusters;
    const int end = total * (cluster + 1) / clusters;
    Group group;
    int base = 0;
    int taken = begin;
    ForEachFactor([&](int segment, int part, int boxes) {
#pragma unroll 1
      for (int box = max(taken - base, 0); box < boxes && taken < end; ++box, ++taken) {
        const int first_tile = tables_.begin[segment] / 64;
        const int last_tile = (tables_.end[segment] - 1) / 64;
#pragma unroll
        for (int i = 0; i < Config::kMaxBoxes; ++i) {
          if (i != group.boxes) continue;
          group.segment[i] = segment;
          group.part[i] = part;
          group.row[i] = box * kLinearBoxRows;
        }
        group.first_tile = group.boxes == 0 ? first_tile : min(group.first_tile, first_tile);
        group.last_tile = group.boxes == 0 ? last_tile : max(group.last_tile, last_tile);
        if (++group.boxes == Config::kMaxBoxes || taken + 1 == end) {
          f(group);
          group.boxes = 0;
        }
      }
      base += boxes;
    });
  }

  // f(segment, part, boxes of its A)
  template <typename F>
  __device__ void ForEachFactor(F f) const {
#pragma unroll 1
    for (int part = 0; part < args_.p.shape.parts; ++part) {
#pragma unroll 1
      for (int segment = 0; segment < tables_.segments; ++segment) {
        f(segment, part, (tables_.rank[part][segment] + kLinearBoxRows - 1) / kLinearBoxRows);
      }
    }
  }

  template <int kBoxes>
  __device__ void MultiplyBoxes(const Group& group, int round) {
    if (kM == 1 || __shfl_sync(0xFFFFFFFF, group.first_tile == group.last_tile, 0) != 0) {
      MultiplyTiles<kBoxes, 1>(group, round);
    } else {
      MultiplyTiles<kBoxes, kM>(group, round);
    }
  }

  // The products of this block's slice, of one tile of the batch or of all of them.
  template <int kBoxes, int kTiles>
  __device__ void MultiplyTiles(const Group& group, int round) {
    constexpr int kN = kBoxes * kLinearBoxRows;
    // What is computed of tiles that were not fetched is not used.
    const int base = kTiles == kM ? 0 : __shfl_sync(0xFFFFFFFF, group.first_tile, 0);
    float d[kTiles][kN / 2];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kN / 2; ++j) d[i][j] = 0.0f;
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
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          Wgmma<kN>(d[i], WgmmaTile(batch + i * 8192) + 2 * step, factors + 2 * step, 1);
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
    const int exchange = round % Config::kExchanges;
    const int uses = round / Config::kExchanges;  // of it before
    if (uses > 0) BarrierWait(added_ + 8 * exchange, (uses - 1) & 1);
    if (threadIdx.x == 0) {
      BarrierArriveExpect(
          met_ + 8 * exchange,
          kLinearSlices * kBoxes * (group.last_tile - group.first_tile + 1) * Config::kShareBytes);
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (base + i < group.first_tile || base + i > group.last_tile) continue;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        Send(&d[i][box * kLinearBoxRows / 2], exchange, base + i, box);
      }
    }
  }

  // Where a block's sums for this lane lie.
  __device__ uint32_t Share(int exchange, int slice, int tile, int box) const {
    return exchange_ + (exchange * kLinearSlices + slice) * Config::kSliceBytes +
           (tile * Config::kMaxBoxes + box) * Config::kShareBytes + lane_ * 16;
  }

  // Warp w holds rows 16 w.. + 15 of the tile: 8 of block 2 w and 8 of the next one.
  __device__ void Send(const float* d, int exchange, int tile, int box) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t to = RemoteAddress(Share(exchange, slice_, tile, box), 2 * warp + j);
      const uint32_t barrier = RemoteAddress(met_ + 8 * exchange, 2 * warp + j);
#pragma unroll
      for (int i = 0; i < kLinearBoxRows / 16; ++i) {
        const int at = 8 * i + 2 * j;
        StoreRemote(to + i * 512, make_float4(d[at], d[at + 1], d[at + 4], d[at + 5]), barrier);
      }
    }
  }

  // One warp: this block's 8 rows of a tile and a box.
  __device__ void Finish(int exchange, int tile, int box, int segment, int part, int factor_row) {
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
        const float4 value = LoadShared(Share(exchange, slice, tile, box) + i * 512);
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
  const uint32_t added_;
  const uint32_t exchange_;
  const int slice_;
  const int first_;  // chunks of the slice
  const int end_;
  const int lane_;
};

// Waits for x: without params.x_ready by waiting for the kernels before the shrink, which it lets
// the projection know.
__device__ inline void FollowPrevious(const LinearArgs& args) {
  if (args.p.x_ready == nullptr) {
    WaitForPrevious();
    if (blockIdx.x == 0) StoreRelease(&args.signals->x_ready, args.launch);
  } else {
    WaitForX(args);
  }
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
  const bool is_factor_producer =
      warp == Config::kMultipliers + Config::kAdders && threadIdx.x % 32 == 0;
  const bool is_batch_producer =
      warp == Config::kMultipliers + Config::kAdders + 1 && threadIdx.x % 32 == 0;
  if (__syncthreads_or(adapted) == 0) {
    if (is_batch_producer) {
      FollowPrevious(args);
      WaitForPrevious();  // who waits for this kernel waits for all before it
    }
    return;
  }
  ClusterBarrier();
  Block block(args, shared, dynamic);
  if (warp < Config::kMultipliers) {
    block.Multiply();
  } else if (warp < Config::kMultipliers + Config::kAdders) {
    block.Add(warp - Config::kMultipliers);
  } else if (is_factor_producer) {
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
