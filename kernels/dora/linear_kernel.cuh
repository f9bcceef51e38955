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
// Warps: consumers | weight producer | activation producer. Weights depend on no kernel before this
// one, so their producer runs ahead as far as the ring reaches.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <climits>
#include <cstdint>

#include "kernels/common/barrier.cuh"
#include "kernels/common/wgmma.cuh"
#include "kernels/dora/linear_args.h"

namespace dorad::kernels {

template <int kGroups, int kN>
struct LinearConfig {
  static constexpr int kPanelRows = 64 * kGroups;
  static constexpr int kConsumerWarps = 4 * kGroups;
  static constexpr int kThreads = 128 * kGroups + 64;
  static constexpr int kWeightBytes = kPanelRows * 2 * kLinearStageK;
  static constexpr int kStageBytes = kWeightBytes + kN * 2 * kLinearStageK;
  static constexpr int kTableBytes = 8192;  // static shared memory, rounded up
  static constexpr int kRingBytes = 227 * 1024 - 1024 - kTableBytes;
  static constexpr int kStages = kRingBytes / kStageBytes;
  static constexpr int kDynamicBytes = kStages * kStageBytes + 1024;  // for alignment
};

// What all roles of a block know about the batch.
struct LinearTables {
  static constexpr int kCached = 32;
  DoraFactors factors[kDoraLinearMaxParts][kCached];  // of the first segments
  int32_t segments;
  int32_t pieces;  // of the shrink, in all blocks
  int32_t slot[kDoraLinearMaxRows];
  int16_t begin[kDoraLinearMaxRows];
  int16_t end[kDoraLinearMaxRows];
  int16_t rank[kDoraLinearMaxParts][kDoraLinearMaxRows];  // rounded up to 8
  uint8_t segment_of[kDoraLinearMaxRows];                 // of a row of the batch
};

__device__ inline const DoraFactors& FactorsOf(const LinearArgs& args, const LinearTables& tables,
                                               int segment, int part) {
  if (segment < LinearTables::kCached) return tables.factors[part][segment];
  return args.p.table.factors[static_cast<int64_t>(tables.slot[segment]) * args.p.table.modules +
                              args.p.first_module + part];
}

// Of A, then B.
__device__ inline const CUtensorMap* MapsOf(const LinearArgs& args, int slot, int part) {
  return args.p.maps +
         2 * (static_cast<int64_t>(slot) * args.p.table.modules + args.p.first_module + part);
}

// Whole block. `tables.pieces` is 0 and visible on entry.
__device__ inline void FillTables(const LinearArgs& args, LinearTables& tables) {
  const int count = min(*args.p.num_segments, args.p.rows);
  if (threadIdx.x == 0) tables.segments = count;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const RowSegment segment = args.p.segments[i];
    const int begin = max(segment.begin, 0);
    const int end = min(segment.end, args.p.rows);
    tables.slot[i] = segment.slot;
    tables.begin[i] = static_cast<int16_t>(begin);
    tables.end[i] = static_cast<int16_t>(end);
    int pieces = 0;
    for (int part = 0; part < args.p.shape.parts; ++part) {
      int rank = 0;
      if (segment.slot >= 0 && end > begin) {
        const DoraFactors factors =
            args.p.table.factors[static_cast<int64_t>(segment.slot) * args.p.table.modules +
                                 args.p.first_module + part];
        if (i < LinearTables::kCached) {
          tables.factors[part][i] = factors;
          PrefetchTensorMap(MapsOf(args, segment.slot, part));
          PrefetchTensorMap(MapsOf(args, segment.slot, part) + 1);
        }
        rank = factors.rank;
      }
      tables.rank[part][i] = static_cast<int16_t>((rank + 7) / 8 * 8);
      pieces += (rank + args.plan.PanelRows() - 1) / args.plan.PanelRows() * args.plan.a_splits;
    }
    for (int row = begin; row < end; ++row) tables.segment_of[row] = static_cast<uint8_t>(i);
    if (pieces != 0) atomicAdd(&tables.pieces, pieces);
  }
}

// The walks below are the same in every role: f(segment, part, panel of A, piece of K).
template <typename F>
__device__ inline void ForEachPiece(const LinearArgs& args, const LinearTables& tables, F f) {
  if (tables.pieces == 0) return;
  // From the last block down: the last ones may have no tile of W.
  int next = gridDim.x - 1 - blockIdx.x;
  int base = 0;
  for (int part = 0; part < args.p.shape.parts; ++part) {
    for (int segment = 0; segment < tables.segments; ++segment) {
      const int rank = tables.rank[part][segment];
      base += (rank + args.plan.PanelRows() - 1) / args.plan.PanelRows() * args.plan.a_splits;
      for (; next < base; next += gridDim.x) {
        const int last = base - 1 - next;
        f(segment, part, last / args.plan.a_splits, last % args.plan.a_splits);
      }
    }
  }
}

// f(segment, part, chunk): columns of B from chunk * kLinearStageK on.
template <typename F>
__device__ inline void ForEachRankStage(const LinearArgs& args, const LinearTables& tables,
                                        int panel, int split, F f) {
  if (tables.pieces == 0) return;
  const int row = panel * args.plan.PanelRows();
  for (int segment = 0; segment < tables.segments; ++segment) {
    for (int part = 0; part < args.p.shape.parts; ++part) {
      if (row >= args.part_begin[part + 1]) continue;
      if (row + args.plan.PanelRows() <= args.part_begin[part]) break;
      const int chunks = (tables.rank[part][segment] + kLinearStageK - 1) / kLinearStageK;
      const int end = chunks * (split + 1) / args.plan.splits;
      for (int chunk = chunks * split / args.plan.splits; chunk < end; ++chunk) {
        f(segment, part, chunk);
      }
    }
  }
}

template <typename F>
__device__ inline void ForEachTile(const LinearPlan& plan, F f) {
  for (int tile = blockIdx.x; tile < plan.Tiles(); tile += gridDim.x) {
    f(tile / plan.splits, tile % plan.splits);
  }
}

__device__ inline int FirstChunk(const LinearPlan& plan, int split) {
  return plan.chunks * split / plan.splits;
}

// Position in the ring; every role has its own.
template <int kStages>
struct RingCursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Where 16-byte unit `unit` of row `row` of a swizzled tile lies.
__device__ inline uint32_t SwizzledOffset(int row, int unit) {
  return row * 128 + ((unit ^ (row & 7)) << 4);
}

template <int kGroups, int kN>
class LinearBlock {
 public:
  using Config = LinearConfig<kGroups, kN>;
  using Cursor = RingCursor<Config::kStages>;
  static constexpr int kFullArrivals = 2;

  __device__ LinearBlock(const LinearArgs& args, const LinearTables& tables, uint32_t ring,
                         uint32_t full, uint32_t empty)
      : args_(args),
        tables_(tables),
        ring_(ring),
        full_(full),
        empty_(empty),
        lane_(threadIdx.x % 32) {}

  // One thread.
  __device__ void ProduceWeights(const CUtensorMap* w_map) {
    ForEachPiece(args_, tables_, [&](int segment, int part, int panel, int piece) {
      const CUtensorMap* map = MapsOf(args_, tables_.slot[segment], part);
      const int row = panel * Config::kPanelRows;
      const int rows = min(tables_.rank[part][segment] - row, Config::kPanelRows);
      const int first = piece * args_.plan.a_chunks;
      const int end = min(first + args_.plan.a_chunks, args_.plan.chunks);
      // Rows beyond the last box keep old contents: nobody reads their sums.
      for (int chunk = first; chunk < end; ++chunk) {
        ProduceBoxes(map, chunk, row, (rows + kLinearBoxRows - 1) / kLinearBoxRows);
      }
    });
    ForEachTile(args_.plan, [&](int panel, int split) {
      const int row = panel * Config::kPanelRows;
      const int end = FirstChunk(args_.plan, split + 1);
      for (int chunk = FirstChunk(args_.plan, split); chunk < end; ++chunk) {
        const uint32_t tile = WaitEmpty();
        const uint32_t full = full_ + 8 * cursor_.stage;
        BarrierArriveExpect(full, Config::kWeightBytes);
        CopyTensorBox(tile, w_map, chunk * kLinearStageK, row, full);
        cursor_.Advance();
      }
      ForEachRankStage(args_, tables_, panel, split, [&](int segment, int part, int chunk) {
        // Rows of other parts are out of bounds: zero.
        ProduceBoxes(MapsOf(args_, tables_.slot[segment], part) + 1, chunk,
                     row - args_.part_begin[part], kGroups);
      });
    });
  }

  // One warp.
  __device__ void ProduceActivations(const CUtensorMap* x_map) {
    WaitForPrevious();
    const auto produce_x = [&](int chunk) {
      const uint32_t tile = WaitEmpty() + Config::kWeightBytes;
      if (lane_ == 0) {
        BarrierArriveExpect(full_ + 8 * cursor_.stage, kN * 2 * kLinearStageK);
        CopyTensorBox(tile, x_map, chunk * kLinearStageK, 0, full_ + 8 * cursor_.stage);
      }
      cursor_.Advance();
    };
    ForEachPiece(args_, tables_, [&](int, int, int, int piece) {
      const int end = min((piece + 1) * args_.plan.a_chunks, args_.plan.chunks);
      for (int chunk = piece * args_.plan.a_chunks; chunk < end; ++chunk) produce_x(chunk);
    });
    bool h_ready = false;
    ForEachTile(args_.plan, [&](int panel, int split) {
      const int end = FirstChunk(args_.plan, split + 1);
      for (int chunk = FirstChunk(args_.plan, split); chunk < end; ++chunk) produce_x(chunk);
      ForEachRankStage(args_, tables_, panel, split, [&](int segment, int part, int chunk) {
        const uint32_t tile = WaitEmpty() + Config::kWeightBytes;
        if (!h_ready) {
          WaitForH();
          h_ready = true;
        }
        CopyH(tile, segment, part, chunk * kLinearStageK);
        ArriveCopies();
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

  // Consumers: whole warpgroups.
  __device__ void Consume() {
    WaitForPrevious();
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    const int group = warp / 4;
    const int warp_row = warp * 16;
    bool h_due = tables_.pieces != 0;
    ForEachPiece(args_, tables_, [&](int segment, int part, int panel, int piece) {
      float d[kN / 2];
      const int first = piece * args_.plan.a_chunks;
      Clear(d);
      Accumulate(d, 0, min(args_.plan.a_chunks, args_.plan.chunks - first), INT_MAX, group);
      StoreShrunk(d, segment, part, panel * Config::kPanelRows + warp_row, piece);
    });
    if (h_due) SignalAll(&args_.counters->shrunk);
    ForEachTile(args_.plan, [&](int panel, int split) {
      float d[kN / 2];
      const int row = panel * Config::kPanelRows + warp_row;
      const Epilogue epilogue = StartEpilogue(row);
      const int base = FirstChunk(args_.plan, split + 1) - FirstChunk(args_.plan, split);
      int stages = base;
      ForEachRankStage(args_, tables_, panel, split, [&](int, int, int) { ++stages; });
      // h is made in the middle of the first tile: late enough that all pieces of the shrink are
      // there, early enough that h is before W ends.
      const int middle = h_due ? max(base / 2, base - 6) : 0;
      Clear(d);
      if (h_due) {
        Accumulate(d, 0, middle, base, group);
        ReduceShrunk(warp);
        h_due = false;
      }
      Accumulate(d, middle, stages, base, group);
      if (args_.plan.splits == 1 || MeetSplits(d, panel, split, warp)) Finish(d, epilogue, row);
    });
    if (h_due) ReduceShrunk(warp);
  }

 private:
  // Loaded before the sums are there.
  struct Epilogue {
    float bias[2];
    float g[2];  // of the first segment
  };

  // Boxes of kLinearBoxRows rows each into the next stage.
  __device__ void ProduceBoxes(const CUtensorMap* map, int chunk, int row, int boxes) {
    const uint32_t tile = WaitEmpty();
    const uint32_t full = full_ + 8 * cursor_.stage;
    BarrierArriveExpect(full, boxes * kLinearBoxRows * 2 * kLinearStageK);
    for (int box = 0; box < boxes; ++box) {
      CopyTensorBox(tile + box * kLinearBoxRows * 2 * kLinearStageK, map, chunk * kLinearStageK,
                    row + box * kLinearBoxRows, full);
    }
    cursor_.Advance();
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

  // One arrival for all consumers of the block, after all that they wrote.
  __device__ void SignalAll(uint32_t* counter) {
    __threadfence();
    NamedBarrier(1, 32 * Config::kConsumerWarps);
    if (threadIdx.x == 0) SignalRelease(counter);
  }

  __device__ uint32_t WaitEmpty() {
    BarrierWait(empty_ + 8 * cursor_.stage, cursor_.parity ^ 1);
    return ring_ + cursor_.stage * Config::kStageBytes;
  }

  __device__ void ArriveCopies() {
    BarrierHoldForCopies(full_ + 8 * cursor_.stage);
    __syncwarp();
    if (lane_ == 0) BarrierArrive(full_ + 8 * cursor_.stage);
    cursor_.Advance();
  }

  __device__ void WaitForH() {
    if (lane_ == 0) SpinUntil(&args_.counters->reduced, gridDim.x);
    __syncwarp();
  }

  __device__ static void Clear(float (&d)[kN / 2]) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) d[i] = 0.0f;
  }

  // Adds the next `end` - `begin` stages to d. Stages are counted within a tile: those from
  // `copied` on are written by threads.
  __device__ void Accumulate(float (&d)[kN / 2], int begin, int end, int copied, int group) {
    begin = __shfl_sync(0xFFFFFFFF, begin, 0);  // tells the compiler that the warp agrees
    end = __shfl_sync(0xFFFFFFFF, end, 0);
    int previous = 0;
    for (int i = begin; i < end; ++i) {
      BarrierWait(full_ + 8 * cursor_.stage, cursor_.parity);
      if (i >= copied) FenceProxyAsync();
      const uint32_t tile = ring_ + cursor_.stage * Config::kStageBytes;
      const uint64_t weights = WgmmaTile(tile + group * 8192);
      const uint64_t batch = WgmmaTile(tile + Config::kWeightBytes);
      WgmmaFence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        Wgmma<kN>(d, weights + 2 * step, batch + 2 * step, 1);
      }
      WgmmaCommit();
      // The stage before this one can go back: its products are complete.
      WgmmaWait<1>();
      if (i > begin && lane_ == 0) BarrierArrive(empty_ + 8 * previous);
      previous = cursor_.stage;
      cursor_.Advance();
    }
    WgmmaWait<0>();
    if (begin < end && lane_ == 0) BarrierArrive(empty_ + 8 * previous);
  }

  // This warp's share of h = s · (sum of the shrink's pieces, in order), as bf16.
  __device__ void ReduceShrunk(int warp) {
    if (lane_ == 0) SpinUntil(&args_.counters->shrunk, gridDim.x);
    __syncwarp();
    constexpr int kColumns = 32 * 4;
    constexpr int kDeep = kN == 64 || kN == 256 ? 4 : 8;  // loads in flight
    const int rows = args_.p.rows;
    const int lines = args_.p.shape.parts * rows;
    const int tasks = (args_.ldh + kColumns - 1) / kColumns * lines;
    for (int task = warp * gridDim.x + blockIdx.x; task < tasks;
         task += Config::kConsumerWarps * gridDim.x) {
      const int line = task % lines;
      const int part = line / rows;
      const int segment = tables_.segment_of[line % rows];
      const int column = task / lines * kColumns + lane_ * 4;
      if (column >= tables_.rank[part][segment]) continue;
      const int64_t offset = static_cast<int64_t>(line) * args_.ldh + column;
      const int64_t stride = static_cast<int64_t>(lines) * args_.ldh / 4;
      const float4* partial = reinterpret_cast<const float4*>(args_.h_partial + offset);
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      for (int first = 0; first < args_.plan.a_splits; first += kDeep) {
        float4 value[kDeep];
#pragma unroll
        for (int i = 0; i < kDeep; ++i) {
          value[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (first + i < args_.plan.a_splits) value[i] = __ldcg(partial + (first + i) * stride);
        }
#pragma unroll
        for (int i = 0; i < kDeep; ++i) {
          sum.x += value[i].x;
          sum.y += value[i].y;
          sum.z += value[i].z;
          sum.w += value[i].w;
        }
      }
      const float scale = FactorsOf(args_, tables_, segment, part).scale;
      auto* h = reinterpret_cast<__nv_bfloat162*>(args_.h + offset);
      h[0] = __floats2bfloat162_rn(scale * sum.x, scale * sum.y);
      h[1] = __floats2bfloat162_rn(scale * sum.z, scale * sum.w);
    }
    SignalAll(&args_.counters->reduced);
  }

  // Columns of the segment's rows; the reduction reads no others.
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

  // Sums of the splits of K meet at one of them, the same for the same rows whatever the panels:
  // true there.
  __device__ bool MeetSplits(float (&d)[kN / 2], int panel, int split, int warp) {
    const int splits = args_.plan.splits;
    const int rows16 = panel * Config::kConsumerWarps + warp;
    const int64_t stride =
        static_cast<int64_t>(args_.plan.panels) * Config::kConsumerWarps * (kN / 8) * 32;
    float4* partial = args_.y_partial + static_cast<int64_t>(rows16) * (kN / 8) * 32 + lane_;
    uint32_t* counter = &args_.counters->split[rows16];
    const int owner = rows16 % splits;
    if (args_.clusters) return MeetCluster(d, split, owner, warp);
    if (split != owner) {
#pragma unroll
      for (int i = 0; i < kN / 8; ++i) {
        __stcg(partial + split * stride + i * 32,
               make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
      }
      __threadfence();
      __syncwarp();
      if (lane_ == 0) SignalRelease(counter);
      return false;
    }
    if (lane_ == 0) {
      SpinUntil(counter, splits - 1);
      *counter = 0;
    }
    __syncwarp();
    // Own sum first, then the others in order; loads of one batch are in flight together.
    constexpr int kWide = kN / 8 < 4 ? kN / 8 : 4;
    constexpr int kDeep = 8 / kWide < 4 ? 8 / kWide : 4;
#pragma unroll
    for (int i0 = 0; i0 < kN / 8; i0 += kWide) {
      for (int j0 = 0; j0 < splits - 1; j0 += kDeep) {
        float4 value[kDeep][kWide];
#pragma unroll
        for (int j = 0; j < kDeep; ++j) {
          const int other = j0 + j + (j0 + j >= owner ? 1 : 0);
#pragma unroll
          for (int i = 0; i < kWide; ++i) {
            value[j][i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (j0 + j < splits - 1) value[j][i] = __ldcg(partial + other * stride + (i0 + i) * 32);
          }
        }
#pragma unroll
        for (int j = 0; j < kDeep; ++j) {
#pragma unroll
          for (int i = 0; i < kWide; ++i) {
            d[4 * (i0 + i)] += value[j][i].x;
            d[4 * (i0 + i) + 1] += value[j][i].y;
            d[4 * (i0 + i) + 2] += value[j][i].z;
            d[4 * (i0 + i) + 3] += value[j][i].w;
          }
        }
      }
    }
    return true;
  }

  // The same by way of the shared memory of the owner: the splits of a panel are one cluster.
  __device__ bool MeetCluster(float (&d)[kN / 2], int split, int owner, int warp) {
    const int splits = args_.plan.splits;
    const uint32_t buffer = ring_ + (warp / splits) * (splits - 1) * (kN / 8) * 512 + lane_ * 16;
    ClusterBarrier();  // the products of all are done: their rings are free
    if (split != owner) {
      const uint32_t remote =
          RemoteAddress(buffer + (split < owner ? split : split - 1) * (kN / 8) * 512, owner);
#pragma unroll
      for (int i = 0; i < kN / 8; ++i) {
        StoreRemote(remote + i * 512,
                    make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
      }
    }
    ClusterBarrier();
    if (split != owner) return false;
    for (int j = 0; j < splits - 1; ++j) {
#pragma unroll
      for (int i = 0; i < kN / 8; ++i) {
        const float4 value = LoadShared(buffer + (j * (kN / 8) + i) * 512);
        d[4 * i] += value.x;
        d[4 * i + 1] += value.y;
        d[4 * i + 2] += value.z;
        d[4 * i + 3] += value.w;
      }
    }
    return true;
  }

  // Parts end at multiples of 16 rows, so the 16 rows of a warp are of one part.
  __device__ int PartOf(int row) const {
    int part = 0;
    while (part + 1 < args_.p.shape.parts && row >= args_.part_begin[part + 1]) ++part;
    return part;
  }

  __device__ const float* MagnitudesOf(int segment, int part) const {
    if (tables_.rank[part][segment] == 0) return nullptr;
    const float* g = FactorsOf(args_, tables_, segment, part).g;
    return g == nullptr ? nullptr : g - args_.part_begin[part];
  }

  __device__ Epilogue StartEpilogue(int row) const {
    Epilogue epilogue = {{0.0f, 0.0f}, {1.0f, 1.0f}};
    const int out = args_.part_begin[args_.p.shape.parts];
    const int part = PartOf(row);
    const float* g = tables_.segments > 0 ? MagnitudesOf(0, part) : nullptr;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int n = row + lane_ / 4 + 8 * j;
      if (n >= out) continue;
      if (args_.p.bias != nullptr) epilogue.bias[j] = args_.p.bias[n];
      if (g != nullptr) epilogue.g[j] = g[n];
    }
    for (int segment = 1 + lane_; segment < tables_.segments; segment += 32) {
      if (const float* other = MagnitudesOf(segment, part); other != nullptr && row < out) {
        PrefetchL2(other + row);
      }
    }
    return epilogue;
  }

  // y = g · d + bias.
  __device__ void Finish(float (&d)[kN / 2], const Epilogue& epilogue, int warp_row) {
    const int out = args_.part_begin[args_.p.shape.parts];
    const int row = warp_row + lane_ / 4;
    const int part = PartOf(warp_row);
    for (int segment = 0; segment < tables_.segments; ++segment) {
      const float* g = MagnitudesOf(segment, part);
      if (g == nullptr) continue;
      float g0 = epilogue.g[0];
      float g1 = epilogue.g[1];
      if (segment > 0) {
        g0 = row < out ? __ldg(g + row) : 0.0f;
        g1 = row + 8 < out ? __ldg(g + row + 8) : 0.0f;
      }
      const int begin = tables_.begin[segment];
      const int end = tables_.end[segment];
#pragma unroll
      for (int i = 0; i < kN / 8; ++i) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int t = 8 * i + 2 * (lane_ % 4) + c;
          if (t >= begin && t < end) {
            d[4 * i + c] *= g0;
            d[4 * i + 2 + c] *= g1;
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int t = 8 * i + 2 * (lane_ % 4) + c;
        if (t >= args_.p.rows) continue;
        Store(t, row, out, d[4 * i + c] + epilogue.bias[0]);
        Store(t, row + 8, out, d[4 * i + 2 + c] + epilogue.bias[1]);
      }
    }
  }

  __device__ void Store(int t, int row, int out, float value) {
    if (row >= out) return;
    const int64_t index = static_cast<int64_t>(t) * out + row;
    if (args_.p.y_fp32) {
      static_cast<float*>(args_.p.y)[index] = value;
    } else {
      static_cast<__nv_bfloat16*>(args_.p.y)[index] = __float2bfloat16_rn(value);
    }
  }

  const LinearArgs& args_;
  const LinearTables& tables_;
  const uint32_t ring_;
  const uint32_t full_;
  const uint32_t empty_;
  const int lane_;
  Cursor cursor_;
};

template <int kGroups, int kN>
__global__ void __launch_bounds__(LinearConfig<kGroups, kN>::kThreads, 1)
    LinearKernel(const __grid_constant__ CUtensorMap w_map,
                 const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ LinearArgs args) {
  using Config = LinearConfig<kGroups, kN>;
  using Block = LinearBlock<kGroups, kN>;
  extern __shared__ uint8_t dynamic[];
  __shared__ LinearTables tables;
  __shared__ uint64_t barriers[2 * Config::kStages];
  static_assert(sizeof(tables) + sizeof(barriers) <= Config::kTableBytes);
  const uint32_t ring = (SharedAddress(dynamic) + 1023) / 1024 * 1024;
  const uint32_t full = SharedAddress(barriers);
  const uint32_t empty = full + 8 * Config::kStages;
  if (threadIdx.x == 0) {
    PrefetchTensorMap(&w_map);
    PrefetchTensorMap(&x_map);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      BarrierInit(full + 8 * stage, Block::kFullArrivals);
      BarrierInit(empty + 8 * stage, Config::kConsumerWarps);
    }
    BarrierInitFence();
    tables.pieces = 0;
  }
  __syncthreads();
  FillTables(args, tables);
  __syncthreads();
  LaunchDependents();
  Block block(args, tables, ring, full, empty);
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
  if (warp < Config::kConsumerWarps) {
    block.Consume();
  } else if (warp == Config::kConsumerWarps) {
    if (threadIdx.x % 32 == 0) block.ProduceWeights(&w_map);
  } else {
    block.ProduceActivations(&x_map);
  }
}

}  // namespace dorad::kernels
