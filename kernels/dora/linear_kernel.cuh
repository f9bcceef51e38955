// The kernel behind DoraLinear: see linear.h for what it computes and linear_plan.h for the cut.
//
// A block streams (weight tile, activation tile) pairs of 64 elements of K through a ring of shared
// memory into wgmma, the weight tile as the M operand (64 rows a warpgroup), the batch as N. What
// the pairs are is known to the producers alone:
//   pieces of the shrink:  (A of a slot, x), later summed over pieces of K into h
//   its tile of W:         (W, x) over K = in, then (B of a slot, h masked to the slot's rows) over
//                          K = rank, into the same accumulators
// Rows outside of a segment see products with zero, which change no bit of an fp32 sum.
//
// Warps: consumers | weight producer | activation producer | reducers. Weights depend on no kernel
// before this one, so their producer runs ahead as far as the ring reaches; but what is in flight
// is bounded, or what the chain x -> h -> y waits for would queue behind it.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <climits>
#include <cstdint>

#include "kernels/common/barrier.cuh"
#include "kernels/common/wgmma.cuh"
#include "kernels/dora/linear_args.h"

namespace dorad::kernels {

#ifndef DORAD_FLIGHT_KB
#define DORAD_FLIGHT_KB 96
#endif
template <int kGroups, int kN>
struct LinearConfig {
  static constexpr int kPanelRows = 64 * kGroups;
  static constexpr int kConsumerWarps = 4 * kGroups;
  static constexpr int kReducerWarps = kN <= 64 ? 4 : 2;  // registers
  static constexpr int kThreads = 32 * (kConsumerWarps + 2 + kReducerWarps);
  static constexpr int kWeightBytes = kPanelRows * 2 * kLinearStageK;
  static constexpr int kStageBytes = kWeightBytes + kN * 2 * kLinearStageK;
  static constexpr int kStaticBytes = 20 * 1024;  // static shared memory, rounded up
  static constexpr int kStages = (227 * 1024 - 1024 - kStaticBytes) / kStageBytes;
  static constexpr int kDynamicBytes = kStages * kStageBytes + 1024;  // for alignment
  // Stages of weights on their way at once: twice what latency times bandwidth asks for.
  static constexpr int kFlight = DORAD_FLIGHT_KB * 1024 / kWeightBytes < kStages
                                     ? DORAD_FLIGHT_KB * 1024 / kWeightBytes
                                     : kStages;
};

// What all roles of a block know about the batch.
struct LinearTables {
  // By part and segment; g is to be indexed by rows of W, nullptr: 1.
  const float* g[kDoraLinearMaxParts][kDoraLinearMaxRows];
  float scale[kDoraLinearMaxParts][kDoraLinearMaxRows];
  int32_t segments;
  int32_t pieces;  // of the shrink, in all blocks
  int32_t slot[kDoraLinearMaxRows];
  int16_t begin[kDoraLinearMaxRows];
  int16_t end[kDoraLinearMaxRows];
  int16_t rank[kDoraLinearMaxParts][kDoraLinearMaxRows];  // rounded up to 8
  uint8_t segment_of[kDoraLinearMaxRows];                 // of a row of the batch
};

// Of A, then B.
__device__ inline const CUtensorMap* MapsOf(const LinearArgs& args, int slot, int part) {
  return args.p.maps +
         2 * (static_cast<int64_t>(slot) * args.p.table.modules + args.p.first_module + part);
}

// Whole block. `tables.pieces` is 0 and visible on entry.
template <int kPanelRows>
__device__ inline void FillTables(const LinearArgs& args, LinearTables& tables) {
  const int rows = args.p.rows;
  // Loaded before it is known whether there are that many: one wait less.
  RowSegment segment;
  if (threadIdx.x < rows) segment = args.p.segments[threadIdx.x];
  const int count = min(*args.p.num_segments, rows);
  if (threadIdx.x == 0) tables.segments = count;
  static_assert(kDoraLinearMaxRows <= 256);
  if (const int i = threadIdx.x; i < count) {
    const int begin = max(segment.begin, 0);
    const int end = min(segment.end, args.p.rows);
    tables.slot[i] = segment.slot;
    tables.begin[i] = static_cast<int16_t>(begin);
    tables.end[i] = static_cast<int16_t>(end);
    int pieces = 0;
#pragma unroll 1
    for (int part = 0; part < args.p.shape.parts; ++part) {
      int rank = 0;
      tables.g[part][i] = nullptr;
      if (segment.slot >= 0 && end > begin) {
        const int64_t index =
            static_cast<int64_t>(segment.slot) * args.p.table.modules + args.p.first_module + part;
        const DoraFactors factors = args.p.table.factors[index];
        rank = factors.rank;
        if (rank != 0) {
          if (factors.g != nullptr) tables.g[part][i] = factors.g - args.part_begin[part];
          tables.scale[part][i] = factors.scale;
          PrefetchTensorMap(args.p.maps + 2 * index);
          PrefetchTensorMap(args.p.maps + 2 * index + 1);
        }
      }
      tables.rank[part][i] = static_cast<int16_t>((rank + 7) / 8 * 8);
      pieces += (rank + kPanelRows - 1) / kPanelRows * args.plan.a_splits;
    }
#pragma unroll 1
    for (int row = begin; row < end; ++row) tables.segment_of[row] = static_cast<uint8_t>(i);
    if (pieces != 0) atomicAdd(&tables.pieces, pieces);
  }
}

// The walks below are the same in every role: f(segment, part, panel of A, piece of K).
template <int kPanelRows, typename F>
__device__ inline void ForEachPiece(const LinearArgs& args, const LinearTables& tables, F f) {
  if (tables.pieces == 0) return;
  // From the last block down: the last ones may have no tile of W.
  int next = gridDim.x - 1 - blockIdx.x;
  int base = 0;
#pragma unroll 1
  for (int part = 0; part < args.p.shape.parts; ++part) {
#pragma unroll 1
    for (int segment = 0; segment < tables.segments; ++segment) {
      const int rank = tables.rank[part][segment];
      base += (rank + kPanelRows - 1) / kPanelRows * args.plan.a_splits;
#pragma unroll 1
      for (; next < base; next += gridDim.x) {
        const int last = base - 1 - next;
        f(segment, part, last / args.plan.a_splits, last % args.plan.a_splits);
      }
    }
  }
}

// f(segment, part, first chunk, end) of columns of B, of the parts that the panel has rows of.
template <int kPanelRows, typename F>
__device__ inline void ForEachRankRange(const LinearArgs& args, const LinearTables& tables,
                                        int panel, int split, F f) {
  if (tables.pieces == 0) return;
  const int row = panel * kPanelRows;
#pragma unroll 1
  for (int segment = 0; segment < tables.segments; ++segment) {
#pragma unroll 1
    for (int part = 0; part < args.p.shape.parts; ++part) {
      if (row >= args.part_begin[part + 1]) continue;
      if (row + kPanelRows <= args.part_begin[part]) break;
      const int chunks = (tables.rank[part][segment] + kLinearStageK - 1) / kLinearStageK;
      f(segment, part, chunks * split >> args.plan.log_splits,
        chunks * (split + 1) >> args.plan.log_splits);
    }
  }
}

// f(segment, part, chunk)
template <int kPanelRows, typename F>
__device__ inline void ForEachRankStage(const LinearArgs& args, const LinearTables& tables,
                                        int panel, int split, F f) {
  ForEachRankRange<kPanelRows>(args, tables, panel, split,
                               [&](int segment, int part, int first, int end) {
#pragma unroll 1
                                 for (int chunk = first; chunk < end; ++chunk)
                                   f(segment, part, chunk);
                               });
}

// f(part, stages)
template <int kPanelRows, typename F>
__device__ inline void ForEachRankRun(const LinearArgs& args, const LinearTables& tables, int panel,
                                      int split, F f) {
  ForEachRankRange<kPanelRows>(args, tables, panel, split,
                               [&](int, int part, int first, int end) { f(part, end - first); });
}

template <int kPanelRows, typename F>
__device__ inline void ForEachTile(const LinearPlan& plan, F f) {
#pragma unroll 1
  for (int tile = blockIdx.x; tile < plan.Tiles(); tile += gridDim.x) {
    f(tile >> plan.log_splits, tile & (plan.splits - 1));
  }
}

__device__ inline int FirstChunk(const LinearPlan& plan, int split) {
  return plan.chunks * split >> plan.log_splits;
}

// Where 16-byte unit `unit` of row `row` of a swizzled tile lies.
__device__ inline uint32_t SwizzledOffset(int row, int unit) {
  return row * 128 + ((unit ^ (row & 7)) << 4);
}

// What a role of a block knows. Every role walks the same stages in the same order.
template <int kGroups, int kN>
class LinearBlock {
 public:
  using Config = LinearConfig<kGroups, kN>;

  struct Shared {
    LinearTables tables;
    uint64_t weights_full[Config::kStages];
    uint64_t batch_full[Config::kStages];
    uint64_t empty[Config::kStages];
    // Of each consumer warp: 8 rows of the batch, 16 of W, and room against bank conflicts.
    alignas(16) uint8_t y[Config::kConsumerWarps][8][48];
  };

  __device__ LinearBlock(const LinearArgs& args, Shared& shared, uint32_t ring)
      : args_(args),
        tables_(shared.tables),
        ring_(ring),
        weights_full_(SharedAddress(shared.weights_full)),
        batch_full_(SharedAddress(shared.batch_full)),
        empty_(SharedAddress(shared.empty)),
        y_(SharedAddress(shared.y)),
        lane_(threadIdx.x % 32) {}

  // One thread, before the others start.
  __device__ static void InitBarriers(Shared& shared) {
#pragma unroll 1
    for (int stage = 0; stage < Config::kStages; ++stage) {
      BarrierInit(SharedAddress(&shared.weights_full[stage]), 1);
      BarrierInit(SharedAddress(&shared.batch_full[stage]), 1);
      BarrierInit(SharedAddress(&shared.empty[stage]), Config::kConsumerWarps);
    }
    BarrierInitFence();
  }

  // One thread.
  __device__ void ProduceWeights(const CUtensorMap* w_map) {
    ForEachPiece<Config::kPanelRows>(
        args_, tables_, [&](int segment, int part, int panel, int piece) {
          const CUtensorMap* map = MapsOf(args_, tables_.slot[segment], part);
          const int row = panel * Config::kPanelRows;
          const int boxes = CeilDivide(tables_.rank[part][segment] - row, kLinearBoxRows);
          const int first = piece * args_.plan.a_chunks;
          const int end = min(first + args_.plan.a_chunks, args_.plan.chunks);
      // Rows beyond the last box keep old contents: nobody reads their sums.
#pragma unroll 1
          for (int chunk = first; chunk < end; ++chunk) {
            ProduceBoxes(map, chunk, row, 0, min(boxes, kGroups));
          }
        });
    ForEachTile<Config::kPanelRows>(args_.plan, [&](int panel, int split) {
      const int row = panel * Config::kPanelRows;
      const int end = FirstChunk(args_.plan, split + 1);
#pragma unroll 1
      for (int chunk = FirstChunk(args_.plan, split); chunk < end; ++chunk) {
        WaitForRoom();
        BarrierArriveExpect(weights_full_ + 8 * stage_, Config::kWeightBytes);
        CopyTensorBoxOnce(Tile(), w_map, chunk * kLinearStageK, row, weights_full_ + 8 * stage_);
        Advance();
      }
      ForEachRankStage<Config::kPanelRows>(
          args_, tables_, panel, split, [&](int segment, int part, int chunk) {
            // Rows of a box that are of other parts are out of bounds: zero.
            int first = 0;
#pragma unroll 1
            while (!HasPart(row + 64 * first, part)) ++first;
            int last = first;
#pragma unroll 1
            while (last + 1 < kGroups && HasPart(row + 64 * (last + 1), part)) ++last;
            ProduceBoxes(MapsOf(args_, tables_.slot[segment], part) + 1, chunk,
                         row - args_.part_begin[part], first, last + 1);
          });
    });
  }

  // One warp.
  __device__ void ProduceActivations(const CUtensorMap* x_map) {
    WaitForPrevious();
    const auto produce_x = [&](int chunk) {
      WaitEmpty();
      if (lane_ == 0) {
        BarrierArriveExpect(batch_full_ + 8 * stage_, kN * 2 * kLinearStageK);
        CopyTensorBox(Tile() + Config::kWeightBytes, x_map, chunk * kLinearStageK, 0,
                      batch_full_ + 8 * stage_);
      }
      Advance();
    };
    ForEachPiece<Config::kPanelRows>(args_, tables_, [&](int, int, int, int piece) {
      const int end = min((piece + 1) * args_.plan.a_chunks, args_.plan.chunks);
#pragma unroll 1
      for (int chunk = piece * args_.plan.a_chunks; chunk < end; ++chunk) produce_x(chunk);
    });
    bool h_ready = false;
    ForEachTile<Config::kPanelRows>(args_.plan, [&](int panel, int split) {
      const int end = FirstChunk(args_.plan, split + 1);
#pragma unroll 1
      for (int chunk = FirstChunk(args_.plan, split); chunk < end; ++chunk) produce_x(chunk);
      ForEachRankStage<Config::kPanelRows>(
          args_, tables_, panel, split, [&](int segment, int part, int chunk) {
            if (!h_ready) WaitForH();
            h_ready = true;
            WaitEmpty();
            CopyH(Tile() + Config::kWeightBytes, segment, part, chunk * kLinearStageK);
            BarrierHoldForCopies(batch_full_ + 8 * stage_);
            __syncwarp();
            if (lane_ == 0) BarrierArrive(batch_full_ + 8 * stage_);
            Advance();
          });
    });
    if (tables_.pieces == 0) return;
    if (!h_ready) WaitForH();
    // The last block to come here leaves the counters as it found them.
    if (lane_ == 0 && atomicAdd(&args_.counters->left, 1) == gridDim.x - 1) {
      args_.counters->shrunk = 0;
      args_.counters->reduced = 0;
      args_.counters->left = 0;
    }
  }

  // Reducers, `reducer` below kReducerWarps: this block's share of h = s · (sum of the shrink's
  // pieces, in order), as bf16.
  __device__ void Reduce(int reducer) {
    if (tables_.pieces == 0) return;
    WaitForPrevious();
    if (lane_ == 0) SpinUntil(&args_.counters->shrunk, gridDim.x);
    __syncwarp();
    constexpr int kColumns = 32 * 4;
    constexpr int kDeep = 16;  // loads in flight
    const int rows = args_.p.rows;
    const int lines = args_.p.shape.parts * rows;
    const int tasks = CeilDivide(args_.ldh, kColumns) * lines;
#pragma unroll 1
    for (int task = reducer * gridDim.x + blockIdx.x; task < tasks;
         task += Config::kReducerWarps * gridDim.x) {
      const int line = task % lines;
      const int part = line / rows;
      const int segment = tables_.segment_of[line % rows];
      const int column = task / lines * kColumns + lane_ * 4;
      if (column >= tables_.rank[part][segment]) continue;
      const int64_t offset = static_cast<int64_t>(line) * args_.ldh + column;
      const int64_t stride = static_cast<int64_t>(lines) * args_.ldh / 4;
      const float4* partial = reinterpret_cast<const float4*>(args_.h_partial + offset);
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
      for (int first = 0; first < args_.plan.a_splits; first += kDeep) {
        float4 value[kDeep];
#pragma unroll
        for (int i = 0; i < kDeep; ++i) {
          value[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (first + i < args_.plan.a_splits) value[i] = __ldcg(partial + (first + i) * stride);
        }
#pragma unroll
        for (int i = 0; i < kDeep; ++i) Add(sum, value[i]);
      }
      const float scale = tables_.scale[part][segment];
      auto* h = reinterpret_cast<__nv_bfloat162*>(args_.h + offset);
      h[0] = __floats2bfloat162_rn(scale * sum.x, scale * sum.y);
      h[1] = __floats2bfloat162_rn(scale * sum.z, scale * sum.w);
    }
    SignalAll(&args_.counters->reduced, 2, Config::kReducerWarps, reducer);
  }

  // Consumers: whole warpgroups.
  __device__ void Consume() {
    WaitForPrevious();
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    const int group = warp / 4;
    ForEachPiece<Config::kPanelRows>(
        args_, tables_, [&](int segment, int part, int panel, int piece) {
          float d[kN / 2];
          const int first = piece * args_.plan.a_chunks;
          Clear(d);
          Accumulate(d, min(args_.plan.a_chunks, args_.plan.chunks - first), group, false);
          StoreShrunk(d, segment, part, panel * Config::kPanelRows + warp * 16, piece);
        });
    if (tables_.pieces != 0) {
      SignalAll(&args_.counters->shrunk, 1, Config::kConsumerWarps, warp);
    }
    ForEachTile<Config::kPanelRows>(args_.plan, [&](int panel, int split) {
      float d[kN / 2];
      const Epilogue epilogue = StartEpilogue(panel * Config::kPanelRows + warp * 16);
      Clear(d);
      Accumulate(d, FirstChunk(args_.plan, split + 1) - FirstChunk(args_.plan, split), group,
                 false);
      const int group_row = panel * Config::kPanelRows + 64 * group;
      ForEachRankRun<Config::kPanelRows>(args_, tables_, panel, split, [&](int part, int stages) {
        if (HasPart(group_row, part)) {
          Accumulate(d, stages, group, true);
        } else {
          Skip(stages);
        }
      });
      if (args_.clusters || (args_.plan.Tiles() <= gridDim.x && args_.plan.splits == 1)) {
        FinishThroughRing(d, epilogue, split, warp);
      } else if (args_.plan.splits == 1 || MeetInWorkspace(d, panel, split, warp)) {
        Finish(d, epilogue, warp);
      }
    });
  }

 private:
  // What becomes of the 16 rows of W of a warp; loaded before the sums are there.
  struct Epilogue {
    int row;        // the first of the 16
    int part;       // of all of them: parts end at multiples of 16 rows
    bool one_g;     // the batch is one segment
    float g[2];     // then: of the lane's two rows
    float bias[2];  // likewise
  };

  __device__ static int CeilDivide(int a, int b) { return (a + b - 1) / b; }

  __device__ static void Add(float4& sum, const float4& value) {
    sum.x += value.x;
    sum.y += value.y;
    sum.z += value.z;
    sum.w += value.w;
  }

  // Whether any of 64 rows of W is of the part.
  __device__ bool HasPart(int row, int part) const {
    return row < args_.part_begin[part + 1] && row + 64 > args_.part_begin[part];
  }

  __device__ uint32_t Tile() const { return ring_ + stage_ * Config::kStageBytes; }

  __device__ void Advance() {
    if (++stage_ == Config::kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  __device__ void WaitEmpty() { BarrierWait(empty_ + 8 * stage_, parity_ ^ 1); }

  // Until there is room in the ring, and few enough stages are in flight.
  __device__ void WaitForRoom() {
    if (in_flight_ == Config::kFlight) {
      const int oldest = stage_ - Config::kFlight;
      BarrierWait(weights_full_ + 8 * (oldest < 0 ? oldest + Config::kStages : oldest),
                  oldest < 0 ? parity_ ^ 1 : parity_);
    } else {
      ++in_flight_;
    }
    WaitEmpty();
  }

  // Boxes [first, end) of kLinearBoxRows rows into the next stage; box 0 begins at `row`.
  __device__ void ProduceBoxes(const CUtensorMap* map, int chunk, int row, int first, int end) {
    constexpr int kBoxBytes = kLinearBoxRows * 2 * kLinearStageK;
    WaitForRoom();
    BarrierArriveExpect(weights_full_ + 8 * stage_, (end - first) * kBoxBytes);
#pragma unroll 1
    for (int box = first; box < end; ++box) {
      CopyTensorBoxOnce(Tile() + box * kBoxBytes, map, chunk * kLinearStageK,
                        row + box * kLinearBoxRows, weights_full_ + 8 * stage_);
    }
    Advance();
  }

  __device__ void WaitForH() {
    if (lane_ == 0) SpinUntil(&args_.counters->reduced, gridDim.x);
    __syncwarp();
  }

  // Columns k0.. of h, zero in rows outside of the segment. One warp.
  __device__ void CopyH(uint32_t tile, int segment, int part, int k0) {
    const int unit = lane_ % 8;
    const int k = k0 + unit * 8;
    const bool in_rank = k < tables_.rank[part][segment];
    const int begin = tables_.begin[segment];
    const int end = in_rank ? tables_.end[segment] : 0;
    const __nv_bfloat16* h =
        args_.h + static_cast<int64_t>(part) * args_.p.rows * args_.ldh + (in_rank ? k : 0);
#pragma unroll 4
    for (int row = lane_ / 8; row < kN; row += 4) {
      const bool valid = row >= begin && row < end;
      CopyAsync16(tile + SwizzledOffset(row, unit),
                  valid ? h + static_cast<int64_t>(row) * args_.ldh : h, valid);
    }
  }

  // One arrival for `warps` warps of the block, after all that they wrote.
  __device__ void SignalAll(uint32_t* counter, int barrier, int warps, int warp) {
    __threadfence();
    NamedBarrier(barrier, 32 * warps);
    if (warp == 0 && lane_ == 0) SignalRelease(counter);
  }

  __device__ static void Clear(float (&d)[kN / 2]) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) d[i] = 0.0f;
  }

  // Adds the products of the next `stages`; `copied`: threads wrote their batch tiles.
  __device__ void Accumulate(float (&d)[kN / 2], int stages, int group, bool copied) {
    stages = __shfl_sync(0xFFFFFFFF, stages, 0);  // tells the compiler that the warp agrees
    int previous = 0;
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      BarrierWait(batch_full_ + 8 * stage_, parity_);
      BarrierWait(weights_full_ + 8 * stage_, parity_);
      if (copied) FenceProxyAsync();
      const uint64_t weights = WgmmaTile(Tile() + group * 8192);
      const uint64_t batch = WgmmaTile(Tile() + Config::kWeightBytes);
      WgmmaFence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        Wgmma<kN>(d, weights + 2 * step, batch + 2 * step, 1);
      }
      WgmmaCommit();
      // The stage before this one can go back: its products are complete.
      WgmmaWait<1>();
      if (i > 0 && lane_ == 0) BarrierArrive(empty_ + 8 * previous);
      previous = stage_;
      Advance();
    }
    WgmmaWait<0>();
    if (stages > 0 && lane_ == 0) BarrierArrive(empty_ + 8 * previous);
  }

  // Gives back stages that hold nothing for this warp.
  __device__ void Skip(int stages) {
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      BarrierWait(batch_full_ + 8 * stage_, parity_);
      BarrierWait(weights_full_ + 8 * stage_, parity_);
      if (lane_ == 0) BarrierArrive(empty_ + 8 * stage_);
      Advance();
    }
  }

  // Columns of the segment's rows; the reducers read no others.
  __device__ void StoreShrunk(const float (&d)[kN / 2], int segment, int part, int warp_row,
                              int piece) {
    const int begin = tables_.begin[segment];
    const int end = tables_.end[segment];
    const int rank = tables_.rank[part][segment];
    const int row = warp_row + lane_ / 4;
    float* out = args_.h_partial + static_cast<int64_t>(piece * args_.p.shape.parts + part) *
                                       args_.p.rows * args_.ldh;
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
      if (8 * i + 8 <= begin || 8 * i >= end) continue;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int t = 8 * i + 2 * (lane_ % 4) + c;
        if (t < begin || t >= end) continue;
        float* line = out + static_cast<int64_t>(t) * args_.ldh;
        if (row < rank) __stcg(line + row, d[4 * i + c]);
        if (row + 8 < rank) __stcg(line + row + 8, d[4 * i + 2 + c]);
      }
    }
  }

  __device__ Epilogue StartEpilogue(int row) const {
    Epilogue epilogue = {row, 0, tables_.segments == 1, {1.0f, 1.0f}, {0.0f, 0.0f}};
    const int parts = args_.p.shape.parts;
#pragma unroll 1
    while (epilogue.part + 1 < parts && row >= args_.part_begin[epilogue.part + 1]) {
      ++epilogue.part;
    }
    const float* g = epilogue.one_g ? tables_.g[epilogue.part][0] : nullptr;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int n = row + lane_ / 4 + 8 * j;
      if (n >= args_.part_begin[parts]) continue;
      if (args_.p.bias != nullptr) epilogue.bias[j] = args_.p.bias[n];
      if (g != nullptr) epilogue.g[j] = g[n];
    }
    if (epilogue.one_g || row >= args_.part_begin[parts]) return epilogue;
#pragma unroll 1
    for (int segment = lane_; segment < tables_.segments; segment += 32) {
      if (const float* other = tables_.g[epilogue.part][segment]; other != nullptr) {
        PrefetchL2(other + row);
      }
    }
    return epilogue;
  }

  __device__ void Finish(float (&d)[kN / 2], const Epilogue& epilogue, int warp) {
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
      FinishRows(make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]), 8 * i, epilogue,
                 warp);
    }
  }

  // y = g · d + bias for rows t0.. t0 + 7 of the batch.
  __device__ void FinishRows(const float4& d, int t0, const Epilogue& epilogue, int warp) {
    if (t0 >= args_.p.rows) return;
    const int out = args_.part_begin[args_.p.shape.parts];
    const int row = epilogue.row + lane_ / 4;
    const float sums[2][2] = {{d.x, d.y}, {d.z, d.w}};
    float y[2][2];  // of rows row + 8 j, t0 + 2 (lane % 4) + c
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float g[2] = {epilogue.g[0], epilogue.g[1]};
      const int t = t0 + 2 * (lane_ % 4) + c;
      if (!epilogue.one_g && t < args_.p.rows) {
        const float* other = tables_.g[epilogue.part][tables_.segment_of[t]];
        if (other != nullptr && row < out) g[0] = __ldg(other + row);
        if (other != nullptr && row + 8 < out) g[1] = __ldg(other + row + 8);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) y[j][c] = fmaf(g[j], sums[j][c], epilogue.bias[j]);
    }
    if (args_.p.y_fp32 || out % 8 != 0 || epilogue.row + 16 > out) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int t = t0 + 2 * (lane_ % 4) + c;
        if (t >= args_.p.rows) continue;
        StoreOne(t, row, out, y[0][c]);
        StoreOne(t, row + 8, out, y[1][c]);
      }
      return;
    }
    // 8 rows of the batch times 16 of W, turned over so that each row's 32 bytes go out together.
    const uint32_t tile = y_ + warp * (8 * 48);
    __syncwarp();
    StoreTransposed(tile + lane_ % 8 * 48 + lane_ / 8 % 2 * 16,
                    __floats2bfloat162_rn(y[0][0], y[0][1]),
                    __floats2bfloat162_rn(y[1][0], y[1][1]));
    __syncwarp();
    const int t = t0 + lane_ / 2 % 8;
    if (lane_ < 16 && t < args_.p.rows) {
      const float4 line = LoadShared(tile + lane_ / 2 * 48 + lane_ % 2 * 16);
      auto* to = static_cast<__nv_bfloat16*>(args_.p.y) + static_cast<int64_t>(t) * out +
                 epilogue.row + lane_ % 2 * 8;
      *reinterpret_cast<float4*>(to) = line;
    }
  }

  __device__ void StoreOne(int t, int row, int out, float value) {
    if (row >= out) return;
    const int64_t index = static_cast<int64_t>(t) * out + row;
    if (args_.p.y_fp32) {
      static_cast<float*>(args_.p.y)[index] = value;
    } else {
      static_cast<__nv_bfloat16*>(args_.p.y)[index] = __float2bfloat16_rn(value);
    }
  }

  // After the last tile of a block: sums go through its ring, so that a short loop can finish them.
  // (Code comes from memory too: the unrolled form of it, met once a launch, took 13 µs.)
  // The splits of K of a panel are the blocks of a cluster. Every one of them finishes a share of
  // the panel: a range of the batch, or of 16 rows of W where the batch is small. Sums go to its
  // shared memory and are added in the order of K.
  __device__ void FinishThroughRing(float (&d)[kN / 2], const Epilogue& epilogue, int split,
                                    int warp) {
    constexpr int kBlocks = kN / 8;
    const int splits = args_.plan.splits;
    const bool by_batch = kBlocks >= splits;
    const int share =
        by_batch ? kBlocks >> args_.plan.log_splits : kBlocks;  // blocks of 8 rows of the batch
    const int row_owner = epilogue.row / 16 & (splits - 1);
    const int slot = by_batch ? warp : warp >> args_.plan.log_splits;
    const int slots = by_batch ? Config::kConsumerWarps
                               : (Config::kConsumerWarps + splits - 1) >> args_.plan.log_splits;
    const uint32_t buffer = ring_ + slot * share * 512 + lane_ * 16;
    const int stride = slots * share * 512;
    // Once the products of all are done, the rings are free.
    if (splits == 1) {
      NamedBarrier(1, 32 * Config::kConsumerWarps);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        StoreShared(buffer + i * 512,
                    make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
      }
    } else {
      ClusterBarrier();
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const int owner = by_batch ? i / share : row_owner;
        const uint32_t local = buffer + split * stride + (by_batch ? i % share : i) * 512;
        StoreRemote(RemoteAddress(local, owner),
                    make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
      }
      ClusterBarrier();
      if (!by_batch && row_owner != split) return;
    }
#pragma unroll 1
    for (int i = 0; i < share; ++i) {
      float4 sum = LoadShared(buffer + i * 512);
#pragma unroll 1
      for (int j = 1; j < splits; ++j) Add(sum, LoadShared(buffer + j * stride + i * 512));
      FinishRows(sum, 8 * ((by_batch ? split * share : 0) + i), epilogue, warp);
    }
  }

  // The same by way of device memory; true in the block that finishes these 16 rows of W.
  __device__ bool MeetInWorkspace(float (&d)[kN / 2], int panel, int split, int warp) {
    const int splits = args_.plan.splits;
    const int rows16 = panel * Config::kConsumerWarps + warp;
    const int64_t stride =
        static_cast<int64_t>(args_.plan.panels) * Config::kConsumerWarps * (kN / 8) * 32;
    float4* partial = args_.y_partial + static_cast<int64_t>(rows16) * (kN / 8) * 32 + lane_;
    uint32_t* counter = &args_.counters->split[rows16];
    const int owner = rows16 % splits;
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
      __stcg(partial + split * stride + i * 32,
             make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
    }
    __threadfence();
    __syncwarp();
    if (split != owner) {
      if (lane_ == 0) SignalRelease(counter);
      return false;
    }
    if (lane_ == 0) {
      SpinUntil(counter, splits - 1);
      *counter = 0;
    }
    __syncwarp();
    Clear(d);
#pragma unroll 1
    for (int j = 0; j < splits; ++j) {
#pragma unroll
      for (int i = 0; i < kN / 8; ++i) {
        const float4 value = __ldcg(partial + j * stride + i * 32);
        d[4 * i] += value.x;
        d[4 * i + 1] += value.y;
        d[4 * i + 2] += value.z;
        d[4 * i + 3] += value.w;
      }
    }
    return true;
  }

  const LinearArgs& args_;
  const LinearTables& tables_;
  const uint32_t ring_;
  const uint32_t weights_full_;
  const uint32_t batch_full_;
  const uint32_t empty_;
  const uint32_t y_;
  const int lane_;
  // The next stage, and the parity of its phase.
  int stage_ = 0;
  uint32_t parity_ = 0;
  int in_flight_ = 0;  // counted up to kFlight
};

template <int kGroups, int kN>
__global__ void __launch_bounds__(LinearConfig<kGroups, kN>::kThreads, 1)
    LinearKernel(const __grid_constant__ CUtensorMap w_map,
                 const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ LinearArgs args) {
  using Config = LinearConfig<kGroups, kN>;
  using Block = LinearBlock<kGroups, kN>;
  extern __shared__ uint8_t dynamic[];
  __shared__ typename Block::Shared shared;
  static_assert(sizeof(shared) <= Config::kStaticBytes);
  if (threadIdx.x == 0) {
    PrefetchTensorMap(&w_map);
    PrefetchTensorMap(&x_map);
    Block::InitBarriers(shared);
    shared.tables.pieces = 0;
  }
  __syncthreads();
  FillTables<Config::kPanelRows>(args, shared.tables);
  __syncthreads();
  LaunchDependents();
  Block block(args, shared, (SharedAddress(dynamic) + 1023) / 1024 * 1024);
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
  if (warp < Config::kConsumerWarps) {
    block.Consume();
  } else if (warp == Config::kConsumerWarps) {
    if (threadIdx.x % 32 == 0) block.ProduceWeights(&w_map);
  } else if (warp == Config::kConsumerWarps + 1) {
    block.ProduceActivations(&x_map);
  } else {
    block.Reduce(warp - Config::kConsumerWarps - 2);
  }
}

}  // namespace dorad::kernels
