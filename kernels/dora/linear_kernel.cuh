// The kernel behind DoraLinear: see linear.h for what it computes and linear_plan.h for the cut.
//
// A block streams (weight tile, activation tile) pairs of 64 elements of K through a ring of shared
// memory into wgmma, the weight tile as the M operand (64 rows a warpgroup), the batch as N. What
// the pairs are is known to the producers alone:
//   pieces of the shrink:  (A of a slot, x), summed over pieces of K by the reducer into h
//   its tile of W:         (W, x) over K = in, then (B of a slot, h masked to the slot's rows) over
//                          K = rank, into the same accumulators
// Rows outside of a segment see products with zero, which change no bit of an fp32 sum.
//
// Warps: consumers | 2 weight producers | activation producer | reducer. Weights depend on no
// kernel before this one, so their producers run ahead as far as the ring reaches.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/common/barrier.cuh"
#include "kernels/common/wgmma.cuh"
#include "kernels/dora/linear_args.h"

namespace dorad::kernels {

template <int kGroups, int kN>
struct LinearConfig {
  static constexpr int kPanelRows = 64 * kGroups;
  static constexpr int kConsumerWarps = 4 * kGroups;
  static constexpr int kThreads = 128 * kGroups + 128;
  static constexpr int kWeightBytes = kPanelRows * 2 * kLinearStageK;
  static constexpr int kStageBytes = kWeightBytes + kN * 2 * kLinearStageK;
  // Two to a multiprocessor: the next launch's blocks load weights while this one's finish.
  static constexpr int kBlocksPerProcessor = kN <= 64 ? 2 : 1;
  static constexpr int kTableBytes = 5120;  // static shared memory, rounded up
  static constexpr int kRingBytes = 233472 / kBlocksPerProcessor - 1024 - 1024 - kTableBytes;
  static constexpr int kStages = kRingBytes / kStageBytes;
  static constexpr int kDynamicBytes = kStages * kStageBytes + 1024;  // for alignment
  static constexpr int kRegisters = 65536 / kThreads / kBlocksPerProcessor / 8 * 8;
  // Registers move from the last four warps to the consumers where the accumulators need them.
  static constexpr bool kMoveRegisters = kN == 32 || kN == 64 || kN == 256;
  static constexpr int kAuxRegisters = kN <= 64 ? 40 : 56;
  static constexpr int kConsumerRegisters =
      (kRegisters * (kGroups + 1) - kAuxRegisters) / kGroups / 8 * 8;
};

// What all roles of a block know about the batch.
struct LinearTables {
  int32_t segments;
  int32_t pieces;  // of the shrink, in all blocks
  int32_t slot[kDoraLinearMaxRows];
  int16_t begin[kDoraLinearMaxRows];
  int16_t end[kDoraLinearMaxRows];
  int16_t rank[kDoraLinearMaxParts][kDoraLinearMaxRows];  // rounded up to 8
  uint8_t segment_of[kDoraLinearMaxRows];                 // of a row of the batch
};

__device__ inline const DoraFactors& FactorsOf(const LinearArgs& args, int slot, int part) {
  return args.p.table
      .factors[static_cast<int64_t>(slot) * args.p.table.modules + args.p.first_module + part];
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
      if (segment.slot >= 0 && end > begin) rank = FactorsOf(args, segment.slot, part).rank;
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

// f(segment, part, first column of B, columns): columns is a multiple of 16, up to 64.
template <typename F>
__device__ inline void ForEachRankStage(const LinearArgs& args, const LinearTables& tables,
                                        int panel, int split, F f) {
  if (tables.pieces == 0) return;
  const int row = panel * args.plan.PanelRows();
  for (int segment = 0; segment < tables.segments; ++segment) {
    for (int part = 0; part < args.p.shape.parts; ++part) {
      if (row >= args.part_begin[part + 1]) continue;
      if (row + args.plan.PanelRows() <= args.part_begin[part]) break;
      const int steps = (tables.rank[part][segment] + 15) / 16;
      const int end = steps * (split + 1) / args.plan.splits * 16;
      for (int k = steps * split / args.plan.splits * 16; k < end; k += kLinearStageK) {
        f(segment, part, k, min(end - k, kLinearStageK));
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
  static constexpr int kProducerWarps = 2;
  static constexpr int kFullArrivals = kProducerWarps + 1;

  __device__ LinearBlock(const LinearArgs& args, const LinearTables& tables, uint32_t ring,
                         uint32_t full, uint32_t empty)
      : args_(args),
        tables_(tables),
        ring_(ring),
        full_(full),
        empty_(empty),
        lane_(threadIdx.x % 32) {}

  // Weight producers: `half` 0 or 1. Both write their rows of what threads copy; the first one
  // tells the copy engine to fetch W.
  __device__ void ProduceWeights(const CUtensorMap* w_map, int half) {
    ForEachPiece(args_, tables_, [&](int segment, int part, int panel, int piece) {
      const DoraFactors& factors = FactorsOf(args_, tables_.slot[segment], part);
      const int first_row = panel * Config::kPanelRows;
      const int padded = min(tables_.rank[part][segment] - first_row, Config::kPanelRows);
      const int rows = factors.rank - first_row;
      const int in = args_.p.shape.in;
      const __nv_bfloat16* a = factors.a + static_cast<int64_t>(first_row) * in;
      const int end = min((piece + 1) * args_.plan.a_chunks, args_.plan.chunks);
      for (int chunk = piece * args_.plan.a_chunks; chunk < end; ++chunk) {
        const uint32_t tile = WaitEmpty();
        const int unit = lane_ % 8;
        const int k = chunk * kLinearStageK + unit * 8;
        // Rows beyond `padded` keep old contents: nobody reads their sums.
#pragma unroll 4
        for (int row = half * 4 + lane_ / 8; row < padded; row += 8) {
          const bool valid = row < rows && k < in;
          CopyAsync16(tile + SwizzledOffset(row, unit),
                      valid ? a + static_cast<int64_t>(row) * in + k : a, valid);
        }
        ArriveCopies();
      }
    });
    ForEachTile(args_.plan, [&](int panel, int split) {
      const int first_row = panel * Config::kPanelRows;
      const int end = FirstChunk(args_.plan, split + 1);
      for (int chunk = FirstChunk(args_.plan, split); chunk < end; ++chunk) {
        const uint32_t tile = WaitEmpty();
        if (lane_ == 0) {
          if (half == 0) {
            BarrierArriveExpect(full_ + 8 * cursor_.stage, Config::kWeightBytes);
            CopyTensorBox(tile, w_map, chunk * kLinearStageK, first_row, full_ + 8 * cursor_.stage);
          } else {
            BarrierArrive(full_ + 8 * cursor_.stage);
          }
        }
        cursor_.Advance();
      }
      ForEachRankStage(args_, tables_, panel, split, [&](int segment, int part, int k0, int width) {
        const DoraFactors& factors = FactorsOf(args_, tables_.slot[segment], part);
        const int begin = args_.part_begin[part] - first_row;
        const int end_row = args_.part_begin[part + 1] - first_row;
        const int unit = lane_ % 8;
        const int k = k0 + unit * 8;
        const int ldb = factors.ldb;
        const __nv_bfloat16* b = factors.b;
        const bool in_rank = unit * 8 < width && k < tables_.rank[part][segment];
        const uint32_t tile = WaitEmpty();
#pragma unroll 4
        for (int row = half * 4 + lane_ / 8; row < Config::kPanelRows; row += 8) {
          const bool valid = in_rank && row >= begin && row < end_row;
          CopyAsync16(tile + SwizzledOffset(row, unit),
                      valid ? b + static_cast<int64_t>(row - begin) * ldb + k : b, valid);
        }
        ArriveCopies();
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
      ForEachRankStage(args_, tables_, panel, split, [&](int segment, int part, int k0, int width) {
        const uint32_t tile = WaitEmpty() + Config::kWeightBytes;
        if (!h_ready) {
          WaitForH();
          h_ready = true;
        }
        const int begin = tables_.begin[segment];
        const int end_row = tables_.end[segment];
        const int unit = lane_ % 8;
        const int k = k0 + unit * 8;
        const bool in_rank = unit * 8 < width && k < tables_.rank[part][segment];
        const __nv_bfloat16* h = args_.h + static_cast<int64_t>(part) * args_.p.rows * args_.ldh;
#pragma unroll 4
        for (int row = lane_ / 8; row < kN; row += 4) {
          const bool valid = in_rank && row >= begin && row < end_row;
          CopyAsync16(tile + SwizzledOffset(row, unit),
                      valid ? h + static_cast<int64_t>(row) * args_.ldh + k : h, valid);
        }
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

  // One warp: h = s · (sum of the shrink's pieces, in order), as bf16.
  __device__ void Reduce() {
    if (tables_.pieces == 0) return;
    WaitForPrevious();
    if (lane_ == 0) SpinUntil(&args_.counters->shrunk, tables_.pieces * kGroups);
    __syncwarp();
    constexpr int kColumns = 32 * 4;
    const int rows = args_.p.rows;
    const int lines = args_.p.shape.parts * rows;
    const int tasks = (args_.ldh + kColumns - 1) / kColumns * lines;
    for (int task = blockIdx.x; task < tasks; task += gridDim.x) {
      const int line = task % lines;
      const int part = line / rows;
      const int segment = tables_.segment_of[line % rows];
      const int column = task / lines * kColumns + lane_ * 4;
      if (column >= tables_.rank[part][segment]) continue;
      const int64_t offset = static_cast<int64_t>(line) * args_.ldh + column;
      const int64_t stride = static_cast<int64_t>(lines) * args_.ldh / 4;
      const float4* partial = reinterpret_cast<const float4*>(args_.h_partial + offset);
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
      for (int piece = 0; piece < args_.plan.a_splits; ++piece) {
        const float4 value = __ldcg(partial + piece * stride);
        sum.x += value.x;
        sum.y += value.y;
        sum.z += value.z;
        sum.w += value.w;
      }
      const float scale = FactorsOf(args_, tables_.slot[segment], part).scale;
      auto* h = reinterpret_cast<__nv_bfloat162*>(args_.h + offset);
      h[0] = __floats2bfloat162_rn(scale * sum.x, scale * sum.y);
      h[1] = __floats2bfloat162_rn(scale * sum.z, scale * sum.w);
    }
    __threadfence();
    __syncwarp();
    if (lane_ == 0) SignalRelease(&args_.counters->reduced);
  }

  // Consumers: whole warpgroups.
  __device__ void Consume() {
    WaitForPrevious();
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    const int group = warp / 4;
    const int warp_row = warp * 16;
    ForEachPiece(args_, tables_, [&](int segment, int part, int panel, int piece) {
      float d[kN / 2];
      const int first = piece * args_.plan.a_chunks;
      Accumulate(d, min(args_.plan.a_chunks, args_.plan.chunks - first), 0, group);
      StoreShrunk(d, segment, part, panel * Config::kPanelRows + warp_row, piece);
      __threadfence();
      NamedBarrier(1 + group, 128);
      if (threadIdx.x % 128 == 0) SignalRelease(&args_.counters->shrunk);
    });
    ForEachTile(args_.plan, [&](int panel, int split) {
      float d[kN / 2];
      const int row = panel * Config::kPanelRows + warp_row;
      const Epilogue epilogue = StartEpilogue(row);
      const int base = FirstChunk(args_.plan, split + 1) - FirstChunk(args_.plan, split);
      int stages = base;
      ForEachRankStage(args_, tables_, panel, split, [&](int, int, int, int) { ++stages; });
      Accumulate(d, stages, base, group);
      if (args_.plan.splits == 1 || MeetSplits(d, panel, split, warp)) Finish(d, epilogue, row);
    });
  }

 private:
  // Loaded before the sums are there.
  struct Epilogue {
    float bias[2];
    const float* g;  // of the lane-th segment; nullptr: 1
  };

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

  // d = the sum over the next `stages` of the ring, those from `copied` on written by threads.
  __device__ void Accumulate(float (&d)[kN / 2], int stages, int copied, int group) {
    stages = __shfl_sync(0xFFFFFFFF, stages, 0);  // tells the compiler that the warp agrees
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) d[i] = 0.0f;
    int previous = 0;
    for (int i = 0; i < stages; ++i) {
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
      if (i > 0 && lane_ == 0) BarrierArrive(empty_ + 8 * previous);
      previous = cursor_.stage;
      cursor_.Advance();
    }
    WgmmaWait<0>();
    if (lane_ == 0) BarrierArrive(empty_ + 8 * previous);
  }

  // Columns of the segment's rows; the reducer reads no others.
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

  // Parts end at multiples of 16 rows, so the 16 rows of a warp are of one part.
  __device__ int PartOf(int row) const {
    int part = 0;
    while (part + 1 < args_.p.shape.parts && row >= args_.part_begin[part + 1]) ++part;
    return part;
  }

  __device__ const float* MagnitudesOf(int segment, int part) const {
    if (tables_.rank[part][segment] == 0) return nullptr;
    const float* g = FactorsOf(args_, tables_.slot[segment], part).g;
    return g == nullptr ? nullptr : g - args_.part_begin[part];
  }

  __device__ Epilogue StartEpilogue(int row) const {
    Epilogue epilogue = {{0.0f, 0.0f}, nullptr};
    const int out = args_.part_begin[args_.p.shape.parts];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int n = row + lane_ / 4 + 8 * j;
      if (args_.p.bias != nullptr && n < out) epilogue.bias[j] = args_.p.bias[n];
    }
    if (lane_ < tables_.segments) epilogue.g = MagnitudesOf(lane_, PartOf(row));
    return epilogue;
  }

  // y = g · d + bias.
  __device__ void Finish(float (&d)[kN / 2], const Epilogue& epilogue, int warp_row) {
    const int out = args_.part_begin[args_.p.shape.parts];
    const int row = warp_row + lane_ / 4;
    const int part = PartOf(warp_row);
    for (int segment = 0; segment < tables_.segments; ++segment) {
      const float* g = reinterpret_cast<const float*>(
          __shfl_sync(0xFFFFFFFF, reinterpret_cast<uintptr_t>(epilogue.g), segment % 32));
      if (segment >= 32) g = MagnitudesOf(segment, part);
      if (g == nullptr) continue;
      const float g0 = row < out ? __ldg(g + row) : 0.0f;
      const float g1 = row + 8 < out ? __ldg(g + row + 8) : 0.0f;
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
__global__ void __launch_bounds__(LinearConfig<kGroups, kN>::kThreads,
                                  LinearConfig<kGroups, kN>::kBlocksPerProcessor)
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
    if constexpr (Config::kMoveRegisters) IncreaseRegisters<Config::kConsumerRegisters>();
    block.Consume();
  } else {
    if constexpr (Config::kMoveRegisters) DecreaseRegisters<Config::kAuxRegisters>();
    if (warp < Config::kConsumerWarps + 2) {
      block.ProduceWeights(&w_map, warp - Config::kConsumerWarps);
    } else if (warp == Config::kConsumerWarps + 2) {
      block.ProduceActivations(&x_map);
    } else {
      block.Reduce();
    }
  }
}

}  // namespace dorad::kernels
