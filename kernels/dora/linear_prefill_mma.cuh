// The kernel behind DoraLinearPrefill for every GPU: see linear_prefill.h for what it computes.
//
// A block takes a tile of y after the other, 128 rows of the batch by kN rows of W, a quarter of
// these for each warp and half of the rows. (x, W) pairs of 64 elements of K go through a ring of
// shared memory into mma.sync, then (h masked to a segment's rows, B of its slot), into the
// accumulators of the last piece of K. All warps fetch and multiply: a barrier of each stage tells
// when it is there, and another one when all have read it, so that no warp waits for the slowest
// one at once.
//
// First all blocks shrink: panels of rows of A over all of K, summed in pieces as DoraLinear's,
// into h. Few panels are divided into these pieces: the block that ends its piece last adds them
// up. A tile needs h after its part of W. By then h has long been there.
#pragma once

#include <cstdint>

#include "kernels/dora/linear_prefill_mma_fetch.cuh"
#include "kernels/dora/linear_prefill_problem.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/memory.cuh"
#include "kernels/isa/mma/mma.cuh"
#include "kernels/isa/shared.cuh"
#include "kernels/pipeline/ring.cuh"

namespace dorad::kernels {

// kN: rows of W in a panel.
template <int kN>
class PrefillMmaBlock {
 public:
  static constexpr int kStageBytes = kPrefillMmaBatchBytes + kN * kPrefillMmaRowBytes;
  static_assert(kN >= kPrefillMmaShrinkRows);

  struct Shared {
    uint64_t full[kPrefillMmaMostStages];
    uint64_t empty[kPrefillMmaMostStages];
    PrefillMmaFetch fetch[kPrefillMmaWarps];
    int32_t most_rank[kPrefillMmaWarps];
    bool is_last;  // of the blocks with slices of a panel
  };

  // dynamic: shared memory, args.stages stages, 128-byte aligned.
  __device__ PrefillMmaBlock(const PrefillMmaArgs& args, Shared& shared, uint32_t dynamic)
      : args_(args),
        shared_(shared),
        ring_{dynamic, SharedAddress(shared.full), SharedAddress(shared.empty), args.stages,
              kStageBytes},
        fill_(ring_) {}

  // All threads.
  __device__ void Run() {
    if (threadIdx.x == 0) InitBarriers();
    FindRanks();
    __syncthreads();
    WaitForPrevious();
    PrefillMmaShrink shrink(args_, MostRank(), static_cast<int>(blockIdx.x));
    if (MostRank() > 0) {
      Shrink(shrink);
      __syncthreads();
      if (threadIdx.x == 0) SignalRelease(&args_.counters->shrunk);
    }
    MultiplyTiles(shrink.FirstTile());
    __syncthreads();
    if (threadIdx.x != 0 || MostRank() == 0) return;
    // The last block to come here leaves the counters as it found them.
    SpinUntil(&args_.counters->shrunk, gridDim.x);
    if (atomicAdd(&args_.counters->left, 1) == gridDim.x - 1) {
      *args_.counters = PrefillCounters();
    }
  }

 private:
  // Of 64 rows and kColumns rows of weights, as a warp's lanes have them: blocks of 16 rows and 8
  // columns.
  template <int kColumns>
  using Sums = float[4][kColumns / 8][4];

  // What a step of 16 elements of K multiplies, in blocks of 16.
  using Rows = uint32_t[4][4];
  template <int kColumns>
  using Columns = uint32_t[kColumns / 16][4];
  static constexpr int kNone = -1;

  __device__ static int Lane() { return static_cast<int>(threadIdx.x % 32); }
  // A warp's part of a tile: pairs of warps have the same columns. The first four warps, each on a
  // part of the multiprocessor of its own, have all rows of the first columns.
  __device__ static int FirstRow() { return static_cast<int>(threadIdx.x / 32 % 2) * 64; }
  template <int kColumns>
  __device__ static int FirstColumn() {
    return static_cast<int>(threadIdx.x / 64) * kColumns;
  }

  __device__ void InitBarriers() {
#pragma unroll 1
    for (int stage = 0; stage < args_.stages; ++stage) {
      BarrierInit(SharedAddress(&shared_.full[stage]), kPrefillMmaWarps);
      BarrierInit(SharedAddress(&shared_.empty[stage]), kPrefillMmaWarps);
    }
    BarrierInitFence();
  }

  // For MostRank, after a barrier.
  __device__ void FindRanks() {
    int rank = 0;
    if (args_.p.max_rank > 0) {
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x); i < args_.p.num_segments;
           i += kPrefillMmaThreads) {
#pragma unroll 1
        for (int part = 0; part < args_.p.shape.parts; ++part) {
          rank = max(rank, RankOf(args_, i, part));
        }
      }
    }
    rank = __reduce_max_sync(0xFFFFFFFF, rank);
    if (Lane() == 0) shared_.most_rank[threadIdx.x / 32] = rank;
  }

  // Of the batch's adapters.
  __device__ int MostRank() const {
    int most = 0;
    for (const int32_t rank : shared_.most_rank) most = max(most, rank);
    return most;
  }

  // Before the first of its products. A stage is filled again when all have read it: with many
  // stages one is left free, so that no warp waits for the slowest one at once.
  template <typename Fetcher>
  __device__ void FillRing(Fetcher& fetcher) const {
    const int ahead = ring_.stages - (ring_.stages > 3 ? 2 : 1);
#pragma unroll 1
    for (int i = 0; i < ahead && fetcher.HasMore(); ++i) {
      fetcher.Begin();
#pragma unroll
      for (int copy = 0; copy < Fetcher::kCopies; ++copy) fetcher.Copy(copy);
      fetcher.End();
    }
  }

  // h of the block's panels. On return nothing is on its way.
  __device__ void Shrink(PrefillMmaShrink& shrink) {
    constexpr int kColumns = kPrefillMmaShrinkRows / 4;
    PrefillMmaShrinkFetcher fetcher(args_, shared_.fetch[threadIdx.x / 32], fill_, MostRank());
    FillRing(fetcher);
    PrefillMmaPanel panel;
    while (shrink.Next(panel)) {
      const bool active =
          panel.row + FirstRow() < panel.end &&
          panel.column + FirstColumn<kColumns>() < RankOf(args_, panel.segment, panel.part);
      Sums<kColumns> sum = {};
#pragma unroll 1
      for (int chunk = panel.chunk; chunk < panel.chunk_end; chunk += args_.plan.a_chunks) {
        Sums<kColumns> d = {};
        Multiply<kColumns>(d, min(args_.plan.a_chunks, panel.chunk_end - chunk), active, fetcher);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
#pragma unroll
          for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[m][n][i] += d[m][n][i];
          }
        }
      }
      if (shrink.slices() > 1 && !Meet(sum, panel, shrink.slices(), active)) continue;
      if (active) StoreShrunk(sum, panel);
    }
  }

  // Stores the sums over a slice of K. Whether this block is the last one with a slice of the
  // panel: then they become those over all of K, in the order of slices. All threads.
  __device__ bool Meet(Sums<kPrefillMmaShrinkRows / 4>& sum, const PrefillMmaPanel& panel,
                       int slices, bool active) {
    constexpr int kBlocks = kPrefillMmaShrinkRows / 4 / 8;
    constexpr int kSlice = kPrefillMmaShareBytes / sizeof(float4);
    auto* shares = reinterpret_cast<float4*>(args_.shares) +
                   static_cast<int64_t>(panel.number) * slices * kSlice + threadIdx.x;
    if (active) {
#pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i) {
        const float(&from)[4] = sum[i / kBlocks][i % kBlocks];
        __stcg(shares + panel.slice * kSlice + i * kPrefillMmaThreads,
               make_float4(from[0], from[1], from[2], from[3]));
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t* summed = args_.summed + panel.number;
      shared_.is_last = SignalAcquireRelease(summed) + 1 == static_cast<uint32_t>(slices);
      if (shared_.is_last) *summed = 0;
    }
    __syncthreads();
    if (!shared_.is_last) return false;
    if (!active) return true;
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) {
      float(&to)[4] = sum[i / kBlocks][i % kBlocks];
      to[0] = to[1] = to[2] = to[3] = 0.0f;
    }
#pragma unroll 1
    for (int slice = 0; slice < slices; ++slice) {
#pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i) {
        const float4 from = __ldcg(shares + slice * kSlice + i * kPrefillMmaThreads);
        float(&to)[4] = sum[i / kBlocks][i % kBlocks];
        to[0] += from.x;
        to[1] += from.y;
        to[2] += from.z;
        to[3] += from.w;
      }
    }
    return true;
  }

  __device__ void MultiplyTiles(int first_tile) {
    constexpr int kColumns = kN / 4;
    PrefillMmaTileFetcher<kN> fetcher(args_, shared_.fetch[threadIdx.x / 32], fill_, first_tile);
    FillRing(fetcher);
    const int tiles = args_.tile_bands * args_.tile_panels;
#pragma unroll 1
    for (int tile = first_tile; tile < tiles; tile += static_cast<int>(gridDim.x)) {
      const PrefillTile at = TileAt(args_, tile);
      const int tile_row = at.band * kPrefillTileRows;
      const int w_row = at.panel * kN;
      const int row = tile_row + FirstRow();
      const int column = w_row + FirstColumn<kColumns>();
      const bool is_there = row < args_.p.rows && column < args_.part_begin[args_.p.shape.parts];
      Sums<kColumns> d = {};
      PrefillMmaPiece piece = PieceOfW(args_, 0);
#pragma unroll 1
      for (;;) {
        bool active = is_there;
        if (piece.segment >= 0) {
          const RowSegment& segment = args_.p.segments[piece.segment];
          active = is_there && piece.part == PartOf(args_, column) &&
                   __ldg(&segment.begin) < row + 64 && __ldg(&segment.end) > row;
        }
        Multiply<kColumns>(d, piece.stages, active, fetcher);
        const int split = piece.split;
        if (!NextPiece<kN>(args_, tile_row, w_row, piece)) break;
        if (piece.split != split) Keep<kColumns>(d);
      }
      if (!is_there) continue;
      if (args_.plan.splits > 1) AddKept<kColumns>(d);
      if (args_.p.y_fp32) {
        StoreTile<kColumns, float>(d, row, column);
      } else {
        StoreTile<kColumns, __nv_bfloat16>(d, row, column);
      }
    }
  }

  // A thread's fours of the sums of a split, until the next one's are there: all of a split would
  // take too many registers.
  template <int kColumns>
  static constexpr int kFours = 64 * kColumns / 32 / 4;
  // f(where a four is kept, the four) for all of them.
  template <int kColumns, typename F>
  __device__ void ForEachFour(float (&d)[4][kColumns / 8][4], F f) const {
    // Else the compiler would hold the address all the time.
    int first = static_cast<int>(blockIdx.x) * kFours<kColumns> * kPrefillMmaThreads;
    asm volatile("" : "+r"(first));
    float4* const kept = args_.kept + first + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kFours<kColumns>; ++i) {
      f(kept + i * kPrefillMmaThreads, d[i / (kColumns / 8)][i % (kColumns / 8)]);
    }
  }
  template <int kColumns>
  __device__ void Keep(float (&d)[4][kColumns / 8][4]) const {
    ForEachFour<kColumns>(d, [](float4* kept, float(&sum)[4]) {
      __stcg(kept, make_float4(sum[0], sum[1], sum[2], sum[3]));
      sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
    });
  }
  template <int kColumns>
  __device__ void AddKept(float (&d)[4][kColumns / 8][4]) const {
    ForEachFour<kColumns>(d, [](const float4* kept, float(&sum)[4]) {
      const float4 first = __ldcg(kept);
      sum[0] += first.x;
      sum[1] += first.y;
      sum[2] += first.z;
      sum[3] += first.w;
    });
  }

  // The warp's products of the next `stages`, if it is active, while the fetcher runs ahead. What a
  // step multiplies is loaded while the one before it is multiplied: columns in place of those that
  // are done. Copies come between products, a few at a time.
  template <int kColumns, typename Fetcher>
  __device__ void Multiply(Sums<kColumns>& d, int stages, bool active, Fetcher& fetcher) {
    if (!active) {
#pragma unroll 1
      for (; stages > 0; --stages) {
        if (fetcher.HasMore()) {
          fetcher.Begin();
#pragma unroll
          for (int copy = 0; copy < Fetcher::kCopies; ++copy) fetcher.Copy(copy);
          fetcher.End();
        }
        ring_.WaitFull();
        ring_.Release();
        ring_.Advance();
      }
      return;
    }
    Rows even, odd;
    Columns<kColumns> columns;
    ring_.WaitFull();
    LoadRows(even, 0);
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) LoadColumns<kColumns>(columns, n, 0);
#pragma unroll 1
    for (; stages > 0; --stages) {
      const bool fetches = fetcher.HasMore();
      if (fetches) fetcher.Begin();
      const auto copy = [&](int part, int of) {
#pragma unroll
        for (int i = 0; i < Fetcher::kCopies; ++i) {
          if (fetches && i * of / Fetcher::kCopies == part) fetcher.Copy(i);
        }
      };
      constexpr int kParts = kColumns / 16;
      MultiplyStep<kColumns>(d, even, odd, columns, 1, [&](int n) { copy(n, 3 * kParts); });
      MultiplyStep<kColumns>(d, odd, even, columns, 2,
                             [&](int n) { copy(kParts + n, 3 * kParts); });
      MultiplyStep<kColumns>(d, even, odd, columns, 3,
                             [&](int n) { copy(2 * kParts + n, 3 * kParts); });
      if (fetches) fetcher.End();
      ring_.Release();
      ring_.Advance();
      if (stages > 1) {
        ring_.WaitFull();
        MultiplyStep<kColumns>(d, odd, even, columns, 0, [](int) {});
      } else {
        MultiplyStep<kColumns>(d, odd, even, columns, kNone, [](int) {});
      }
    }
  }

  // D += rows · columns; then the operands are those of `next`, if any. between(n): after the
  // products of 16 columns.
  template <int kColumns, typename F>
  __device__ void MultiplyStep(Sums<kColumns>& d, const Rows& rows, Rows& next_rows,
                               Columns<kColumns>& columns, int next, F between) const {
    if (next != kNone) LoadRows(next_rows, next);
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        Mma(d[m][2 * n], rows[m], columns[n][0], columns[n][1]);
        Mma(d[m][2 * n + 1], rows[m], columns[n][2], columns[n][3]);
      }
      if (next != kNone) LoadColumns<kColumns>(columns, n, next);
      between(n);
    }
  }

  // Of a step of the ring's stage. Stages are 128-byte aligned: the swizzle turns with the step by
  // an exclusive or of the address.
  __device__ void LoadRows(Rows& rows, int step) const {
    const int lane = Lane();
    const uint32_t from = ring_.Stage() + (FirstRow() + lane % 16) * kPrefillMmaRowBytes +
                          ((lane / 16 ^ lane % 8) << 4);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      LoadMatrices(rows[m], (from ^ step * 32) + m * 16 * kPrefillMmaRowBytes);
    }
  }
  template <int kColumns>
  __device__ void LoadColumns(Columns<kColumns>& columns, int n, int step) const {
    const int lane = Lane();
    const uint32_t from =
        ring_.Stage() + kPrefillMmaBatchBytes +
        (FirstColumn<kColumns>() + lane / 16 * 8 + lane % 8) * kPrefillMmaRowBytes +
        ((lane / 8 % 2 ^ lane % 8) << 4);
    LoadMatrices(columns[n], (from ^ step * 32) + n * 16 * kPrefillMmaRowBytes);
  }

  // h = s · sum. Columns beyond the rank are zero.
  __device__ void StoreShrunk(const Sums<kPrefillMmaShrinkRows / 4>& sum,
                              const PrefillMmaPanel& panel) const {
    const DoraFactors* f =
        FactorsOf(args_, __ldg(&args_.p.segments[panel.segment].slot), panel.part);
    const float scale = f->scale;
    const int columns = RoundUp(f->rank, 8);
    const int column = panel.column + FirstColumn<kPrefillMmaShrinkRows / 4>() + Lane() % 4 * 8;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = panel.row + FirstRow() + 16 * m + 8 * j + Lane() / 4;
        uint32_t pairs[4];  // columns 2 (lane % 4).. of 4 blocks of 8
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          pairs[n] = PackPair(scale * sum[m][n][2 * j], scale * sum[m][n][2 * j + 1]);
        }
        TransposeInFours(pairs);
        if (row >= panel.end || column >= columns) continue;
        __nv_bfloat16* to =
            args_.h + (static_cast<int64_t>(row) * args_.p.shape.parts + panel.part) * args_.ldh;
        *reinterpret_cast<uint4*>(to + column) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  }

  // y = g · sum + bias for the warp's rows and columns from these on: all of one part. Code comes
  // from memory too: one loop for the rows of a segment, which are mostly all. 32 columns at a
  // time, as registers allow.
  template <int kColumns, typename T>
  __device__ void StoreTile(const Sums<kColumns>& d, int row0, int column0) const {
    const int part = PartOf(args_, column0);
    const int row_end = min(row0 + 64, args_.p.rows);
    int segment = SegmentOf(args_, row0);
#pragma unroll 1
    for (int begin = row0; begin < row_end; ++segment) {
      const float* g = MagnitudesOf(segment, part);
      const int end = min(__ldg(&args_.p.segments[segment].end), row_end);
#pragma unroll
      for (int first = 0; first < kColumns; first += 32) {
        StoreRows<kColumns, T>(d, row0, begin, end, first, column0 + first, g);
      }
      begin = end;
    }
  }

  // Of rows [begin, end), columns [first, first + 32) of the warp's.
  template <int kColumns, typename T>
  __device__ void StoreRows(const Sums<kColumns>& d, int row0, int begin, int end, int first,
                            int column0, const float* g) const {
    // Else the compiler would compute for all segments what is the same, and registers are few.
    asm volatile("" : "+r"(row0), "+r"(column0));
    const int out = args_.part_begin[args_.p.shape.parts];
    float2 scale[4];
    float2 bias[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int column = column0 + 8 * n;
      const bool is_there = column < out;
      const int own = column + Lane() % 4 * 2;
      scale[n] = is_there && g != nullptr ? LoadPair(g + own) : make_float2(1.0f, 1.0f);
      bias[n] = is_there && args_.p.bias != nullptr ? LoadPair(args_.p.bias + own)
                                                    : make_float2(0.0f, 0.0f);
    }
    int row = row0 + Lane() / 4;
    T* line = static_cast<T*>(args_.p.y) + static_cast<int64_t>(row) * out + column0;
#pragma unroll
    for (int eight = 0; eight < 8; ++eight) {
      float2 y[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float* sum = &d[eight / 2][first / 8 + n][eight % 2 * 2];
        y[n] =
            make_float2(fmaf(scale[n].x, sum[0], bias[n].x), fmaf(scale[n].y, sum[1], bias[n].y));
      }
      StoreLine(line, y, row >= begin && row < end ? out - column0 : 0);
      row += 8;
      line += 8 * static_cast<int64_t>(out);
    }
  }

  // To be indexed by rows of W; nullptr: 1.
  __device__ const float* MagnitudesOf(int segment, int part) const {
    if (RankOf(args_, segment, part) == 0) return nullptr;
    const float* g = FactorsOf(args_, __ldg(&args_.p.segments[segment].slot), part)->g;
    return g == nullptr ? nullptr : g - args_.part_begin[part];
  }

  // 4 blocks of 8 columns that four lanes have, those before `columns`.
  __device__ static void StoreLine(float* to, const float2 (&y)[4], int columns) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (8 * n >= columns) break;
      *reinterpret_cast<float2*>(to + 8 * n + Lane() % 4 * 2) = y[n];
    }
  }
  __device__ static void StoreLine(__nv_bfloat16* to, const float2 (&y)[4], int columns) {
    uint32_t pairs[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) pairs[n] = PackPair(y[n].x, y[n].y);
    TransposeInFours(pairs);
    const int column = Lane() % 4 * 8;
    if (column >= columns) return;
    *reinterpret_cast<uint4*>(to + column) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }

  const PrefillMmaArgs& args_;
  Shared& shared_;
  Ring ring_;  // of the next stage to multiply
  Ring fill_;  // to fetch
};

template <int kN>
__global__ void __launch_bounds__(kPrefillMmaThreads, 1)
    PrefillMmaKernel(const __grid_constant__ PrefillMmaArgs args) {
  LaunchDependents();
  using Block = PrefillMmaBlock<kN>;
  Block(args, StaticShared<typename Block::Shared>(), SharedAddress(DynamicShared<128>())).Run();
}

}  // namespace dorad::kernels
