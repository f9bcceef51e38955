// y = g ⊙ (W x + B h) + bias, h made by the shrink before it: see linear.h for what is computed and
// linear_plan.h for the cut.
//
// A block takes a panel of W, and of K all or one of two splits. It streams (weight tile, batch
// tile) pairs of 64 elements of K through a ring of shared memory into wgmma, the batch as the M
// operand, the panel as N: (W, x) over K = in, then (B of a slot, h masked to the slot's rows) over
// K = rank, into the same accumulators. Rows outside of a segment see products with zero, which
// change no bit of an fp32 sum.
//
// A cluster is the splits of a panel, whose sums meet, and siblings: panels next to each other,
// which fetch x together, each a share of the rows for all.
//
// Warps: consumers | producer of weights | producers of the batch. Weights depend on no kernel
// before this one, so their producer runs ahead as far as the ring reaches; but what is in flight
// is bounded, or what the chain x -> h -> y waits for would queue behind it.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/common/barrier.cuh"
#include "kernels/common/wgmma.cuh"
#include "kernels/dora/linear_ring.cuh"
#include "kernels/dora/linear_tables.cuh"

namespace dorad::kernels {

// kM: tiles of 64 rows of the batch; kPanel: rows of W.
template <int kM, int kPanel>
struct ProjectConfig {
  static constexpr int kGroups = kM == 1 ? 1 : 2;  // warpgroups that compute
  static constexpr int kTiles = kM / kGroups;      // of each
  static constexpr int kConsumerWarps = 4 * kGroups;
  static constexpr int kBatchWarps = 3;
  static constexpr int kThreads = 32 * (kConsumerWarps + 1 + kBatchWarps);
  static constexpr int kMaxStages = 24;
  // Chunks of K that a stage holds: where they are small, what a stage costs would count.
  static constexpr int kStageChunks = kPanel <= 96 && kM < 4 ? 2 : 1;
  static constexpr int kChunkBytes = kPanel * 2 * kLinearStageK;
  static constexpr int kWeightBytes = kStageChunks * kChunkBytes;
  static constexpr int kAccumulators = kTiles * kPanel / 2;
  // More than an even share of the registers.
  static constexpr bool kMovesRegisters = kAccumulators > 128;
  // What the other split sends: half of the panel's sums.
  static constexpr int kExchangeBytes = kPanel <= 128 ? kM * 64 * kPanel / 2 * 4 : 0;
  // Where a warp turns over 16 rows of 16 sums: bytes from one row to the next, room against bank
  // conflicts included.
  static constexpr int kTurnBytes = 24 * 4;
  static constexpr int kStaged = 8;  // segments whose magnitudes are kept in shared memory
};

template <int kM, int kPanel>
class ProjectBlock {
 public:
  using Config = ProjectConfig<kM, kPanel>;

  struct Shared {
    LinearTables tables;
    LinearRingBarriers<Config::kMaxStages> ring;
    uint64_t met;  // the other split's sums have come
    alignas(16) float g[Config::kStaged][kPanel];
    alignas(16) float bias[kPanel];
    alignas(16) uint8_t turn[Config::kConsumerWarps][16 * Config::kTurnBytes];
  };

  __device__ ProjectBlock(const LinearArgs& args, Shared& shared, uint32_t dynamic)
      : args_(args),
        shared_(shared),
        tables_(shared.tables),
        x_bytes_(args.x_rows * 2 * kLinearStageK),
        ring_(shared.ring, dynamic, args.stages, Config::kWeightBytes,
              Config::kWeightBytes + Config::kStageChunks * x_bytes_),
        exchange_(dynamic + args.stages * (Config::kWeightBytes + Config::kStageChunks * x_bytes_)),
        split_(blockIdx.x & (args.plan.splits - 1)),
        sibling_((blockIdx.x >> args.plan.log_splits) % args.siblings),
        lane_(threadIdx.x % 32) {}

  __device__ static void InitBarriers(const LinearArgs& args, Shared& shared) {
    shared.ring.Init(args.stages, Config::kBatchWarps, args.siblings * Config::kConsumerWarps);
    BarrierInit(SharedAddress(&shared.met), 1);
    BarrierInitFence();
  }

  // One thread, as soon as barriers are made: the first weights.
  __device__ void StartWeights(const CUtensorMap* w_map) {
    const int first = FirstChunk(args_.plan, split_);
    const int row =
        ((blockIdx.x >> args_.plan.log_splits) / args_.siblings * args_.siblings + sibling_) *
        kPanel;
    ForEachStage(first, FirstChunk(args_.plan, split_ + 1), [&](int chunk, int count) {
      if (started_ == args_.flight) return;
      FetchWeights(w_map, chunk, count, row);
      ++started_;
    });
  }

  // The same thread: all others.
  __device__ void ProduceWeights(const CUtensorMap* w_map) {
    int in_flight = started_;
    const auto wait_for_room = [&] {
      if (in_flight == args_.flight) {
        ring_.WaitArrived(args_.flight);
      } else {
        ++in_flight;
      }
      ring_.WaitEmpty();
    };
    ForEachPanel([&](int group, int row) {
      ForEachStage(FirstChunk(args_.plan, split_) + started_ * Config::kStageChunks,
                   FirstChunk(args_.plan, split_ + 1), [&](int chunk, int count) {
                     wait_for_room();
                     FetchWeights(w_map, chunk, count, row);
                   });
      started_ = 0;
      ForEachRank(group, [&](int segment, int part, int first_chunk, int end_chunk) {
        const bool has_part = HasPart(row, part);
        const CUtensorMap* map = MapsOf(args_, tables_.slot[segment], part) + 1;
        if (has_part) AcquireTensorMap(map);
        ForEachStage(first_chunk, end_chunk, [&](int chunk, int count) {
          wait_for_room();
          if (has_part) {
            BarrierArriveExpect(ring_.weights_full(), count * Config::kChunkBytes);
            // Rows of other parts are out of bounds: zero.
#pragma unroll 1
            for (int box = 0; box < count * kPanel; box += kLinearBoxRows) {
              CopyTensorBoxOnce(ring_.weights() + box * 2 * kLinearStageK, map,
                                (chunk + box / kPanel) * kLinearStageK,
                                row + box % kPanel - args_.part_begin[part], ring_.weights_full());
            }
          } else {
            BarrierArrive(ring_.weights_full());
          }
          ring_.Advance();
        });
      });
    });
  }

  // Warp `producer` of kBatchWarps. x_map has boxes of x_rows / siblings rows.
  __device__ void ProduceBatch(const CUtensorMap* x_map, int producer) {
    if (args_.shrinkers == 0) {
      WaitForPrevious();
    } else {
      // The shrink need not be complete, what is before it must.
      if (lane_ == 0) {
        SpinUntil(&args_.signals->x_ready, args_.launch);
        FenceProxyAsyncGlobal();
      }
      __syncwarp();
    }
    const int box_rows = args_.x_rows / args_.siblings;
    uint16_t blocks = 0;
#pragma unroll 1
    for (int i = 0; i < args_.siblings; ++i) {
      blocks |= 1 << (i << args_.plan.log_splits | split_);
    }
    bool h_ready = false;
    // All warps arrive in every phase: who only looked on could miss some.
    ForEachPanel([&](int group, int row) {
      ForEachStage(FirstChunk(args_.plan, split_), FirstChunk(args_.plan, split_ + 1),
                   [&](int chunk, int count) {
                     ring_.WaitEmpty();
                     __syncwarp();
                     if (lane_ == 0 && producer > 0) BarrierArrive(ring_.batch_full());
                     if (lane_ == 0 && producer == 0) {
                       BarrierArriveExpect(ring_.batch_full(), count * x_bytes_);
#pragma unroll 1
                       for (int i = 0; i < count; ++i) {
                         const uint32_t to = ring_.batch() + i * x_bytes_;
                         const int column = (chunk + i) * kLinearStageK;
                         if (args_.siblings == 1) {
                           CopyTensorBox(to, x_map, column, 0, ring_.batch_full());
                         } else {
                           CopyTensorBoxToBlocks(to + sibling_ * box_rows * 2 * kLinearStageK,
                                                 x_map, column, sibling_ * box_rows,
                                                 ring_.batch_full(), blocks);
                         }
                       }
                     }
                     ring_.Advance();
                   });
      ForEachRank(group, [&](int segment, int part, int first_chunk, int end_chunk) {
        const bool has_part = HasPart(row, part);
        ForEachStage(first_chunk, end_chunk, [&](int chunk, int count) {
          if (!h_ready) WaitForH();
          h_ready = true;
          ring_.WaitEmpty();
          if (has_part) {
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
              CopyH(ring_.batch() + i * x_bytes_, segment, part, (chunk + i) * kLinearStageK,
                    producer);
            }
            BarrierHoldForCopies(ring_.batch_full());
          }
          __syncwarp();
          if (lane_ == 0) BarrierArrive(ring_.batch_full());
          ring_.Advance();
        });
      });
    });
    if (args_.shrinkers == 0 || lane_ != 0) return;
    // Who waits for this kernel waits for all before it.
    WaitForPrevious();
    // The last warp to come here leaves the signals as it found them.
    if (atomicAdd(&args_.signals->left, 1) == Config::kBatchWarps * gridDim.x - 1) {
      *args_.signals = LinearSignals();
    }
  }

  // Consumers: whole warpgroups.
  __device__ void Consume() {
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    const int first_tile = warp / 4 * Config::kTiles;
    const int tiles = (args_.p.rows + 63) / 64;
    bool first = true;
    ForEachPanel([&](int group, int row) {
      if (!first) NamedBarrier(1, 32 * Config::kConsumerWarps);  // the last panel's are read
      first = false;
      StageMagnitudes(row);
      float d[Config::kTiles][kPanel / 2];
#pragma unroll
      for (int tile = 0; tile < Config::kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < kPanel / 2; ++i) d[tile][i] = 0.0f;
      }
      Accumulate(d, FirstChunk(args_.plan, split_ + 1) - FirstChunk(args_.plan, split_), first_tile,
                 0, min(Config::kTiles, tiles - first_tile), false);
      ForEachRank(group, [&](int segment, int part, int first_chunk, int end_chunk) {
        const int begin = max(tables_.begin[segment] / 64 - first_tile, 0);
        const int end = min((tables_.end[segment] + 63) / 64 - first_tile, Config::kTiles);
        if (begin < end && HasPart(row, part)) {
          Accumulate(d, end_chunk - first_chunk, first_tile, begin, end, true);
        } else {
          Skip(end_chunk - first_chunk);
        }
      });
      NamedBarrier(1, 32 * Config::kConsumerWarps);  // magnitudes are there
      if (args_.plan.splits == 1) {
#pragma unroll
        for (int tile = 0; tile < Config::kTiles; ++tile) {
          Finish<kPanel>(d[tile], 64 * (first_tile + tile) + 16 * (warp % 4), row, 0, warp);
        }
      } else if constexpr (Config::kExchangeBytes != 0) {
        Meet(d, first_tile, warp, row);
      }
    });
  }

 private:
  // f(first chunk, number of chunks) for every stage of chunks [first, end).
  template <typename F>
  __device__ static void ForEachStage(int first, int end, F f) {
#pragma unroll 1
    for (int chunk = first; chunk < end; chunk += Config::kStageChunks) {
      f(chunk, min(Config::kStageChunks, end - chunk));
    }
  }

  __device__ void FetchWeights(const CUtensorMap* w_map, int chunk, int count, int row) {
    BarrierArriveExpect(ring_.weights_full(), count * Config::kChunkBytes);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      CopyTensorBoxOnce(ring_.weights() + i * Config::kChunkBytes, w_map,
                        (chunk + i) * kLinearStageK, row, ring_.weights_full());
    }
    ring_.Advance();
  }

  __device__ void WaitForH() const {
    if (lane_ == 0) SpinUntil(&args_.signals->h_ready, args_.shrinkers);
    __syncwarp();
  }

  // f(panel's cluster as its first row of W, the block's own first row). Blocks of a cluster go
  // through the same number of panels and the same stages.
  template <typename F>
  __device__ void ForEachPanel(F f) const {
    const int shift = args_.plan.log_splits;
    const int cluster = (blockIdx.x >> shift) / args_.siblings;
    const int clusters = (gridDim.x >> shift) / args_.siblings;
    const int group_rows = args_.siblings * kPanel;
#pragma unroll 1
    for (int group = cluster; group * args_.siblings < args_.plan.panels; group += clusters) {
      f(group * group_rows, group * group_rows + sibling_ * kPanel);
    }
  }

  // The stages of the rank that a cluster goes through.
  template <typename F>
  __device__ void ForEachRank(int group, F f) const {
    ForEachRankRange(args_, tables_, group, group + args_.siblings * kPanel, split_, f);
  }

  // Whether a panel has rows of the part.
  __device__ bool HasPart(int row, int part) const {
    return row < args_.part_begin[part + 1] && row + kPanel > args_.part_begin[part];
  }

  // Columns k0.. of h, zero in rows outside of the segment: of the tiles that have rows of it. Each
  // warp's share.
  __device__ void CopyH(uint32_t tile, int segment, int part, int k0, int producer) const {
    const int unit = lane_ % 8;
    const int k = k0 + unit * 8;
    const bool in_rank = k < tables_.rank[part][segment];
    const int begin = tables_.begin[segment];
    const int end = tables_.end[segment];
    const int first = begin / 64 * 64;
    const int last = min((end + 63) / 64 * 64, args_.x_rows);
    const __nv_bfloat16* h =
        args_.h + static_cast<int64_t>(part) * args_.p.rows * args_.ldh + (in_rank ? k : 0);
#pragma unroll 4
    for (int row = first + 4 * producer + lane_ / 8; row < last; row += 4 * Config::kBatchWarps) {
      const bool valid = in_rank && row >= begin && row < end;
      CopyAsync16(tile + row * 128 + ((unit ^ (row & 7)) << 4),
                  valid ? h + static_cast<int64_t>(row) * args_.ldh : h, valid);
    }
  }

  // Gives a stage back, to all who fetch into it. One warp.
  __device__ void Release(int stage) const {
    if (args_.siblings == 1) {
      if (lane_ == 0) BarrierArrive(ring_.empty(stage));
    } else if (lane_ < args_.siblings) {
      BarrierArriveRemote(
          RemoteAddress(ring_.empty(stage), lane_ << args_.plan.log_splits | split_));
    }
  }

  // Adds the products of the next `chunks` to tiles [begin, end) of the warpgroup's, which begin at
  // the batch's tile `first_tile`; `copied`: threads wrote their batch tiles.
  __device__ void Accumulate(float (&d)[Config::kTiles][kPanel / 2], int chunks, int first_tile,
                             int begin, int end, bool copied) {
    // Tensor-core code wants to know its registers: one loop for each case.
    if (Config::kTiles == 1 || (begin == 0 && end == Config::kTiles)) {
      AccumulateTiles<0, Config::kTiles>(d, chunks, first_tile, copied);
    } else if (begin == 0) {
      AccumulateTiles<0, 1>(d, chunks, first_tile, copied);
    } else {
      AccumulateTiles<Config::kTiles - 1, 1>(d, chunks, first_tile, copied);
    }
  }

  template <int kFirst, int kCount>
  __device__ void AccumulateTiles(float (&d)[Config::kTiles][kPanel / 2], int chunks,
                                  int first_tile, bool copied) {
    chunks = __shfl_sync(0xFFFFFFFF, chunks, 0);  // tells the compiler that the warp agrees
#pragma unroll 1
    for (; chunks >= Config::kStageChunks; chunks -= Config::kStageChunks) {
      AccumulateStage<kFirst, kCount, Config::kStageChunks>(d, first_tile, copied);
    }
    if (Config::kStageChunks > 1 && chunks > 0) {
      AccumulateStage<kFirst, kCount, 1>(d, first_tile, copied);
    }
  }

  template <int kFirst, int kCount, int kChunks>
  __device__ void AccumulateStage(float (&d)[Config::kTiles][kPanel / 2], int first_tile,
                                  bool copied) {
    ring_.WaitFull();
    if (copied) FenceProxyAsync();
    WgmmaFence();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const uint64_t weights = WgmmaTile(ring_.weights() + chunk * Config::kChunkBytes);
      const uint32_t batch = ring_.batch() + chunk * x_bytes_ + first_tile * 8192;
#pragma unroll
      for (int tile = kFirst; tile < kFirst + kCount; ++tile) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          Wgmma<kPanel>(d[tile], WgmmaTile(batch + tile * 8192) + 2 * step, weights + 2 * step, 1);
        }
      }
    }
    WgmmaCommit();
    WgmmaWait<0>();
    Release(ring_.stage());
    ring_.Advance();
  }

  // Gives back stages that hold nothing for this warp.
  __device__ void Skip(int chunks) {
#pragma unroll 1
    for (; chunks > 0; chunks -= Config::kStageChunks) {
      ring_.WaitFull();
      __syncwarp();  // no lane may miss a phase
      Release(ring_.stage());
      ring_.Advance();
    }
  }

  // The part of a row of W, and g of a segment there; nullptr: 1.
  __device__ const float* MagnitudesOf(int segment, int row) const {
    int part = 0;
#pragma unroll 1
    while (part + 1 < args_.p.shape.parts && row >= args_.part_begin[part + 1]) ++part;
    if (tables_.rank[part][segment] == 0) return nullptr;
    const float* g = args_.p.table.factors[ModuleIndex(args_, tables_.slot[segment], part)].g;
    return g == nullptr ? nullptr : g + (row - args_.part_begin[part]);
  }

  // All consumers: g of the first segments, and the bias, of a panel.
  __device__ void StageMagnitudes(int row) const {
    const int out = args_.part_begin[args_.p.shape.parts];
    const int lines = min(tables_.segments, Config::kStaged);
#pragma unroll 1
    for (int i = threadIdx.x; i < (lines + 1) * kPanel; i += 32 * Config::kConsumerWarps) {
      const int line = i / kPanel;
      const int column = i % kPanel;
      const int n = row + column;
      if (line == lines) {
        shared_.bias[column] = args_.p.bias != nullptr && n < out ? args_.p.bias[n] : 0.0f;
      } else {
        const float* g = n < out ? MagnitudesOf(line, n) : nullptr;
        shared_.g[line][column] = g != nullptr ? *g : 1.0f;
      }
    }
  }

  // Each split finishes half of the panel's columns: it sends the sums of the other half to the
  // other one. p0 + p1 does not depend on who adds.
  __device__ void Meet(const float (&d)[Config::kTiles][kPanel / 2], int first_tile, int warp,
                       int row) {
    constexpr int kBlocks = kPanel / 16;  // of 8 columns, of a half
    const uint32_t barrier = SharedAddress(&shared_.met);
    const int rows = args_.p.rows;
    if (threadIdx.x == 0) {
      const int warp_tiles = (rows + 15) / 16;  // of 16 rows
      BarrierArriveExpect(barrier, warp_tiles * kBlocks * 512);
    }
    const uint32_t other_barrier = RemoteAddress(barrier, ClusterRank() ^ 1);
#pragma unroll
    for (int tile = 0; tile < Config::kTiles; ++tile) {
      if (64 * (first_tile + tile) + 16 * (warp % 4) >= rows) continue;
      const uint32_t to = RemoteAddress(Sums(first_tile + tile), ClusterRank() ^ 1);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        float4 value;
        value.x = split_ == 0 ? d[tile][kPanel / 4 + 4 * i] : d[tile][4 * i];
        value.y = split_ == 0 ? d[tile][kPanel / 4 + 4 * i + 1] : d[tile][4 * i + 1];
        value.z = split_ == 0 ? d[tile][kPanel / 4 + 4 * i + 2] : d[tile][4 * i + 2];
        value.w = split_ == 0 ? d[tile][kPanel / 4 + 4 * i + 3] : d[tile][4 * i + 3];
        StoreRemote(to + i * 2048, value, other_barrier);
      }
    }
    BarrierWait(barrier, 0);  // used once: with splits, a block has one panel
#pragma unroll
    for (int tile = 0; tile < Config::kTiles; ++tile) {
      const int batch_row = 64 * (first_tile + tile) + 16 * (warp % 4);
      if (batch_row >= rows) continue;
      float half[kPanel / 4];
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const float4 value = LoadShared(Sums(first_tile + tile) + i * 2048);
        const float other[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          half[4 * i + j] =
              (split_ == 0 ? d[tile][4 * i + j] : d[tile][kPanel / 4 + 4 * i + j]) + other[j];
        }
      }
      Finish<kPanel / 2>(half, batch_row, row, split_ * kPanel / 2, warp);
    }
  }

  // Where this thread's sums of a tile of the batch come to lie: blocks of 8 columns, 2048 bytes
  // apart.
  __device__ uint32_t Sums(int tile) const {
    return exchange_ + tile * (kPanel / 16) * 2048 + threadIdx.x % 128 * 16;
  }

  // y = g · d + bias for a warp's 16 rows of the batch from batch_row on, and columns
  // [first_column,
  // + kColumns) of the panel at `row`. Sums are turned over in shared memory, 16 columns at a time,
  // so that one short loop does the rest: code comes from memory too, and what runs once is waited
  // for.
  template <int kColumns>
  __device__ void Finish(const float (&d)[kColumns / 2], int batch_row, int row, int first_column,
                         int warp) {
    const int rows = args_.p.rows;
    if (batch_row >= rows) return;
    const uint32_t sums = SharedAddress(shared_.turn[warp]);
    const int t = batch_row + lane_ / 2;
    const int segment = tables_.segments > 1 ? SegmentOf(tables_, t) : 0;
#pragma unroll 1
    for (int step = 0; step < kColumns / 16; ++step) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i) {
        if (i != step) continue;
        const uint32_t to = sums + lane_ / 4 * Config::kTurnBytes + lane_ % 4 * 8;
        StoreShared(to, make_float2(d[8 * i], d[8 * i + 1]));
        StoreShared(to + 32, make_float2(d[8 * i + 4], d[8 * i + 5]));
        StoreShared(to + 8 * Config::kTurnBytes, make_float2(d[8 * i + 2], d[8 * i + 3]));
        StoreShared(to + 8 * Config::kTurnBytes + 32, make_float2(d[8 * i + 6], d[8 * i + 7]));
      }
      __syncwarp();
      if (t < rows) {
        FinishEight(sums + lane_ / 2 * Config::kTurnBytes + lane_ % 2 * 32, t, segment, row,
                    first_column + 16 * step + lane_ % 2 * 8);
      }
    }
  }

  // Columns column.. + 7 of a row of the batch.
  __device__ void FinishEight(uint32_t sums, int t, int segment, int row, int column) const {
    const int out = args_.part_begin[args_.p.shape.parts];
    const int n = row + column;
    float y[8];
    LoadEight(sums, y);
    float bias[8];
    LoadEight(SharedAddress(&shared_.bias[column]), bias);
    float g[8];
    if (segment < Config::kStaged) {
      LoadEight(SharedAddress(&shared_.g[segment][column]), g);
    } else {
      const float* from = n < out ? MagnitudesOf(segment, n) : nullptr;
#pragma unroll
      for (int i = 0; i < 8; ++i) g[i] = from != nullptr && n + i < out ? __ldg(from + i) : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = fmaf(g[i], y[i], bias[i]);
    const int64_t at = static_cast<int64_t>(t) * out + n;
    if (out % 8 != 0 || n + 8 > out) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (n + i >= out) continue;
        if (args_.p.y_fp32) {
          static_cast<float*>(args_.p.y)[at + i] = y[i];
        } else {
          static_cast<__nv_bfloat16*>(args_.p.y)[at + i] = __float2bfloat16_rn(y[i]);
        }
      }
    } else if (args_.p.y_fp32) {
      auto* to = reinterpret_cast<float4*>(static_cast<float*>(args_.p.y) + at);
      to[0] = make_float4(y[0], y[1], y[2], y[3]);
      to[1] = make_float4(y[4], y[5], y[6], y[7]);
    } else {
      __nv_bfloat162 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(y[2 * i], y[2 * i + 1]);
      *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(args_.p.y) + at) =
          *reinterpret_cast<const uint4*>(pairs);
    }
  }

  __device__ static void LoadEight(uint32_t address, float (&values)[8]) {
    const float4 first = LoadShared(address);
    const float4 second = LoadShared(address + 16);
    values[0] = first.x;
    values[1] = first.y;
    values[2] = first.z;
    values[3] = first.w;
    values[4] = second.x;
    values[5] = second.y;
    values[6] = second.z;
    values[7] = second.w;
  }

  const LinearArgs& args_;
  Shared& shared_;
  const LinearTables& tables_;
  const int x_bytes_;  // of a chunk
  LinearRing ring_;
  const uint32_t exchange_;
  const int split_;
  const int sibling_;
  const int lane_;
  int started_ = 0;  // stages of the first panel that StartWeights fetched
};

// The kernel, of all threads, in shared memory that it is given; `dynamic`: 1024-byte aligned.
template <int kM, int kPanel>
__device__ void RunProject(const CUtensorMap* w_map, const CUtensorMap* x_map,
                           const LinearArgs& args,
                           typename ProjectBlock<kM, kPanel>::Shared& shared, uint32_t dynamic) {
  using Config = ProjectConfig<kM, kPanel>;
  using Block = ProjectBlock<kM, kPanel>;
  LaunchDependents();
  Block block(args, shared, dynamic);
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
  const bool is_weight_producer = warp == Config::kConsumerWarps && threadIdx.x % 32 == 0;
  if (is_weight_producer) {
    Block::InitBarriers(args, shared);
    block.StartWeights(w_map);
    PrefetchTensorMap(x_map);
  } else if (warp < Config::kConsumerWarps) {
    FillTables<32 * Config::kConsumerWarps>(args, shared.tables);
  }
  __syncthreads();
  const bool is_cluster = args.siblings << args.plan.log_splits > 1;
  if (is_cluster) ClusterBarrier();
  if (warp < Config::kConsumerWarps) {
    if constexpr (Config::kMovesRegisters) IncreaseRegisters<232>();
    block.Consume();
  } else {
    if constexpr (Config::kMovesRegisters) DecreaseRegisters<40>();
    if (is_weight_producer) {
      block.ProduceWeights(w_map);
    } else if (warp > Config::kConsumerWarps) {
      block.ProduceBatch(x_map, warp - Config::kConsumerWarps - 1);
    }
  }
  __syncwarp();
  if (is_cluster) ClusterBarrier();  // others still reach into this block's shared memory
}

template <int kM, int kPanel>
__global__ void __launch_bounds__(ProjectConfig<kM, kPanel>::kThreads, 1)
    ProjectKernel(const __grid_constant__ CUtensorMap w_map,
                  const __grid_constant__ CUtensorMap x_map,
                  const __grid_constant__ LinearArgs args) {
  extern __shared__ uint8_t dynamic[];
  __shared__ typename ProjectBlock<kM, kPanel>::Shared shared;
  RunProject<kM, kPanel>(&w_map, &x_map, args, shared,
                         (SharedAddress(dynamic) + 1023) / 1024 * 1024);
}

}  // namespace dorad::kernels
