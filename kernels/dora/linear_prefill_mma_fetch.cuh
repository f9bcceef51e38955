// How a block of the mma form of DoraLinearPrefill walks its work, and fetches it ahead of the
// products. Part of linear_prefill_mma.cuh.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/dora/linear_prefill_problem.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/memory.cuh"
#include "kernels/isa/mma/isa.cuh"

namespace dorad::kernels {

inline constexpr int kPrefillMmaThreads = 256;
inline constexpr int kPrefillMmaWarps = kPrefillMmaThreads / 32;
inline constexpr int kPrefillMmaShrinkRows = 128;  // of A in a panel
inline constexpr int kPrefillMmaMostStages = 6;
inline constexpr int kPrefillMmaRowBytes = 2 * kLinearStageK;
// Of a stage: the batch, then weights.
inline constexpr int kPrefillMmaBatchBytes = kPrefillTileRows * kPrefillMmaRowBytes;

struct PrefillMmaArgs : PrefillProblem {
  int32_t stages;  // of the ring
};

// The position of the next products in the ring of stages.
struct PrefillMmaRing {
  uint32_t data;   // of the first stage
  uint32_t full;   // barriers of the stages: all warps have fetched their part
  uint32_t empty;  // all warps have read it
  int stages;
  int stage_bytes;
  int stage = 0;
  uint32_t parity = 0;

  __device__ uint32_t Stage() const { return data + stage * stage_bytes; }
  __device__ void WaitFull() const { BarrierWait(full + 8 * stage, parity); }
  // The stage before this one is the next to be filled.
  __device__ int Before() const { return (stage == 0 ? stages : stage) - 1; }
  __device__ void WaitBefore() const {
    BarrierWait(empty + 8 * Before(), stage == 0 ? parity ^ 1 : parity);
  }
  // Whole warp.
  __device__ void Release() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) BarrierArrive(empty + 8 * stage);
  }
  __device__ void Advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
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

// The last segment whose `first` is not more than the value; that of segment 0 is not.
template <typename F>
__device__ inline int LastSegment(const PrefillProblem& args, int value, F first) {
  int low = 0;
  int high = args.p.num_segments;
#pragma unroll 1
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first(middle) <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ inline int SegmentOf(const PrefillProblem& args, int row) {
  return LastSegment(args, row,
                     [&](int segment) { return __ldg(&args.p.segments[segment].begin); });
}

// A panel of the shrink: rows of A for some rows of a segment, over all of K.
struct PrefillMmaPanel {
  int row;  // of the batch
  int end;  // of the segment's rows
  int segment;
  int part;
  int column;  // the first one of h
};

// The panels of a block.
class PrefillMmaShrink {
 public:
  // most_rank: of the batch. next: the first of the block's that may come next, of all panels.
  __device__ PrefillMmaShrink(const PrefillProblem& args, int most_rank, int next)
      : args_(args),
        slots_(ShrinkSlots(args)),
        panels_(CeilDiv(most_rank, kPrefillMmaShrinkRows) * args.p.shape.parts * slots_),
        next_(next) {}

  __device__ int next() const { return next_; }

  // The block's next one, if there is one.
  __device__ bool Next(PrefillMmaPanel& panel) {
#pragma unroll 1
    while (next_ < panels_) {
      const int slot = next_ % slots_;
      const int of = next_ / slots_;  // the first columns of all come first
      next_ += static_cast<int>(gridDim.x);
      panel.part = of % args_.p.shape.parts;
      panel.column = of / args_.p.shape.parts * kPrefillMmaShrinkRows;
      panel.segment =
          LastSegment(args_, slot, [&](int segment) { return FirstSlot(args_, segment); });
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
  __device__ int FirstTile() const { return next_ - panels_; }

 private:
  const PrefillProblem& args_;
  const int slots_;
  const int panels_;
  int next_;
};

// What a tile's sums go over: W, then the ranks of each of its segments and parts.
struct PrefillMmaPiece {
  int segment = -1;  // W
  int part = 0;
  int stages;
};

// The piece after `piece` of the tile with these first rows of the batch and of W, if there is one.
template <int kN>
__device__ inline bool NextPiece(const PrefillProblem& args, int row, int w_row,
                                 PrefillMmaPiece& piece) {
  if (args.p.max_rank == 0) return false;
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
    piece = {segment, part, CeilDiv(rank, kLinearStageK)};
    return true;
  }
}

// Rows of [0, count), of which a warp's stages have some from `first` on; others are zero.
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
  int32_t end;      // elements of K in all stages; 0: no more
  // Of the shrink: the next panel. Of the tiles: this one, and its piece.
  int32_t next;
  int32_t row;
  int32_t w_row;
  bool h_ready;
  PrefillMmaPiece piece;
};

// Fetches stages: a warp has four rows of each 32, eight lanes a row, whose pieces of 16 bytes lie
// in the swizzle. Whole warps.
class PrefillMmaFetcher {
 public:
  __device__ PrefillMmaFetcher(const PrefillMmaArgs& args, PrefillMmaFetch& fetch)
      : args_(args), fetch_(fetch) {}

  __device__ bool HasMore() const { return fetch_.end > 0; }

 protected:
  // f sets what is fetched next.
  template <typename F>
  __device__ void Set(F f) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) f();
    __syncwarp();
    k_ = 0;
  }

  // The next stage, which there is, into a free one. Whether what is set ends with it.
  template <int kWeightRows>
  __device__ bool Fetch(const PrefillMmaRing& ring, int stage) {
    const int row = static_cast<int>(threadIdx.x / 8);
    const uint32_t to = ring.data + stage * ring.stage_bytes + row * kPrefillMmaRowBytes +
                        ((threadIdx.x ^ row) % 8 << 4);
    Copy<kPrefillTileRows>(to, fetch_.batch, row);
    Copy<kWeightRows>(to + kPrefillMmaBatchBytes, fetch_.weights, row);
    MmaIsa<4>::Complete(ring.full + 8 * stage);
    k_ += kLinearStageK;
    return k_ == fetch_.end;
  }

  const PrefillMmaArgs& args_;
  PrefillMmaFetch& fetch_;

 private:
  // This thread's: every 32nd row from `row` on.
  template <int kRows>
  __device__ void Copy(uint32_t to, const PrefillMmaRows& rows, int row) const {
    constexpr int kStep = kPrefillMmaThreads / 8;
    const int k = k_ + static_cast<int>(threadIdx.x % 8) * 8;
    const uint32_t count = k < fetch_.columns ? rows.count : 0;
    const __nv_bfloat16* from = rows.from + static_cast<int64_t>(row) * rows.ld + k;
    const int64_t step = int64_t{kStep} * rows.ld;
    row += rows.first;
#pragma unroll
    for (int r = 0; r < kRows; r += kStep) {
      const bool valid = static_cast<uint32_t>(row + r) < count;
      CopyAsync16(to + r * kPrefillMmaRowBytes, valid ? from : args_.p.w, valid);
      from += step;
    }
  }

  int k_ = 0;  // elements of K that are fetched
};

// (x, A), panel after panel.
class PrefillMmaShrinkFetcher : public PrefillMmaFetcher {
 public:
  __device__ PrefillMmaShrinkFetcher(const PrefillMmaArgs& args, PrefillMmaFetch& fetch,
                                     int most_rank)
      : PrefillMmaFetcher(args, fetch), most_rank_(most_rank) {
    Set([&] {
      fetch_.next = static_cast<int>(blockIdx.x);
      Begin();
    });
  }

  // The next stage, of which there are more, into a free one.
  __device__ void Next(const PrefillMmaRing& ring, int stage) {
    if (Fetch<kPrefillMmaShrinkRows>(ring, stage)) Set([&] { Begin(); });
  }

 private:
  __device__ void Begin() {
    PrefillMmaPanel panel;
    PrefillMmaShrink shrink(args_, most_rank_, fetch_.next);
    const bool has_panel = shrink.Next(panel);
    fetch_.next = shrink.next();
    fetch_.end = 0;
    if (!has_panel) return;
    const int slot = __ldg(&args_.p.segments[panel.segment].slot);
    const DoraFactors* f = FactorsOf(args_, slot, panel.part);
    const int in = args_.p.shape.in;
    fetch_.batch = {args_.p.x + static_cast<int64_t>(panel.row) * in, in, 0, panel.end - panel.row};
    fetch_.weights = {f->a + static_cast<int64_t>(panel.column) * in, in, panel.column, f->rank};
    fetch_.columns = in;
    fetch_.end = args_.plan.chunks * kLinearStageK;
  }

  const int most_rank_;
};

// (x, W), then (h, B) of a tile's segments, tile after tile.
template <int kN>
class PrefillMmaTileFetcher : public PrefillMmaFetcher {
 public:
  __device__ PrefillMmaTileFetcher(const PrefillMmaArgs& args, PrefillMmaFetch& fetch, int tile)
      : PrefillMmaFetcher(args, fetch) {
    Set([&] {
      fetch_.h_ready = false;
      fetch_.next = tile;
      BeginTile();
    });
  }

  // As PrefillMmaShrinkFetcher's.
  __device__ void Next(const PrefillMmaRing& ring, int stage) {
    if (Fetch<kN>(ring, stage)) Set([&] { Begin(); });
  }

 private:
  __device__ void BeginTile() {
    fetch_.end = 0;
    if (fetch_.next >= args_.tile_bands * args_.tile_panels) return;
    const PrefillTile tile = TileAt(args_, fetch_.next);
    const int row = fetch_.row = tile.band * kPrefillTileRows;
    const int w_row = fetch_.w_row = tile.panel * kN;
    fetch_.piece.segment = -1;
    const int in = args_.p.shape.in;
    fetch_.batch = {args_.p.x + static_cast<int64_t>(row) * in, in, row, args_.p.rows};
    fetch_.weights = {args_.p.w + static_cast<int64_t>(w_row) * in, in, w_row,
                      args_.part_begin[args_.p.shape.parts]};
    fetch_.columns = in;
    fetch_.end = args_.plan.chunks * kLinearStageK;
  }

  __device__ void Begin() {
    const int row = fetch_.row;
    PrefillMmaPiece piece = fetch_.piece;
    if (!NextPiece<kN>(args_, row, fetch_.w_row, piece)) {
      fetch_.next += static_cast<int>(gridDim.x);
      BeginTile();
      return;
    }
    fetch_.piece = piece;
    if (!fetch_.h_ready) SpinUntil(&args_.counters->shrunk, gridDim.x);
    fetch_.h_ready = true;
    const RowSegment& segment = args_.p.segments[piece.segment];
    const int begin = __ldg(&segment.begin);
    const DoraFactors* f = FactorsOf(args_, __ldg(&segment.slot), piece.part);
    const int64_t line = int64_t{1} * args_.p.shape.parts * args_.ldh;
    const int w_row = fetch_.w_row - args_.part_begin[piece.part];
    fetch_.batch = {args_.h + row * line + piece.part * args_.ldh, static_cast<int32_t>(line),
                    row - begin, __ldg(&segment.end) - begin};
    fetch_.weights = {f->b + static_cast<int64_t>(w_row) * f->ldb, f->ldb, w_row,
                      args_.p.shape.out[piece.part]};
    fetch_.columns = RoundUp(f->rank, 8);
    fetch_.end = piece.stages * kLinearStageK;
  }
};

}  // namespace dorad::kernels
