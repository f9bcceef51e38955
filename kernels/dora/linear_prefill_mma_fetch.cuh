// How a block of the mma form of DoraLinearPrefill walks its work, and fetches it ahead of the
// products. Part of linear_prefill_mma.cuh.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/common/search.cuh"
#include "kernels/dora/linear_prefill_problem.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/memory.cuh"
#include "kernels/isa/mma/isa.cuh"
#include "kernels/pipeline/ring.cuh"

namespace dorad::kernels {

inline constexpr int kPrefillMmaThreads = 256;
inline constexpr int kPrefillMmaWarps = kPrefillMmaThreads / 32;
inline constexpr int kPrefillMmaShrinkRows = 128;  // of A in a panel
inline constexpr int kPrefillMmaMostStages = 6;
inline constexpr int kPrefillMmaRowBytes = 2 * kLinearStageK;
// Of a stage: the batch, then weights.
inline constexpr int kPrefillMmaBatchBytes = kPrefillTileRows * kPrefillMmaRowBytes;

// Of the shrink in slices of K: the most panels, and bytes of a panel's sums over a slice.
inline constexpr int kPrefillMmaSlicedPanels = 48;
inline constexpr int kPrefillMmaShareBytes = kPrefillTileRows * kPrefillMmaShrinkRows * 4;

struct PrefillMmaArgs : PrefillProblem {
  int32_t stages;    // of the ring
  float* shares;     // kPrefillMmaShareBytes for each panel and slice; nullptr: no slices
  uint32_t* summed;  // for each panel: slices whose sums are there; zero between launches
  float4* kept;      // kPrefillMmaThreads fours of a block's sums, as threads have them
};

__device__ inline int RankOf(const PrefillProblem& args, int segment, int part) {
  const int slot = __ldg(&args.p.segments[segment].slot);
  return slot < 0 ? 0 : __ldg(&FactorsOf(args, slot, part)->rank);
}

// Rows of a panel of the shrink: of a segment, from its begin on in steps of a tile. Tiles are
// numbered over all segments without a table: a segment's first one is its first row's tile, and
// one more for each segment before it. Some numbers stand for no rows.
__device__ inline int FirstSlot(const PrefillProblem& args, int segment) {
  return __ldg(&args.p.segments[segment].begin) / kPrefillTileRows + segment;
}
__device__ inline int ShrinkSlots(const PrefillProblem& args) {
  return args.p.rows / kPrefillTileRows + args.p.num_segments;
}

__device__ inline int SegmentOf(const PrefillProblem& args, int row) {
  return LastNotAfter(args.p.num_segments, row,
                      [&](int segment) { return __ldg(&args.p.segments[segment].begin); });
}

// A panel of the shrink: rows of A for some rows of a segment, over all of K or a slice of it.
struct PrefillMmaPanel {
  int row;  // of the batch
  int end;  // of the segment's rows
  int segment;
  int part;
  int column;  // the first one of h
  int number;  // of the panel
  int slice;
  int chunk;  // of K, the first one
  int chunk_end;
};

// The panels of a block, or slices of them where there are few.
class PrefillMmaShrink {
 public:
  // most_rank: of the batch. next: the first of the block's that may come next, of all.
  __device__ PrefillMmaShrink(const PrefillMmaArgs& args, int most_rank, int next)
      : args_(args),
        slots_(ShrinkSlots(args)),
        panels_(CeilDiv(most_rank, kPrefillMmaShrinkRows) * args.p.shape.parts * slots_),
        slices_(args.shares == nullptr || panels_ > kPrefillMmaSlicedPanels
                    ? 1
                    : CeilDiv(args.plan.chunks, args.plan.a_chunks)),
        next_(next) {}

  __device__ int next() const { return next_; }
  __device__ int slices() const { return slices_; }

  // The block's next one, if there is one.
  __device__ bool Next(PrefillMmaPanel& panel) {
#pragma unroll 1
    while (next_ < panels_ * slices_) {
      panel.slice = next_ % slices_;
      panel.number = next_ / slices_;
      const int slot = panel.number % slots_;
      const int of = panel.number / slots_;  // the first columns of all come first
      next_ += static_cast<int>(gridDim.x);
      panel.chunk = panel.slice * args_.plan.a_chunks;
      panel.chunk_end = slices_ == 1 ? args_.plan.chunks
                                     : min(panel.chunk + args_.plan.a_chunks, args_.plan.chunks);
      panel.part = of % args_.p.shape.parts;
      panel.column = of / args_.p.shape.parts * kPrefillMmaShrinkRows;
      panel.segment = LastNotAfter(args_.p.num_segments, slot,
                                   [&](int segment) { return FirstSlot(args_, segment); });
      const RowSegment& segment = args_.p.segments[panel.segment];
      panel.row =
          __ldg(&segment.begin) + (slot - FirstSlot(args_, panel.segment)) * kPrefillTileRows;
      panel.end = __ldg(&segment.end);
      if (panel.row < panel.end && panel.column < RankOf(args_, panel.segment, panel.part)) {
        return true;
      }
    }
    return false;
  }

  // The block's first tile of y, after the last panel: tiles are dealt on where the panels end.
  __device__ int FirstTile() const { return next_ - panels_ * slices_; }

 private:
  const PrefillMmaArgs& args_;
  const int slots_;
  const int panels_;
  const int slices_;
  int next_;
};

// What a tile's sums go over: W, in the plan's splits; after the last one the ranks of each of its
// segments and parts.
struct PrefillMmaPiece {
  int segment = -1;  // W
  int part = 0;
  int split = 0;
  int first;  // stage
  int stages;
};

// W of a split.
__device__ inline PrefillMmaPiece PieceOfW(const PrefillProblem& args, int split) {
  PrefillMmaPiece piece;
  piece.split = split;
  piece.first = FirstMmaChunk(args.plan.chunks, split, args.plan.splits);
  piece.stages = FirstMmaChunk(args.plan.chunks, split + 1, args.plan.splits) - piece.first;
  return piece;
}

// The rank after `piece`, of the tile with these first rows of the batch and of W, if there is one.
template <int kN>
__device__ inline bool NextRank(const PrefillProblem& args, int row, int w_row,
                                PrefillMmaPiece& piece) {
  const int first_part = PartOf(args, w_row);
  int segment = piece.segment;
  int part = piece.part + 1;
  if (segment < 0) {
    segment = SegmentOf(args, row);
    part = first_part;
  }
#pragma unroll 1
  for (;; ++part) {
    if (part == args.p.shape.parts || args.part_begin[part] >= w_row + kN) {
      part = first_part;
      ++segment;
      if (segment == args.p.num_segments ||
          __ldg(&args.p.segments[segment].begin) >= row + kPrefillTileRows) {
        return false;
      }
    }
    const int rank = RankOf(args, segment, part);
    if (rank == 0) continue;
    piece = {segment, part, piece.split, 0, CeilDiv(rank, kLinearStageK)};
    return true;
  }
}

// What comes after `piece`, W or a rank.
template <int kN>
__device__ inline bool NextPiece(const PrefillProblem& args, int row, int w_row,
                                 PrefillMmaPiece& piece) {
  if (piece.split + 1 == args.plan.splits) {
    return args.p.max_rank > 0 && NextRank<kN>(args, row, w_row, piece);
  }
  piece = PieceOfW(args, piece.split + 1);
  return true;
}

// Rows of [0, count), of which stages have some from `first` on; others are zero.
struct PrefillMmaRows {
  const __nv_bfloat16* from;  // row `first`
  int32_t ld;
  int32_t first;
  int32_t count;
};

// What a warp fetches, in shared memory: products need the registers. Its first lane writes it.
struct PrefillMmaFetch {
  PrefillMmaRows batch;
  PrefillMmaRows weights;
  int32_t columns;  // of both: a multiple of 8
  int32_t stages;   // of both; 0: no more
  // Of the shrink: the next panel. Of the tiles: this one, and its piece.
  int32_t next;
  int32_t row;
  int32_t w_row;
  bool h_ready;
  PrefillMmaPiece piece;
};

// Fetches stages: a warp has four rows of each 32, eight lanes a row, whose pieces of 16 bytes lie
// in the swizzle. Whole warps. A stage is Begin, all copies, End.
class PrefillMmaFetcher {
 public:
  __device__ PrefillMmaFetcher(const PrefillMmaArgs& args, PrefillMmaFetch& fetch, Ring& ring)
      : args_(args), fetch_(fetch), ring_(ring) {}

  __device__ bool HasMore() const { return stages_ > 0; }

  // There are more; waits until the next stage is free.
  __device__ void Begin() const { ring_.WaitEmpty(); }

 protected:
  static constexpr int kRowStep = kPrefillMmaThreads / 8;
  static constexpr int kBatchCopies = kPrefillTileRows / kRowStep;

  // One of this thread's copies of a stage.
  __device__ void Copy(int i) const {
    const bool is_batch = i < kBatchCopies;
    const __nv_bfloat16* from =
        is_batch ? batch_ + static_cast<int64_t>(i) * batch_step_
                 : weights_ + static_cast<int64_t>(i - kBatchCopies) * weights_step_;
    const uint32_t to = ring_.Stage() + offset_ + i * kRowStep * kPrefillMmaRowBytes;
    CopyAsync16(to, from, (valid_ >> i & 1) != 0);
  }

  // Whether what is set ends with this stage.
  __device__ bool End() {
    MmaIsa<4>::Complete(ring_.Full());
    ring_.Advance();
    batch_ += kLinearStageK;
    weights_ += kLinearStageK;
    columns_ -= kLinearStageK;
    if (columns_ <= 0) valid_ = 0;
    return --stages_ == 0;
  }

  // f sets what is fetched next, from stages with that many weights.
  template <int kWeightRows, typename F>
  __device__ void Set(F f) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) f();
    __syncwarp();
    stages_ = fetch_.stages;
    if (stages_ == 0) return;
    const int row = static_cast<int>(threadIdx.x / 8);
    const int k = static_cast<int>(threadIdx.x % 8) * 8;
    columns_ = fetch_.columns - k;
    valid_ = 0;
    if (columns_ > 0) {
      valid_ = Valid<kPrefillTileRows>(fetch_.batch, row) | Valid<kWeightRows>(fetch_.weights, row)
                                                                << kBatchCopies;
    }
    batch_ = fetch_.batch.from + static_cast<int64_t>(row) * fetch_.batch.ld + k;
    weights_ = fetch_.weights.from + static_cast<int64_t>(row) * fetch_.weights.ld + k;
    batch_step_ = kRowStep * fetch_.batch.ld;
    weights_step_ = kRowStep * fetch_.weights.ld;
  }

  const PrefillMmaArgs& args_;
  PrefillMmaFetch& fetch_;

 private:
  // A bit for each of this thread's rows, of which `row` is the first.
  template <int kRows>
  __device__ static uint32_t Valid(const PrefillMmaRows& rows, int row) {
    uint32_t valid = 0;
#pragma unroll
    for (int i = 0; i < kRows / kRowStep; ++i) {
      const auto at = static_cast<uint32_t>(rows.first + row + i * kRowStep);
      if (at < static_cast<uint32_t>(rows.count)) valid |= 1u << i;
    }
    return valid;
  }

  Ring& ring_;
  const uint32_t offset_ =
      threadIdx.x / 8 * kPrefillMmaRowBytes + ((threadIdx.x ^ threadIdx.x / 8) % 8 << 4);
  // Of the next stage.
  int stages_ = 0;                          // with it, that are left of what is set
  int columns_ = 0;                         // from this thread's on
  uint32_t valid_ = 0;                      // its copies that are not of zeros
  const __nv_bfloat16* batch_ = nullptr;    // its first one
  const __nv_bfloat16* weights_ = nullptr;  // the same
  int batch_step_ = 0;                      // elements between two
  int weights_step_ = 0;
};

// (x, A), panel after panel.
class PrefillMmaShrinkFetcher : public PrefillMmaFetcher {
 public:
  static constexpr int kCopies = kBatchCopies + kPrefillMmaShrinkRows / kRowStep;

  __device__ PrefillMmaShrinkFetcher(const PrefillMmaArgs& args, PrefillMmaFetch& fetch, Ring& ring,
                                     int most_rank)
      : PrefillMmaFetcher(args, fetch, ring), most_rank_(most_rank) {
    Set<kPrefillMmaShrinkRows>([&] {
      fetch_.next = static_cast<int>(blockIdx.x);
      BeginPanel();
    });
  }

  using PrefillMmaFetcher::Copy;
  __device__ void End() {
    if (PrefillMmaFetcher::End()) Set<kPrefillMmaShrinkRows>([&] { BeginPanel(); });
  }

 private:
  __device__ void BeginPanel() {
    PrefillMmaPanel panel;
    PrefillMmaShrink shrink(args_, most_rank_, fetch_.next);
    const bool has_panel = shrink.Next(panel);
    fetch_.next = shrink.next();
    fetch_.stages = 0;
    if (!has_panel) return;
    const int slot = __ldg(&args_.p.segments[panel.segment].slot);
    const DoraFactors* f = FactorsOf(args_, slot, panel.part);
    const int in = args_.p.shape.in;
    const int k = panel.chunk * kLinearStageK;
    fetch_.batch = {args_.p.x + static_cast<int64_t>(panel.row) * in + k, in, 0,
                    panel.end - panel.row};
    fetch_.weights = {f->a + static_cast<int64_t>(panel.column) * in + k, in, panel.column,
                      f->rank};
    fetch_.columns = in - k;
    fetch_.stages = panel.chunk_end - panel.chunk;
  }

  const int most_rank_;
};

// (x, W), then (h, B) of a tile's segments, tile after tile.
template <int kN>
class PrefillMmaTileFetcher : public PrefillMmaFetcher {
 public:
  static constexpr int kCopies = kBatchCopies + kN / kRowStep;

  __device__ PrefillMmaTileFetcher(const PrefillMmaArgs& args, PrefillMmaFetch& fetch, Ring& ring,
                                   int tile)
      : PrefillMmaFetcher(args, fetch, ring) {
    Set<kN>([&] {
      fetch_.h_ready = false;
      fetch_.next = tile;
      BeginTile();
    });
  }

  using PrefillMmaFetcher::Copy;
  __device__ void End() {
    if (PrefillMmaFetcher::End()) Set<kN>([&] { BeginPiece(); });
  }

 private:
  __device__ void BeginTile() {
    fetch_.stages = 0;
    if (fetch_.next >= args_.tile_bands * args_.tile_panels) return;
    const PrefillTile tile = TileAt(args_, fetch_.next);
    fetch_.row = tile.band * kPrefillTileRows;
    fetch_.w_row = tile.panel * kN;
    fetch_.piece = PieceOfW(args_, 0);
    BeginW();
  }

  __device__ void BeginW() {
    const int row = fetch_.row;
    const int w_row = fetch_.w_row;
    const int in = args_.p.shape.in;
    const int k = fetch_.piece.first * kLinearStageK;
    fetch_.batch = {args_.p.x + static_cast<int64_t>(row) * in + k, in, row, args_.p.rows};
    fetch_.weights = {args_.p.w + static_cast<int64_t>(w_row) * in + k, in, w_row,
                      args_.part_begin[args_.p.shape.parts]};
    fetch_.columns = in - k;
    fetch_.stages = fetch_.piece.stages;
  }

  __device__ void BeginPiece() {
    PrefillMmaPiece piece = fetch_.piece;
    if (!NextPiece<kN>(args_, fetch_.row, fetch_.w_row, piece)) {
      fetch_.next += static_cast<int>(gridDim.x);
      BeginTile();
      return;
    }
    fetch_.piece = piece;
    if (piece.segment < 0) {
      BeginW();
    } else {
      BeginRank();
    }
  }

  __device__ void BeginRank() {
    const PrefillMmaPiece& piece = fetch_.piece;
    const int row = fetch_.row;
    if (!fetch_.h_ready) SpinUntil(&args_.counters->shrunk, gridDim.x);
    fetch_.h_ready = true;
    const RowSegment& segment = args_.p.segments[piece.segment];
    const int begin = __ldg(&segment.begin);
    const DoraFactors* f = FactorsOf(args_, __ldg(&segment.slot), piece.part);
    const int64_t line = int64_t{1} * args_.p.shape.parts * args_.ldh;
    const int w_row = fetch_.w_row - args_.part_begin[piece.part];
    const int k = piece.first * kLinearStageK;
    fetch_.batch = {args_.h + row * line + piece.part * args_.ldh + k, static_cast<int32_t>(line),
                    row - begin, __ldg(&segment.end) - begin};
    fetch_.weights = {f->b + static_cast<int64_t>(w_row) * f->ldb + k, f->ldb, w_row,
                      args_.p.shape.out[piece.part]};
    fetch_.columns = RoundUp(f->rank, 8) - k;
    fetch_.stages = piece.stages;
  }
};

}  // namespace dorad::kernels
