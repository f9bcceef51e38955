// Common state of all roles of a projection's block (linear_project.cuh), and their common loops.
// Each thread has an object of its role, all on the same shared memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/dora/linear_finish.cuh"
#include "kernels/dora/linear_ring.cuh"
#include "kernels/dora/linear_shrink.cuh"
#include "kernels/dora/linear_tables.cuh"
#include "kernels/isa/barrier.cuh"

namespace dorad::kernels {

// Isa: Sm90Isa or MmaIsa; kM: tiles of 64 rows of the batch; kPanel: rows of W; kAdapted: whether
// there may be adapters.
template <typename Isa, int kM, int kPanel, bool kAdapted>
struct ProjectConfig {
  // Groups of warps that compute. Their threads read the segments, of up to 256 rows.
  static constexpr int kGroups = Isa::kGroupWarps < 4 ? kM : kM == 1 ? 1 : 2;
  static constexpr int kTiles = kM / kGroups;  // of each
  static constexpr int kConsumerWarps = Isa::kGroupWarps * kGroups;
  static_assert(32 * kConsumerWarps >= 64 * kM);
  static constexpr int kSegments = !Isa::kHasClusters && kM == 2 ? 2 : 1;  // of each thread
  // As many as leave consumers their registers.
  static constexpr int kBatchWarps =
      kM < (Isa::kMovesRegisters ? 4 : 2) && kAdapted ? 8 - Isa::kFetchWarps : 3;
  // Warps that fetch weights, and those of the batch's that fetch x.
  static constexpr int kWeightWarps = kM == 1 ? Isa::kFetchWarps : 1;
  static constexpr int kXWarps = kM > 1 ? Isa::kFetchWarps : 1;
  static constexpr int kAdders = kBatchWarps - kXWarps;  // while the others fetch x
  static constexpr int kThreads = 32 * (kConsumerWarps + kWeightWarps + kBatchWarps);
  // Of a block's warps.
  __device__ static bool FetchesWeights(int warp) {
    if constexpr (kWeightWarps == 1) return warp == kConsumerWarps;
    return warp >= kConsumerWarps && warp < kConsumerWarps + kWeightWarps;
  }
  // Of the batch's warps, or of their lanes.
  __device__ static bool IsOneOfX(int i) {
    if constexpr (kXWarps == 1) return i == 0;
    return i < kXWarps;
  }
  static constexpr int kMaxStages = 24;
  // Chunks of K in a stage: two for small chunks, whose cost per stage would count.
  static constexpr bool kIsSmall =
      Isa::kHasCopyEngine ? kPanel <= 96 && kM < 4 : kPanel == 32 && kM == 1;
  static constexpr int kStageChunks = kIsSmall ? 2 : 1;
  static constexpr int kChunkBytes = kPanel * 2 * kLinearStageK;
  static constexpr int kWeightBytes = kStageChunks * kChunkBytes;
  // Bytes of a box of A.
  static constexpr int kBoxBytes = kLinearBoxRows * 2 * kLinearStageK;
  static constexpr int kMaxBoxes = std::min(kPanel / kLinearBoxRows, kM == 4 ? 3 : 4);
  // Stages of W before the shrink, fetched while the block reads the adapter tables. Only where
  // registers hold the sums of both; with larger batches the batch arrives later.
  static constexpr int kLeadStages =
      kM == 1 && kAdapted ? std::max(96 * 1024 / kWeightBytes, 1) : 0;
  // More than an even share of the registers for consumers; the others have the rest.
  static constexpr bool kMovesRegisters = Isa::kMovesRegisters && kThreads > 256;
  // Whose registers leave room for another block: in small models the next kernel's, which fetches
  // its first weights meanwhile.
  static constexpr bool kLeavesRoom = Isa::kHasClusters && kM == 1 && kPanel <= 64;
  static constexpr int kBlocks = kLeavesRoom ? 2 : 1;  // of a multiprocessor
  static constexpr int kProducerRegisters = kM == 4       ? (kPanel <= 64 ? 56 : 40)
                                            : kM == 2     ? 88
                                            : kLeavesRoom ? 64
                                                          : 136;
  static constexpr int kEvenRegisters = 65536 / kThreads / kBlocks / 8 * 8;
  static constexpr int kProducerGroups = kThreads / 128 - kGroups;
  static constexpr int kConsumerRegisters =
      (kThreads / 128 * kEvenRegisters - kProducerGroups * kProducerRegisters) / kGroups;
  static constexpr int kAddAtOnce = kM == 4 ? 4 : 8;  // slices of h, as registers allow
  // Bytes that the other split sends: half of the panel's sums.
  static constexpr int kExchangeBytes =
      Isa::kHasClusters && kPanel <= 128 ? kM * 64 * kPanel / 2 * 4 : 0;
  // Of sums that a warp turns at once at the end: fewer where shared memory is small.
  static constexpr int kTurnColumns = Isa::kHasClusters ? 32 : 16;
};

template <typename Isa, int kM, int kPanel, bool kAdapted>
class ProjectBlock {
 public:
  using Config = ProjectConfig<Isa, kM, kPanel, kAdapted>;
  using Finish = LinearFinish<kPanel, Config::kConsumerWarps, Config::kTurnColumns, kAdapted>;

  struct Shared {
    LinearTables tables;
    LinearRingBarriers<Config::kMaxStages> ring;
    uint64_t tables_filled;
    uint64_t staged;    // bias and magnitudes of a panel are in shared memory
    uint64_t finished;  // and are no longer needed
    uint64_t acquired;  // the maps of B
    uint64_t share;     // this block's share of the shrink is in device memory
    uint64_t met;       // the other split's sums have arrived
    typename Finish::Shared finish;
  };

  __device__ ProjectBlock(const LinearArgs& args, Shared& shared, uint32_t dynamic)
      : args_(args),
        shared_(shared),
        tables_(shared.tables),
        rows_(RowsOfBlock<Isa>(args)),
        finish_(args, rows_, shared.tables, shared.finish),
        x_bytes_(args.x_rows * 2 * kLinearStageK),
        ring_(shared.ring, dynamic, args.stages, Config::kWeightBytes,
              Config::kWeightBytes + Config::kStageChunks * x_bytes_),
        exchange_(dynamic + args.stages * (Config::kWeightBytes + Config::kStageChunks * x_bytes_)),
        split_(blockIdx.x & (args.plan.splits - 1)),
        sibling_((blockIdx.x >> args.plan.log_splits) & ((1 << LogSiblings()) - 1)),
        lane_(threadIdx.x % 32) {}

  // One warp.
  __device__ static void InitBarriers(const LinearArgs& args, Shared& shared) {
    shared.ring.Init(args.stages, Config::kWeightWarps, Config::kXWarps,
                     Config::kConsumerWarps << LogSiblings(args));
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

 protected:
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

  // This block's stages of W.
  __device__ int FirstChunk() const { return PieceFirst<Isa>(args_.plan, split_); }
  __device__ int EndChunk() const { return PieceFirst<Isa>(args_.plan, split_ + 1); }

  // f(first chunk, end, is lead) of W over a panel of this block: for its first panel, the chunks
  // before the shrink, possibly none, then the rest. A block without a panel has no chunks. The
  // division does not depend on the tables, so that a batch's first stages need not wait for them.
  template <typename F>
  __device__ void ForEachPiece(bool first, F f) const {
    const int begin = FirstChunk();
    const int end = HasPanel() ? EndChunk() : begin;
    const bool has_lead = first && kAdapted;
    const int middle = has_lead ? min(begin + LeadStages() * Config::kStageChunks, end) : begin;
#pragma unroll 1
    for (int piece = has_lead ? 0 : 1; piece < 2; ++piece) {
      f(piece == 0 ? begin : middle, piece == 0 ? middle : end, piece == 0);
    }
  }

  // log2 of the blocks that share x. Constant for small batches, whose blocks share none.
  __device__ static int LogSiblings(const LinearArgs& args) {
    return Isa::kHasClusters && kM > 1 ? args.log_siblings : 0;
  }
  __device__ int LogSiblings() const { return LogSiblings(args_); }

  __device__ int Cluster() const {
    return static_cast<int>(blockIdx.x) >> args_.plan.log_splits >> LogSiblings();
  }
  // An adapted launch may have more blocks than panels, for the shrink.
  __device__ bool HasPanel() const {
    return !kAdapted || Cluster() << LogSiblings() < args_.plan.panels;
  }

  // f(panel's cluster as its first row of W, the block's own first row, whether it is the block's
  // first panel), once also for a block without a panel. Blocks of a cluster have the same number
  // of panels and the same stages.
  template <typename F>
  __device__ void ForEachPanel(F f) const {
    if constexpr (!Isa::kHasClusters) {
      int panel = Cluster();
#pragma unroll 1
      do {
        f(panel * kPanel, panel * kPanel, panel == Cluster());
        panel += static_cast<int>(gridDim.x) >> args_.plan.log_splits;
      } while (panel < args_.plan.panels);
      return;
    }
    const int clusters = static_cast<int>(gridDim.x) >> args_.plan.log_splits >> LogSiblings();
    const int group_rows = kPanel << LogSiblings();
    bool first = true;
#pragma unroll 1
    for (int group = Cluster(); first || group << LogSiblings() < args_.plan.panels;
         group += clusters) {
      f(group * group_rows, group * group_rows + sibling_ * kPanel, first);
      first = false;
    }
  }

  // The stages over the rank, the same for a cluster's blocks.
  template <typename F>
  __device__ void ForEachRank(int group, F f) const {
    ForEachRankRange<Isa>(args_, tables_, group, group + (kPanel << LogSiblings()), split_, f);
  }

  // Whether a panel has rows of the part.
  __device__ bool HasPart(int row, int part) const {
    return row < args_.part_begin[part + 1] && row + kPanel > args_.part_begin[part];
  }

  const LinearArgs& args_;
  Shared& shared_;
  const LinearTables& tables_;
  const BlockRows rows_;
  const Finish finish_;
  const int x_bytes_;  // of a chunk
  LinearRing ring_;
  const uint32_t exchange_;
  const int split_;
  const int sibling_;
  const int lane_;
};

}  // namespace dorad::kernels
