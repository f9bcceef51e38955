// h = s·(A x), y = g ⊙ (W x + B h) + bias: see linear.h for what is computed and linear_plan.h for
// the cut.
//
// A block takes a panel of W, and of K all or one of two splits. It streams (weight tile, batch
// tile) pairs of 64 elements of K through a ring of shared memory into wgmma, the batch as the M
// operand, the panel as N: (W, x) over K = in, then (B of a slot, h masked to the slot's rows) over
// K = rank, into the same accumulators. Rows outside of a segment see products with zero, which
// change no bit of an fp32 sum.
//
// First, or after a few stages of W, the same ring brings the block's share of the shrink, (A, x),
// which it multiplies and leaves in device memory; while it goes on with W, the shares of all
// blocks are added up: linear_shrink.cuh.
//
// A cluster is the splits of a panel, whose sums meet, and siblings: panels next to each other,
// which fetch x together, each a share of the rows for all.
//
// Warps: consumers | producer of weights | producers of the batch. The first of these fetches x;
// the others add up h meanwhile; all copy h. Weights depend on no kernel before this one, so their
// producer runs ahead as far as the ring reaches.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/common/barrier.cuh"
#include "kernels/common/wgmma.cuh"
#include "kernels/dora/linear_finish.cuh"
#include "kernels/dora/linear_ring.cuh"
#include "kernels/dora/linear_shrink.cuh"
#include "kernels/dora/linear_tables.cuh"

namespace dorad::kernels {

// kM: tiles of 64 rows of the batch; kPanel: rows of W; kAdapted: whether there may be adapters.
template <int kM, int kPanel, bool kAdapted>
struct ProjectConfig {
  static constexpr int kGroups = kM == 1 ? 1 : 2;  // warpgroups that compute
  static constexpr int kTiles = kM / kGroups;      // of each
  static constexpr int kConsumerWarps = 4 * kGroups;
  static constexpr int kBatchWarps = kM < 4 && kAdapted ? 7 : 3;
  static constexpr int kAdders = kBatchWarps - 1;  // while the first one fetches x
  static constexpr int kThreads = 32 * (kConsumerWarps + 1 + kBatchWarps);
  static constexpr int kMaxStages = 24;
  // Chunks of K that a stage holds: where they are small, what a stage costs would count.
  static constexpr int kStageChunks = kPanel <= 96 && kM < 4 ? 2 : 1;
  static constexpr int kChunkBytes = kPanel * 2 * kLinearStageK;
  static constexpr int kWeightBytes = kStageChunks * kChunkBytes;
  // Boxes of A that a block takes at once.
  static constexpr int kBoxBytes = kLinearBoxRows * 2 * kLinearStageK;
  static constexpr int kMaxBoxes = std::min(kPanel / kLinearBoxRows, kM == 4 ? 3 : 4);
  // Of weights, before the shrink: what comes while the block finds out which adapters there are.
  // Only where registers hold the sums of both; with larger batches the batch takes longer to come.
  static constexpr int kLeadStages =
      kM == 1 && kAdapted ? std::max(96 * 1024 / kWeightBytes, 1) : 0;
  // More than an even share of the registers for consumers; the others have the rest.
  static constexpr bool kMovesRegisters = kThreads > 256;
  static constexpr int kProducerRegisters = kM == 4 ? (kPanel <= 64 ? 56 : 40) : kM == 2 ? 88 : 136;
  static constexpr int kEvenRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kProducerGroups = kThreads / 128 - kGroups;
  static constexpr int kConsumerRegisters =
      (kThreads / 128 * kEvenRegisters - kProducerGroups * kProducerRegisters) / kGroups;
  // What the other split sends: half of the panel's sums.
  static constexpr int kExchangeBytes = kPanel <= 128 ? kM * 64 * kPanel / 2 * 4 : 0;
};

template <int kM, int kPanel, bool kAdapted>
class ProjectBlock {
 public:
  using Config = ProjectConfig<kM, kPanel, kAdapted>;
  using Finish = LinearFinish<kPanel, Config::kConsumerWarps, kAdapted>;

  struct Shared {
    LinearTables tables;
    LinearRingBarriers<Config::kMaxStages> ring;
    uint64_t tables_filled;
    uint64_t staged;    // bias and magnitudes of a panel are there
    uint64_t finished;  // and are not needed any more
    uint64_t acquired;  // the maps of B
    uint64_t share;     // this block's share of the shrink is in device memory
    uint64_t met;       // the other split's sums have come
    typename Finish::Shared finish;
  };

  __device__ ProjectBlock(const LinearArgs& args, Shared& shared, uint32_t dynamic)
      : args_(args),
        shared_(shared),
        tables_(shared.tables),
        finish_(args, shared.tables, shared.finish),
        x_bytes_(args.x_rows * 2 * kLinearStageK),
        ring_(shared.ring, dynamic, args.stages, Config::kWeightBytes,
              Config::kWeightBytes + Config::kStageChunks * x_bytes_),
        exchange_(dynamic + args.stages * (Config::kWeightBytes + Config::kStageChunks * x_bytes_)),
        split_(blockIdx.x & (args.plan.splits - 1)),
        sibling_((blockIdx.x >> args.plan.log_splits) % args.siblings),
        lane_(threadIdx.x % 32) {}

  // One warp.
  __device__ static void InitBarriers(const LinearArgs& args, Shared& shared) {
    shared.ring.Init(args.stages, args.siblings * Config::kConsumerWarps);
    if (threadIdx.x % 32 == 0) {
      BarrierInit(SharedAddress(&shared.tables_filled), 32);
      BarrierInit(SharedAddress(&shared.staged), 32 * Config::kAdders);
      BarrierInit(SharedAddress(&shared.finished), 32 * Config::kConsumerWarps);
      BarrierInit(SharedAddress(&shared.acquired), 1);
      BarrierInit(SharedAddress(&shared.share), Config::kConsumerWarps);
      BarrierInit(SharedAddress(&shared.met), 1);
    }
    BarrierInitFence();
    __syncwarp();
  }

  // One thread, as soon as barriers are made: the first weights.
  __device__ void StartWeights(const CUtensorMap* w_map) {
    if (!HasPanel()) return;
    const int most = kAdapted ? LeadStages() : args_.flight;
    const int first = FirstChunk(args_.plan, split_);
    const int row = (Cluster() * args_.siblings + sibling_) * kPanel;
    ForEachStage(first, FirstChunk(args_.plan, split_ + 1), [&](int chunk, int count) {
      if (started_ == most) return;
      FetchWeights(w_map, chunk, count, row);
      ++started_;
    });
  }

  // The whole warp of that thread: all others.
  __device__ void ProduceWeights(const CUtensorMap* w_map) {
    WaitForTables();
    int issued = started_;
    const auto wait_for_room = [&] {
      if (issued >= args_.flight) ring_.WaitArrived(args_.flight);
      ++issued;
      ring_.WaitEmpty();
    };
    ForEachPanel([&](int group, int row, bool first) {
      if (kAdapted && first) {
        AcquireShareMaps();
        if (lane_ == 0) issued += ProduceShare();
      }
      if (!HasPanel() || lane_ != 0) return;
      ForEachStage(FirstChunk(args_.plan, split_) + started_ * Config::kStageChunks,
                   FirstChunk(args_.plan, split_ + 1), [&](int chunk, int count) {
                     wait_for_room();
                     FetchWeights(w_map, chunk, count, row);
                   });
      started_ = 0;
      if constexpr (!kAdapted) return;
      BarrierWait(SharedAddress(&shared_.acquired), 0);
      ForEachRank(group, [&](int segment, int part, int first_chunk, int end_chunk) {
        if (first_chunk == end_chunk) return;  // no rank, so maybe no slot either
        const bool has_part = HasPart(row, part);
        const CUtensorMap* map = MapsOf(args_, tables_.slot[segment], part) + 1;
        ForEachStage(first_chunk, end_chunk, [&](int chunk, int count) {
          wait_for_room();
          if (has_part) {
            BarrierArriveExpect(ring_.weights_full(), count * Config::kChunkBytes);
            // Rows of other parts are out of bounds: zero.
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
              FetchBoxes<kPanel / kLinearBoxRows>(ring_.weights() + i * Config::kChunkBytes, map,
                                                  (chunk + i) * kLinearStageK,
                                                  row - args_.part_begin[part]);
            }
          } else {
            BarrierArrive(ring_.weights_full());
          }
          ring_.Advance();
        });
      });
    });
  }

  // Warp `producer` of kBatchWarps. x_map has boxes of x_rows / siblings rows, x_tile_map those of
  // min(64, x_rows).
  __device__ void ProduceBatch(const CUtensorMap* x_map, const CUtensorMap* x_tile_map,
                               int producer) {
    WaitForPrevious();
    // A stage of x: the first warp's.
    const auto produce = [&](uint32_t bytes, auto copy) {
      if (producer == 0) {
        ring_.WaitEmpty();
        __syncwarp();
        if (lane_ == 0) {
          BarrierArriveExpect(ring_.batch_full(), bytes);
          copy();
        }
      }
      ring_.Advance();
    };
    const auto produce_share = [&] {
      const int box_bytes = min(64, args_.x_rows) * 2 * kLinearStageK;
      ForEachGroup<Config::kMaxBoxes>(args_, tables_, [&](const Group& group) {
        const int tiles = group.last_tile - group.first_tile + 1;
        ForEachShareStage([&](int chunk, int count) {
          produce(count * tiles * box_bytes, [&] {
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
#pragma unroll 1
              for (int tile = group.first_tile; tile <= group.last_tile; ++tile) {
                CopyTensorBox(ring_.batch() + i * x_bytes_ + tile * kTileBytes, x_tile_map,
                              (chunk + i) * kLinearStageK, tile * 64, ring_.batch_full());
              }
            }
          });
        });
      });
    };
    const int box_rows = args_.x_rows / args_.siblings;
    uint16_t blocks = 0;
#pragma unroll 1
    for (int i = 0; i < args_.siblings; ++i) {
      blocks |= 1 << (i << args_.plan.log_splits | split_);
    }
    const auto produce_x = [&](int begin, int end) {
      ForEachStage(begin, end, [&](int chunk, int count) {
        produce(count * x_bytes_, [&] {
#pragma unroll 1
          for (int i = 0; i < count; ++i) {
            const uint32_t to = ring_.batch() + i * x_bytes_;
            const int column = (chunk + i) * kLinearStageK;
            if (args_.siblings == 1) {
              CopyTensorBox(to, x_map, column, 0, ring_.batch_full());
            } else {
              CopyTensorBoxToBlocks(to + sibling_ * box_rows * 2 * kLinearStageK, x_map, column,
                                    sibling_ * box_rows, ring_.batch_full(), blocks);
            }
          }
        });
      });
    };
    // Stages of h are all warps' in turns, at most one of each on its way.
    const int turns = min(Config::kBatchWarps, args_.stages);
    int panel = 0;
    ForEachPanel([&](int group, int row, bool first) {
      // No warp may run two rounds of the ring ahead: a barrier tells the last two phases apart
      // only.
      if (kAdapted && !first) NamedBarrier(4, 32 * Config::kBatchWarps);
      if (producer > 0 && HasPanel()) {
        if (kAdapted && first && producer == 1) AcquireRankMaps();
        StageFinish(row, panel++, producer - 1);
      }
      ForEachPiece(first, [&](int begin, int end, bool is_lead) {
        produce_x(begin, end);
        if (!is_lead) return;
        WaitForTables();
        if (!HasShares()) return;
        produce_share();
        if (producer > 0) AddH(producer - 1);
      });
      if (!HasPanel()) return;
      if constexpr (!kAdapted) return;
      bool has_met = false;
      int turn = 0;
      ForEachRank(group, [&](int segment, int part, int first_chunk, int end_chunk) {
        const bool has_part = HasPart(row, part);
        ForEachStage(first_chunk, end_chunk, [&](int chunk, int count) {
          if (!has_met) MeetForH(producer);
          has_met = true;
          if (turn == producer) {
            ring_.WaitEmpty();
#pragma unroll 1
            for (int i = 0; i < count && has_part; ++i) {
              const int k = (chunk + i) * kLinearStageK + lane_ % 8 * 8;
              CopyRows(ring_.batch() + i * x_bytes_,
                       args_.h + static_cast<int64_t>(part) * args_.p.rows * args_.ldh + k,
                       args_.ldh, k < tables_.rank[part][segment], tables_.begin[segment],
                       tables_.end[segment]);
            }
            ArriveCopied();
          }
          if (++turn == turns) turn = 0;
          ring_.Advance();
        });
      });
    });
    if (HasShares() && producer == 1 && lane_ == 0) Leave();
  }

  // Consumers: whole warpgroups.
  __device__ void Consume() {
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    const int first_tile = warp / 4 * Config::kTiles;
    const int tiles = (args_.p.rows + 63) / 64;
    if constexpr (Config::kLeadStages == 0) {
      WaitForTables();
      if (HasShares()) MultiplyShare(first_tile, warp);
    }
    uint32_t parity = 0;
    ForEachPanel([&](int group, int row, bool first) {
      float d[Config::kTiles][kPanel / 2];
      Clear(d);
      ForEachPiece(first, [&](int begin, int end, bool is_lead) {
        Accumulate(d, end - begin, first_tile, 0, min(Config::kTiles, tiles - first_tile), false);
        if constexpr (Config::kLeadStages > 0) {
          if (!is_lead) return;
          WaitForTables();
          if (HasShares()) MultiplyShare(first_tile, warp);
        }
      });
      if (!HasPanel()) return;
      if constexpr (kAdapted) {
        ForEachRank(group, [&](int segment, int part, int first_chunk, int end_chunk) {
          const int begin = max(tables_.begin[segment] / 64 - first_tile, 0);
          const int end = min((tables_.end[segment] + 63) / 64 - first_tile, Config::kTiles);
          if (begin < end && HasPart(row, part)) {
            Accumulate(d, end_chunk - first_chunk, first_tile, begin, end, true);
          } else {
            Skip(end_chunk - first_chunk);
          }
        });
      }
      BarrierWait(SharedAddress(&shared_.staged), parity);
      parity ^= 1;
      if (args_.plan.splits == 1) {
#pragma unroll
        for (int tile = 0; tile < Config::kTiles; ++tile) {
          finish_.template Rows<kPanel>(d[tile], 64 * (first_tile + tile) + 16 * (warp % 4), row, 0,
                                        warp);
        }
      } else if constexpr (Config::kExchangeBytes != 0) {
        Meet(d, first_tile, warp, row);
      }
      BarrierArrive(SharedAddress(&shared_.finished));
    });
  }

 private:
  using Group = ShrinkGroup<Config::kMaxBoxes>;
  static constexpr int kTileBytes = 64 * 2 * kLinearStageK;  // of the batch, 64 rows of a chunk

  // f(first chunk, number of chunks) for every stage of chunks [first, end).
  template <typename F>
  __device__ static void ForEachStage(int first, int end, F f) {
#pragma unroll 1
    for (int chunk = first; chunk < end; chunk += Config::kStageChunks) {
      f(chunk, min(Config::kStageChunks, end - chunk));
    }
  }

  // The whole warp makes the copy engine read maps anew, those of this block's part of A,
  __device__ void AcquireShareMaps() const {
#pragma unroll 1
    for (int i = tables_.share[0] + lane_; i < tables_.share[1]; i += 32) {
      AcquireTensorMap(OwnBox(args_, tables_, i).map);
    }
    __syncwarp();
  }

  // and, beside it, those of B, once for all panels.
  __device__ void AcquireRankMaps() const {
    WaitForTables();
#pragma unroll 1
    for (int i = lane_; i < args_.p.shape.parts * tables_.segments; i += 32) {
      const LinearFactor at = FactorAt(tables_, i);
      if (tables_.rank[at.part][at.segment] == 0) continue;
      AcquireTensorMap(MapsOf(args_, tables_.slot[at.segment], at.part) + 1);
    }
    __syncwarp();
    if (lane_ == 0) BarrierArrive(SharedAddress(&shared_.acquired));
  }

  // The thread that fetches weights: the block's part of A. Returns how many stages that were.
  __device__ int ProduceShare() {
    int stages = 0;
    const int end = tables_.share[1];
#pragma unroll 1
    for (int next = tables_.share[0]; next < end; next += Config::kMaxBoxes) {
      const int boxes = min(Config::kMaxBoxes, end - next);
      LinearBox box[Config::kMaxBoxes];
#pragma unroll
      for (int i = 0; i < Config::kMaxBoxes; ++i) {
        if (i < boxes) box[i] = OwnBox(args_, tables_, next + i);
      }
      // Stages of a few boxes are small: as many of them as the ring takes.
      ForEachShareStage([&](int chunk, int count) {
        ring_.WaitEmpty();
        BarrierArriveExpect(ring_.weights_full(), count * boxes * Config::kBoxBytes);
#pragma unroll
        for (int i = 0; i < Config::kMaxBoxes; ++i) {
          if (i >= boxes) break;
#pragma unroll 1
          for (int j = 0; j < count; ++j) {
            CopyTensorBoxOnce(ring_.weights() + j * Config::kChunkBytes + i * Config::kBoxBytes,
                              box[i].map, (chunk + j) * kLinearStageK, box[i].row,
                              ring_.weights_full());
          }
        }
        ring_.Advance();
        ++stages;
      });
    }
    return stages;
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

  // So many boxes of B, below each other. Unrolled: one thread does this for all.
  template <int kBoxes>
  __device__ void FetchBoxes(uint32_t to, const CUtensorMap* map, int column, int row) const {
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      CopyTensorBoxOnce(to + i * Config::kBoxBytes, map, column, row + i * kLinearBoxRows,
                        ring_.weights_full());
    }
  }

  // The stages of this block's slice of K in the shrink, of one group. Chunks beyond K are zero.
  template <typename F>
  __device__ void ForEachShareStage(F f) const {
    const int first = static_cast<int>(blockIdx.x) % kLinearSlices * args_.plan.a_chunks;
    ForEachStage(first, first + args_.plan.a_chunks, f);
  }

  __device__ void WaitForTables() const {
    if constexpr (kAdapted) BarrierWait(SharedAddress(&shared_.tables_filled), 0);
  }

  // Whether any of the adapters has factors here.
  __device__ bool HasShares() const { return kAdapted && tables_.boxes > 0; }

  __device__ int LeadStages() const { return min(Config::kLeadStages, args_.flight); }

  // f(first chunk, end, is lead) of W over a panel of this block: of its first one what comes
  // before the shrink, maybe nothing, then the rest. A block without a panel has chunks of neither.
  // Which they are depends on no table, so that a batch's first stages need not wait for those.
  template <typename F>
  __device__ void ForEachPiece(bool first, F f) const {
    const int begin = FirstChunk(args_.plan, split_);
    const int end = HasPanel() ? FirstChunk(args_.plan, split_ + 1) : begin;
    const bool has_lead = first && kAdapted;
    const int middle = has_lead ? min(begin + LeadStages() * Config::kStageChunks, end) : begin;
#pragma unroll 1
    for (int piece = has_lead ? 0 : 1; piece < 2; ++piece) {
      f(piece == 0 ? begin : middle, piece == 0 ? middle : end, piece == 0);
    }
  }

  // Warp `stager` of kAdders: keeps what a panel's end needs.
  __device__ void StageFinish(int row, int panel, int stager) const {
    if (panel > 0) BarrierWait(SharedAddress(&shared_.finished), (panel - 1) & 1);
    WaitForTables();
    finish_.Stage(row, 32 * stager + lane_, 32 * Config::kAdders);
    BarrierArrive(SharedAddress(&shared_.staged));
  }

  // Warp `adder` of kAdders: this block's part of h, once all shares are there.
  __device__ void AddH(int adder) const {
    constexpr int kAdders = Config::kAdders;
    const bool leads = adder == 0 && lane_ == 0;
    if (leads) {
      BarrierWait(SharedAddress(&shared_.share), 0);
      SignalRelease(&args_.signals->shares);
      SpinUntil(&args_.signals->shares, gridDim.x);
    }
    NamedBarrier(3, 32 * kAdders);
    AddShares < Config::kProducerRegisters<88 ? 4 : 8>(
                    args_, tables_, static_cast<int>(blockIdx.x) * kAdders + adder,
                    static_cast<int>(gridDim.x) * kAdders);
    NamedBarrier(3, 32 * kAdders);
    if (leads) SignalRelease(&args_.signals->h);
  }

  // All producers of the batch, before a panel's first stage of h: until all of h is there, and the
  // one who fetches x has come this far. The others waited for no stage since, and a barrier tells
  // the last two phases apart only.
  __device__ void MeetForH(int producer) const {
    if (producer == 1 && lane_ == 0) SpinUntil(&args_.signals->h, gridDim.x);
    NamedBarrier(4, 32 * Config::kBatchWarps);
  }

  // The thread that waits for signals, when it needs none any more: the last block leaves them as
  // it found them.
  __device__ void Leave() const {
    if (atomicAdd(&args_.signals->left, 1) == gridDim.x - 1) {
      *args_.signals = LinearSignals();
    }
  }

  __device__ int Cluster() const {
    return static_cast<int>(blockIdx.x >> args_.plan.log_splits) / args_.siblings;
  }
  // A launch that takes adapters may have more blocks than panels, for the shrink.
  __device__ bool HasPanel() const {
    return !kAdapted || Cluster() * args_.siblings < args_.plan.panels;
  }

  // f(panel's cluster as its first row of W, the block's own first row, whether it is the block's
  // first panel), once for a block without one too. Blocks of a cluster go through the same number
  // of panels and the same stages.
  template <typename F>
  __device__ void ForEachPanel(F f) const {
    const int clusters = static_cast<int>(gridDim.x >> args_.plan.log_splits) / args_.siblings;
    const int group_rows = args_.siblings * kPanel;
    bool first = true;
#pragma unroll 1
    for (int group = Cluster(); first || group * args_.siblings < args_.plan.panels;
         group += clusters) {
      f(group * group_rows, group * group_rows + sibling_ * kPanel, first);
      first = false;
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

  // Eight columns for each lane, from `from` in row 0 on, of rows [begin, end) of a matrix of the
  // batch; zeros in the other rows of their tiles, and if not `in_k`. One warp, four rows at a
  // time.
  __device__ void CopyRows(uint32_t tile, const __nv_bfloat16* from, int ld, bool in_k, int begin,
                           int end) const {
    const uint32_t count = in_k ? end - begin : 0;
    const int last = min((end + 63) / 64 * 64, args_.x_rows);
    int row = begin / 64 * 64 + lane_ / 8;
    from += static_cast<int64_t>(row) * ld;
    const int64_t step = 4 * static_cast<int64_t>(ld);
    uint32_t to = tile + row * 128 + ((lane_ ^ row) % 8 << 4);
#pragma unroll 4
    for (; row < last; row += 4) {
      const bool valid = static_cast<uint32_t>(row - begin) < count;
      CopyAsync16(to, valid ? from : args_.p.x, valid);
      from += step;
      to = (to + 4 * 128) ^ 64;  // the swizzle of the row four further on
    }
  }

  // One warp: the stage's batch is there when its copies are.
  __device__ void ArriveCopied() const {
    BarrierHoldForCopies(ring_.batch_full());
    __syncwarp();
    if (lane_ == 0) BarrierArrive(ring_.batch_full());
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

  template <int kSize>
  __device__ static void Clear(float (&d)[Config::kTiles][kSize]) {
#pragma unroll
    for (int tile = 0; tile < Config::kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) d[tile][i] = 0.0f;
    }
  }

  // This warpgroup's part of the block's share of the shrink: of its tiles of the batch.
  __device__ void MultiplyShare(int first_tile, int warp) {
    ForEachGroup<Config::kMaxBoxes>(args_, tables_, [&](const Group& group) {
      // Tensor-core code wants to know its registers: one loop for each case. What it computes of
      // boxes beyond the group's is not used.
      constexpr int kFew = Config::kMaxBoxes == 4 && kM == 1 ? 2 : Config::kMaxBoxes;
      const int boxes = __shfl_sync(0xFFFFFFFF, group.boxes, 0);
      if (group.first_tile >= first_tile + Config::kTiles || group.last_tile < first_tile) {
        Skip(args_.plan.a_chunks);
      } else if (boxes <= kFew) {
        MultiplyBoxes<kFew>(group, first_tile, warp);
      } else {
        MultiplyBoxes<Config::kMaxBoxes>(group, first_tile, warp);
      }
    });
    __syncwarp();
    if (lane_ == 0) BarrierArrive(SharedAddress(&shared_.share));
  }

  template <int kBoxes>
  __device__ void MultiplyBoxes(const Group& group, int first_tile, int warp) {
    float sums[Config::kTiles][kBoxes * kLinearBoxRows / 2];
    Clear(sums);
    // What is computed of tiles that were not fetched is not used.
    AccumulateTiles<kBoxes * kLinearBoxRows, 0, Config::kTiles>(sums, args_.plan.a_chunks,
                                                                first_tile, false);
#pragma unroll
    for (int tile = 0; tile < Config::kTiles; ++tile) {
      if (first_tile + tile < group.first_tile || first_tile + tile > group.last_tile) continue;
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) {
        if (i >= group.boxes) break;
        StoreShare(args_, tables_, &sums[tile][i * kLinearBoxRows / 2],
                   64 * (first_tile + tile) + 16 * (warp % 4), group.box[i]);
      }
    }
  }

  // Adds the products of the next `chunks` to tiles [begin, end) of the warpgroup's, which begin at
  // the batch's tile `first_tile`; `copied`: threads wrote their batch tiles.
  __device__ void Accumulate(float (&d)[Config::kTiles][kPanel / 2], int chunks, int first_tile,
                             int begin, int end, bool copied) {
    // Tensor-core code wants to know its registers: one loop for each case.
    if (Config::kTiles == 1 || (begin == 0 && end == Config::kTiles)) {
      AccumulateTiles<kPanel, 0, Config::kTiles>(d, chunks, first_tile, copied);
    } else if (begin == 0) {
      AccumulateTiles<kPanel, 0, 1>(d, chunks, first_tile, copied);
    } else {
      AccumulateTiles<kPanel, Config::kTiles - 1, 1>(d, chunks, first_tile, copied);
    }
  }

  // kN: rows of W, or of A.
  template <int kN, int kFirst, int kCount>
  __device__ void AccumulateTiles(float (&d)[Config::kTiles][kN / 2], int chunks, int first_tile,
                                  bool copied) {
    chunks = __shfl_sync(0xFFFFFFFF, chunks, 0);  // tells the compiler that the warp agrees
#pragma unroll 1
    for (; chunks >= Config::kStageChunks; chunks -= Config::kStageChunks) {
      AccumulateStage<kN, kFirst, kCount, Config::kStageChunks>(d, first_tile, copied);
    }
    if (Config::kStageChunks > 1 && chunks > 0) {
      AccumulateStage<kN, kFirst, kCount, 1>(d, first_tile, copied);
    }
  }

  template <int kN, int kFirst, int kCount, int kChunks>
  __device__ void AccumulateStage(float (&d)[Config::kTiles][kN / 2], int first_tile, bool copied) {
    ring_.WaitFull();
    if (copied) FenceProxyAsync();
    WgmmaFence();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const uint64_t weights = WgmmaTile(ring_.weights() + chunk * Config::kChunkBytes);
      const uint32_t batch = ring_.batch() + chunk * x_bytes_ + first_tile * kTileBytes;
#pragma unroll
      for (int tile = kFirst; tile < kFirst + kCount; ++tile) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          Wgmma<kN>(d[tile], WgmmaTile(batch + tile * kTileBytes) + 2 * step, weights + 2 * step,
                    1);
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
      finish_.template Rows<kPanel / 2>(half, batch_row, row, split_ * kPanel / 2, warp);
    }
  }

  // Where this thread's sums of a tile of the batch come to lie: blocks of 8 columns, 2048 bytes
  // apart.
  __device__ uint32_t Sums(int tile) const {
    return exchange_ + tile * (kPanel / 16) * 2048 + threadIdx.x % 128 * 16;
  }

  const LinearArgs& args_;
  Shared& shared_;
  const LinearTables& tables_;
  const Finish finish_;
  const int x_bytes_;  // of a chunk
  LinearRing ring_;
  const uint32_t exchange_;
  const int split_;
  const int sibling_;
  const int lane_;
  int started_ = 0;  // stages of the first panel that StartWeights fetched
};

// The kernel, of all threads, in shared memory that it is given; `dynamic`: 1024-byte aligned.
template <int kM, int kPanel, bool kAdapted>
__device__ void RunProject(const CUtensorMap* w_map, const CUtensorMap* x_map,
                           const CUtensorMap* x_tile_map, const LinearArgs& args,
                           typename ProjectBlock<kM, kPanel, kAdapted>::Shared& shared,
                           uint32_t dynamic) {
  using Config = ProjectConfig<kM, kPanel, kAdapted>;
  using Block = ProjectBlock<kM, kPanel, kAdapted>;
  LaunchDependents();
  Block block(args, shared, dynamic);
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
  const bool is_consumer = warp < Config::kConsumerWarps;
  const bool is_weight_producer = warp == Config::kConsumerWarps && threadIdx.x % 32 == 0;
  const bool is_cluster = args.siblings << args.plan.log_splits > 1;
  if (warp == Config::kConsumerWarps) {
    Block::InitBarriers(args, shared);
    NamedBarrierArrive(1, Config::kThreads);
    if (is_cluster) ClusterArrive();
    if (is_weight_producer) block.StartWeights(w_map);
    __syncwarp();
  } else {
    if (threadIdx.x == 0) PrefetchTensorMap(x_map);
    LinearSegment segment;
    if (kAdapted && is_consumer) segment = LoadSegment(args);
    NamedBarrier(1, Config::kThreads);  // barriers are made
    if (is_cluster) ClusterArrive();
    if (kAdapted && is_consumer) {
      FillTables(args, shared.tables, segment);
      NamedBarrier(2, 32 * Config::kConsumerWarps);
      if (warp == 0) {
        NumberBoxes(args, shared.tables);
        BarrierArrive(SharedAddress(&shared.tables_filled));
      }
    }
  }
  if (is_cluster) ClusterWait();
  if (is_consumer) {
    if constexpr (Config::kMovesRegisters) IncreaseRegisters<Config::kConsumerRegisters>();
    block.Consume();
  } else {
    if constexpr (Config::kMovesRegisters) DecreaseRegisters<Config::kProducerRegisters>();
    if (warp == Config::kConsumerWarps) {
      block.ProduceWeights(w_map);
    } else {
      block.ProduceBatch(x_map, x_tile_map, warp - Config::kConsumerWarps - 1);
    }
  }
  __syncwarp();
  if (is_cluster) ClusterBarrier();  // others still reach into this block's shared memory
}

template <int kM, int kPanel, bool kAdapted>
__global__ void __launch_bounds__(ProjectConfig<kM, kPanel, kAdapted>::kThreads, 1)
    ProjectKernel(const __grid_constant__ CUtensorMap w_map,
                  const __grid_constant__ CUtensorMap x_map,
                  const __grid_constant__ CUtensorMap x_tile_map,
                  const __grid_constant__ LinearArgs args) {
  extern __shared__ uint8_t dynamic[];
  __shared__ typename ProjectBlock<kM, kPanel, kAdapted>::Shared shared;
  RunProject<kM, kPanel, kAdapted>(&w_map, &x_map, &x_tile_map, args, shared,
                                   (SharedAddress(dynamic) + 1023) / 1024 * 1024);
}

}  // namespace dorad::kernels
