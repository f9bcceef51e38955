// The kernel behind DoraLinearPrefill: see linear_prefill.h for what it computes.
//
// Two blocks are a cluster and work on one band of rows of the batch, half of it each, and one
// panel of rows of W at a time. Each fetches its own half of x, and half of the panel for both.
// (x, W) pairs of 64 elements of K go through a ring of shared memory into wgmma, x as the M
// operand (64 rows a warpgroup). What the pairs are is known to the producers alone:
//   panels of the shrink: (x, A of a slot), summed in pieces of K, as DoraLinear's, into h
//   tiles of y:           for each of the plan's pieces of K: (x, W), then its share of
//                         (h masked to a segment's rows, B of its slot), into the same accumulators
// All clusters shrink first, then walk their tiles. The shrink has a ring of its own in the same
// memory: its stages are smaller, and more of them have to be on their way.
//
// What consumers do between two products is time without any: so sums of pieces are added, and wait
// to be stored, in places of their own, half of a tile's in registers and half in shared memory,
// and other warps store them while the products of the next tile run. And code comes from memory
// too: whatever is unrolled over a tile is waited for at every tile.
//
// Warps: two warpgroups of consumers | weight producer | batch producer | a storer for each
// warpgroup.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/common/barrier.cuh"
#include "kernels/common/wgmma.cuh"
#include "kernels/dora/linear_plan.h"
#include "kernels/dora/linear_prefill.h"

namespace dorad::kernels {

inline constexpr int kPrefillTileRows = 128;  // of the batch, of a block
inline constexpr int kPrefillBandRows = 2 * kPrefillTileRows;
inline constexpr int kPrefillThreads = 384;

// Waiting counters at the head of the workspace; zero between launches.
struct PrefillCounters {
  uint32_t shrunk;  // blocks done with their panels of the shrink
  uint32_t left;    // blocks that need the one above no longer
};
static_assert(sizeof(PrefillCounters) <= kDoraLinearSignalBytes);

struct PrefillArgs {
  DoraLinearPrefillParams p;
  LinearPlan plan;                              // DoraLinear's: for the order of sums
  int32_t part_begin[kDoraLinearMaxParts + 1];  // in rows of W
  int32_t bands;
  int32_t panels;
  int32_t group;  // bands whose tiles are walked together
  int32_t ldh;    // max_rank, rounded up to kLinearStageK
  PrefillCounters* counters;
  __nv_bfloat16* h;  // [rows, parts, ldh]
};

// kN: rows of W in a panel.
template <int kN>
struct PrefillConfig {
  static constexpr int kShrinkN = 96;  // rows of A in a panel
  static constexpr int kConsumerWarps = 8;
  static constexpr int kBoxBytes = kLinearBoxRows * 2 * kLinearStageK;
  static constexpr int kBatchBytes = kPrefillTileRows * 2 * kLinearStageK;
  // Sums in shared memory: of a warp, 8 columns of its 16 rows, so far apart that 8 such blocks
  // begin in different banks.
  static constexpr int kParkedBlocks = kN / 16;
  static constexpr int kParkedBlockBytes = 32 * 16 + 16;
  static constexpr int kParkedBytes = kParkedBlocks * kParkedBlockBytes;
  static constexpr int kStaticBytes = 8 * 1024;                        // rounded up
  static constexpr int kMostBytes = 227 * 1024 - kStaticBytes - 1024;  // for alignment
  // Stages of the tiles of y; the sums come after them.
  struct TileRing {
    static constexpr int kBoxes = (kN + kLinearBoxRows - 1) / kLinearBoxRows;  // of B
    static constexpr int kStageBytes = kBatchBytes + kBoxes * kBoxBytes;
    static constexpr int kStages = (kMostBytes - kConsumerWarps * kParkedBytes) / kStageBytes;
    static constexpr int kFirst = 0;  // of the barriers
  };
  // And of the shrink, over all of it.
  struct ShrinkRing {
    static constexpr int kBoxes = kShrinkN / kLinearBoxRows;  // of A
    static constexpr int kStageBytes = kBatchBytes + kBoxes * kBoxBytes;
    static constexpr int kStages = kMostBytes / kStageBytes;
    static constexpr int kFirst = TileRing::kStages;
  };
  static constexpr int kBarriers = TileRing::kStages + ShrinkRing::kStages;
  static constexpr int kDynamicBytes = kMostBytes + 1024;
  static constexpr int kRegistersProducer = 56;
  static constexpr int kRegistersConsumer = 224;
  // What the block began with is what there is: more is waited for, without end.
  static constexpr int kRegistersAtStart = 65536 / kPrefillThreads / 8 * 8;
  static_assert(kRegistersProducer + 2 * kRegistersConsumer <= 3 * kRegistersAtStart);
};

// What all roles of a block know about the batch.
struct PrefillTables {
  int32_t slot[kPrefillMaxSegments];
  int32_t begin[kPrefillMaxSegments + 1];                  // the last one in use: rows
  int16_t rank[kDoraLinearMaxParts][kPrefillMaxSegments];  // rounded up to kLinearStageK
  int32_t adapted;                                         // whether any rank is not 0
};

// Where a part's factors are in the table.
__device__ inline int64_t FactorsAt(const PrefillArgs& args, int slot, int part) {
  return static_cast<int64_t>(slot) * args.p.table.modules + args.p.first_module + part;
}

__device__ inline const DoraFactors* FactorsOf(const PrefillArgs& args, int slot, int part) {
  return args.p.table.factors + FactorsAt(args, slot, part);
}

// Of A, then B.
__device__ inline const CUtensorMap* MapsOf(const PrefillArgs& args, int slot, int part) {
  return args.p.maps + 2 * FactorsAt(args, slot, part);
}

// Whole block. `tables.adapted` is 0 and visible on entry.
__device__ inline void FillTables(const PrefillArgs& args, PrefillTables& tables) {
  for (int i = threadIdx.x; i < args.p.num_segments; i += kPrefillThreads) {
    const RowSegment segment = args.p.segments[i];
    tables.slot[i] = segment.slot;
    tables.begin[i] = segment.begin;
    for (int part = 0; part < args.p.shape.parts; ++part) {
      const int rank = segment.slot < 0 ? 0 : FactorsOf(args, segment.slot, part)->rank;
      tables.rank[part][i] =
          static_cast<int16_t>((rank + kLinearStageK - 1) / kLinearStageK * kLinearStageK);
      if (rank != 0) tables.adapted = 1;
    }
  }
  if (threadIdx.x == 0) tables.begin[args.p.num_segments] = args.p.rows;
}

// What a role of a block knows. Every role walks the same stages in the same order.
template <int kN>
class PrefillBlock {
 public:
  using Config = PrefillConfig<kN>;

  using TileRing = typename Config::TileRing;
  using ShrinkRing = typename Config::ShrinkRing;

  struct Shared {
    PrefillTables tables;
    uint8_t acquired[kPrefillMaxSegments];  // the weight producer's: a bit for each map
    uint64_t full[Config::kBarriers];       // of a stage: both producers of the block
    uint64_t empty[Config::kBarriers];      // of a stage: the consumers of both blocks
    uint64_t parked[2];                     // of a warpgroup: half of a tile's sums are there
    uint64_t stored[2];                     // of a warpgroup: they are stored
  };

  __device__ PrefillBlock(const PrefillArgs& args, Shared& shared, uint32_t dynamic)
      : args_(args),
        tables_(shared.tables),
        acquired_(shared.acquired),
        ring_(dynamic),
        full_(SharedAddress(shared.full)),
        empty_(SharedAddress(shared.empty)),
        sums_(dynamic + TileRing::kStages * TileRing::kStageBytes),
        parked_(SharedAddress(shared.parked)),
        stored_(SharedAddress(shared.stored)) {}

  // One thread, before the cluster starts.
  __device__ static void InitBarriers(Shared& shared) {
#pragma unroll 1
    for (int stage = 0; stage < Config::kBarriers; ++stage) {
      BarrierInit(SharedAddress(&shared.full[stage]), 2);
      BarrierInit(SharedAddress(&shared.empty[stage]), 2 * Config::kConsumerWarps);
    }
#pragma unroll 1
    for (int group = 0; group < 2; ++group) {
      BarrierInit(SharedAddress(&shared.parked[group]), Config::kConsumerWarps / 2);
      BarrierInit(SharedAddress(&shared.stored[group]), 1);
    }
    BarrierInitFence();
  }

  // One thread.
  __device__ void ProduceWeights(const CUtensorMap* w_map) {
    constexpr int kHalf = kN / 2;
    const int first_tile = ForEachShrink([&](int, int segment, int part, int panel) {
      const CUtensorMap* map = Acquired(segment, part, 0);
      const int row = panel * Config::kShrinkN;
      // Rows beyond the last box keep old contents: nobody reads their sums.
      const int boxes =
          min(ShrinkRing::kBoxes, CeilDivide(tables_.rank[part][segment] - row, kLinearBoxRows));
#pragma unroll 1
      for (int chunk = 0; chunk < args_.plan.chunks; ++chunk) {
        ProduceBoxes<ShrinkRing>(map, chunk, row, boxes);
      }
    });
    LeaveShrink();
    ForEachTile(first_tile, [&](int band, int panel) {
      const int row = panel * kN;
#pragma unroll 1
      for (int split = 0; split < args_.plan.splits; ++split) {
        const int end = FirstChunk(split + 1);
#pragma unroll 1
        for (int chunk = FirstChunk(split); chunk < end; ++chunk) {
          WaitEmpty<TileRing>();
          BarrierArriveExpect(Full<TileRing>(), kN * 2 * kLinearStageK);
          CopyTensorBoxToBlocks(
              Stage<TileRing>() + Config::kBatchBytes + BlockRank() * (kHalf * 2 * kLinearStageK),
              w_map, chunk * kLinearStageK, row + BlockRank() * kHalf, Full<TileRing>(),
              kBothBlocks);
          Advance<TileRing>();
        }
        ForEachRankRange(band, panel, split, [&](int segment, int part, int first, int end) {
          const CUtensorMap* map = Acquired(segment, part, 1);
          // Rows of other parts are out of bounds: zero.
#pragma unroll 1
          for (int chunk = first; chunk < end; ++chunk) {
            ProduceBoxes<TileRing>(map, chunk, row - args_.part_begin[part], TileRing::kBoxes);
          }
        });
      }
    });
  }

  // One warp.
  __device__ void ProduceBatch(const CUtensorMap* x_map, const CUtensorMap* h_map,
                               const CUtensorMap* h_row_map) {
    WaitForPrevious();
    const int first_tile = ForEachShrink([&](int band, int, int, int) {
#pragma unroll 1
      for (int chunk = 0; chunk < args_.plan.chunks; ++chunk) {
        ProduceBox<ShrinkRing>(x_map, chunk * kLinearStageK, FirstRow(band));
      }
    });
    LeaveShrink();
    bool h_ready = false;
    ForEachTile(first_tile, [&](int band, int panel) {
#pragma unroll 1
      for (int split = 0; split < args_.plan.splits; ++split) {
        const int end = FirstChunk(split + 1);
#pragma unroll 1
        for (int chunk = FirstChunk(split); chunk < end; ++chunk) {
          ProduceBox<TileRing>(x_map, chunk * kLinearStageK, FirstRow(band));
        }
        ForEachRankRange(band, panel, split, [&](int segment, int part, int first, int end) {
          if (!h_ready) WaitForH();
          h_ready = true;
          const int row = FirstRow(band);
          const bool whole =
              tables_.begin[segment] <= row &&
              tables_.begin[segment + 1] >= min(row + kPrefillTileRows, args_.p.rows);
#pragma unroll 1
          for (int chunk = first; chunk < end; ++chunk) {
            const int column = part * args_.ldh + chunk * kLinearStageK;
            if (whole || !HasRows(band, segment)) {
              ProduceBox<TileRing>(h_map, column, row);
            } else {
              ProduceRows(h_row_map, column, row, segment);
            }
          }
        });
      }
    });
    if (!tables_.adapted) return;
    if (!h_ready) WaitForH();
    // The last block to come here leaves the counters as it found them.
    if (Lane() == 0 && atomicAdd(&args_.counters->left, 1) == gridDim.x - 1) {
      args_.counters->shrunk = 0;
      args_.counters->left = 0;
    }
  }

  // Consumers: whole warpgroups.
  __device__ void Consume() {
    WaitForPrevious();
    const int first_tile = ForEachShrink([&](int band, int segment, int part, int panel) {
      float d[Config::kShrinkN / 2];
      float sum[Config::kShrinkN / 2] = {};
#pragma unroll 1
      for (int chunk = 0; chunk < args_.plan.chunks; chunk += args_.plan.a_chunks) {
        Multiply<ShrinkRing, Config::kShrinkN>(
            d, min(args_.plan.a_chunks, args_.plan.chunks - chunk), true, [] {});
        Drain<ShrinkRing>();
#pragma unroll
        for (int i = 0; i < Config::kShrinkN / 2; ++i) sum[i] += d[i];
      }
      StoreShrunk(sum, FirstRow(band), segment, part, panel * Config::kShrinkN);
    });
    if (tables_.adapted) {
      // The copy engine will read h. A barrier and a release order the writes of all.
      FenceProxyAsyncGlobal();
      NamedBarrier(1, 32 * Config::kConsumerWarps);
      if (threadIdx.x == 0) SignalRelease(&args_.counters->shrunk);
    }
    stage_ = 0;
    parity_ = 0;
    ConsumeTiles(first_tile);
  }

  // Whole warps, one for each warpgroup of consumers.
  __device__ void Store(int group) {
    WaitForPrevious();
    const int first_tile = ForEachShrink([](int, int, int, int) {});
    ForEachTile(first_tile, [&](int band, int panel) {
      const int row = FirstRow(band) + 64 * group;
      StoreHalf(group, row, panel * kN + kN / 2);
      StoreHalf(group, row, panel * kN);
    });
  }

 private:
  static constexpr uint16_t kBothBlocks = 3;

  // A tile's first half is parked at its end, the second one as soon as the first is stored: while
  // the first piece of the next tile is multiplied, or before what follows.
  __device__ void ConsumeTiles(int first_tile) {
    float d[kN / 2];
    float kept[kN / 4];
    bool keeps = false;  // a second half
    const auto park_kept = [&] {
      Park(kept);
      SignalParked();
      keeps = false;
    };
    ForEachTile(first_tile, [&](int band, int panel) {
#pragma unroll 1
      for (int split = 0; split < args_.plan.splits; ++split) {
        const int stages = FirstChunk(split + 1) - FirstChunk(split);
        Multiply<TileRing, kN>(d, stages, true, [&] {
          if (keeps && IsStored()) park_kept();
        });
        MultiplyRanks(d, band, panel, split);
        Drain<TileRing>();
        if (split > 0) {
          Add(kept, d);
          continue;
        }
        if (keeps) {
          WaitStored();
          park_kept();
        }
        WaitStored();
        Keep(kept, d);
      }
      SignalParked();
      keeps = true;
    });
    if (keeps) {
      WaitStored();
      park_kept();
    }
  }

  // Goes on over the split's share of the ranks.
  __device__ void MultiplyRanks(float (&d)[kN / 2], int band, int panel, int split) {
    ForEachRankRange(band, panel, split, [&](int segment, int, int first, int end) {
      if (HasRows(band, segment)) {
        Multiply<TileRing, kN>(d, end - first, false, [] {});
      } else {
        Skip<TileRing>(end - first);
      }
    });
  }

  __device__ static int CeilDivide(int a, int b) { return (a + b - 1) / b; }
  __device__ static int Lane() { return threadIdx.x % 32; }
  // Of the block in its cluster.
  __device__ static int BlockRank() { return blockIdx.x % 2; }
  __device__ static int FirstRow(int band) {
    return band * kPrefillBandRows + BlockRank() * kPrefillTileRows;
  }
  // Consumers: of the tile, the first of the two rows (the other is 8 on) of the lane.
  __device__ static int LaneRow() { return threadIdx.x / 32 * 16 + Lane() / 4; }

  __device__ int FirstChunk(int split) const {
    return args_.plan.chunks * split >> args_.plan.log_splits;
  }

  // Whether the segment has any of this block's rows of the band.
  __device__ bool HasRows(int band, int segment) const {
    return tables_.begin[segment] < FirstRow(band) + kPrefillTileRows &&
           tables_.begin[segment + 1] > FirstRow(band);
  }

  __device__ int SegmentOf(int row) const {
    int low = 0;
    int high = args_.p.num_segments;  // low <= the segment < high
#pragma unroll 1
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (tables_.begin[middle] <= row) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // The walks below are the same in every role and in both blocks of a cluster.

  // f(band, segment, part, panel of A). Returns the cluster's first tile of y: tiles are dealt
  // on where the panels end.
  template <typename F>
  __device__ int ForEachShrink(F f) const {
    const int clusters = gridDim.x / 2;
    int next = blockIdx.x / 2;
    if (!tables_.adapted) return next;
    int base = 0;
    int first = 0;
#pragma unroll 1
    for (int band = 0; band < args_.bands; ++band) {
      const int row = band * kPrefillBandRows;
      while (tables_.begin[first + 1] <= row) ++first;
#pragma unroll 1
      for (int segment = first;
           segment < args_.p.num_segments && tables_.begin[segment] < row + kPrefillBandRows;
           ++segment) {
#pragma unroll 1
        for (int part = 0; part < args_.p.shape.parts; ++part) {
          base += CeilDivide(tables_.rank[part][segment], Config::kShrinkN);
#pragma unroll 1
          for (; next < base; next += clusters) f(band, segment, part, base - 1 - next);
        }
      }
    }
    return next - base;
  }

  // f(band, panel of W)
  template <typename F>
  __device__ void ForEachTile(int first, F f) const {
    const int tiles = args_.bands * args_.panels;
    const int group_tiles = args_.group * args_.panels;
#pragma unroll 1
    for (int tile = first; tile < tiles; tile += gridDim.x / 2) {
      const int group = tile / group_tiles;
      const int rest = tile - group * group_tiles;
      const int bands = min(args_.group, args_.bands - group * args_.group);
      f(group * args_.group + rest % bands, rest / bands);
    }
  }

  // f(segment, part, first chunk, end) of columns of B that the split's sum goes on over.
  template <typename F>
  __device__ void ForEachRankRange(int band, int panel, int split, F f) const {
    if (!tables_.adapted) return;
    const int row = band * kPrefillBandRows;
    const int w_row = panel * kN;
#pragma unroll 1
    for (int segment = SegmentOf(row);
         segment < args_.p.num_segments && tables_.begin[segment] < row + kPrefillBandRows;
         ++segment) {
#pragma unroll 1
      for (int part = 0; part < args_.p.shape.parts; ++part) {
        if (w_row >= args_.part_begin[part + 1] || w_row + kN <= args_.part_begin[part]) continue;
        const int chunks = CeilDivide(tables_.rank[part][segment], kLinearStageK);
        const int first = chunks * split >> args_.plan.log_splits;
        const int end = chunks * (split + 1) >> args_.plan.log_splits;
        if (first < end) f(segment, part, first, end);
      }
    }
  }

  template <typename Ring>
  __device__ uint32_t Stage() const {
    return ring_ + stage_ * Ring::kStageBytes;
  }
  template <typename Ring>
  __device__ uint32_t Full() const {
    return full_ + 8 * (Ring::kFirst + stage_);
  }
  template <typename Ring>
  __device__ uint32_t Empty(int stage) const {
    return empty_ + 8 * (Ring::kFirst + stage);
  }

  template <typename Ring>
  __device__ void Advance() {
    if (++stage_ == Ring::kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  template <typename Ring>
  __device__ void WaitEmpty() const {
    BarrierWait(Empty<Ring>(stage_), parity_ ^ 1);
  }

  // A producer: from the shrink's ring to the one that takes its place, when all is consumed.
  __device__ void LeaveShrink() {
#pragma unroll 1
    for (int i = 0; i < ShrinkRing::kStages; ++i) {
      WaitEmpty<ShrinkRing>();
      Advance<ShrinkRing>();
    }
    stage_ = 0;
    parity_ = 0;
  }

  // The map of a segment's A (factor 0) or B (1). The weight producer.
  __device__ const CUtensorMap* Acquired(int segment, int part, int factor) {
    const CUtensorMap* map = MapsOf(args_, tables_.slot[segment], part) + factor;
    const uint32_t bit = 1 << (2 * part + factor);
    if ((acquired_[segment] & bit) == 0) {
      AcquireTensorMap(map);
      acquired_[segment] |= bit;
    }
    return map;
  }

  // Boxes of kLinearBoxRows rows into the next stage of both blocks; each block fetches half.
  template <typename Ring>
  __device__ void ProduceBoxes(const CUtensorMap* map, int chunk, int row, int boxes) {
    WaitEmpty<Ring>();
    BarrierArriveExpect(Full<Ring>(), boxes * Config::kBoxBytes);
#pragma unroll 1
    for (int box = BlockRank(); box < boxes; box += 2) {
      CopyTensorBoxToBlocks(Stage<Ring>() + Config::kBatchBytes + box * Config::kBoxBytes, map,
                            chunk * kLinearStageK, row + box * kLinearBoxRows, Full<Ring>(),
                            kBothBlocks);
    }
    Advance<Ring>();
  }

  // The block's rows of x or h. One warp.
  template <typename Ring>
  __device__ void ProduceBox(const CUtensorMap* map, int column, int row) {
    WaitEmpty<Ring>();
    __syncwarp();  // no lane may miss a phase
    if (Lane() == 0) {
      BarrierArriveExpect(Full<Ring>(), Config::kBatchBytes);
      CopyTensorBox(Stage<Ring>(), map, column, row, Full<Ring>());
    }
    Advance<Ring>();
  }

  __device__ void WaitForH() const {
    if (Lane() == 0) SpinUntil(&args_.counters->shrunk, gridDim.x);
    __syncwarp();
    FenceProxyAsyncGlobal();
  }

  // A tile of h whose rows are not all the segment's; the others' zeros come from out of
  // bounds. One warp.
  __device__ void ProduceRows(const CUtensorMap* h_row_map, int column, int row0, int segment) {
    WaitEmpty<TileRing>();
    __syncwarp();
    if (Lane() == 0) BarrierArriveExpect(Full<TileRing>(), Config::kBatchBytes);
    __syncwarp();
#pragma unroll 1
    for (int i = Lane(); i < kPrefillTileRows; i += 32) {
      const int row = row0 + i;
      const bool mine = row >= tables_.begin[segment] && row < tables_.begin[segment + 1];
      CopyTensorBox(Stage<TileRing>() + i * 2 * kLinearStageK, h_row_map, column,
                    mine ? row : args_.p.rows, Full<TileRing>());
    }
    __syncwarp();
    Advance<TileRing>();
  }

  // Starts the products of the next `stages`, `between` after those of each, and waits for all
  // but the last. fresh: d begins at zero.
  template <typename Ring, int kColumns, typename F>
  __device__ void Multiply(float (&d)[kColumns / 2], int stages, bool fresh, F between) {
    stages = __shfl_sync(0xFFFFFFFF, stages, 0);  // tells the compiler that the warp agrees
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      BarrierWait(Full<Ring>(), parity_);
      const uint64_t batch = WgmmaTile(Stage<Ring>() + threadIdx.x / 128 * 8192);
      const uint64_t weights = WgmmaTile(Stage<Ring>() + Config::kBatchBytes);
      WgmmaFence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        Wgmma<kColumns>(d, batch + 2 * step, weights + 2 * step, step > 0 || i > 0 || !fresh);
      }
      WgmmaCommit();
      between();
      // The stage before this one can go back: its products are complete.
      WgmmaWait<1>();
      if (previous_ >= 0) Release<Ring>(previous_);
      previous_ = stage_;
      Advance<Ring>();
    }
  }

  // Waits for the products of the last stage.
  template <typename Ring>
  __device__ void Drain() {
    WgmmaWait<0>();
    if (previous_ >= 0) Release<Ring>(previous_);
    previous_ = -1;
  }

  // Gives back stages that hold nothing for this block. They may be the whole ring: the one
  // before them has to go back first.
  template <typename Ring>
  __device__ void Skip(int stages) {
    Drain<Ring>();
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      BarrierWait(Full<Ring>(), parity_);
      __syncwarp();
      Release<Ring>(stage_);
      Advance<Ring>();
    }
  }

  // The stage is this warp's no longer, in neither block: the other one writes here too.
  template <typename Ring>
  __device__ void Release(int stage) const {
    if (Lane() < 2) BarrierArriveRemote(RemoteAddress(Empty<Ring>(stage), Lane()));
  }

  // Where this thread parks its sums of 8 columns.
  __device__ uint32_t ParkedAt(int block) const {
    return sums_ + threadIdx.x / 32 * Config::kParkedBytes + block * Config::kParkedBlockBytes +
           Lane() * 16;
  }

  // Consumers: what this warp parked is for the storer, once its warpgroup's others have.
  __device__ void SignalParked() {
    __syncwarp();
    if (Lane() == 0) BarrierArrive(parked_ + threadIdx.x / 128 * 8);
    half_parity_ ^= 1;
  }

  // Consumers: the half that was parked last, if any, is stored.
  __device__ void WaitStored() const {
    BarrierWait(stored_ + threadIdx.x / 128 * 8, half_parity_ ^ 1);
  }
  __device__ bool IsStored() const {
    return __all_sync(0xFFFFFFFF,
                      BarrierIsComplete(stored_ + threadIdx.x / 128 * 8, half_parity_ ^ 1));
  }

  // The first piece's sums: half of them stay in registers. The room is free.
  __device__ void Keep(float (&kept)[kN / 4], const float (&d)[kN / 2]) const {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) kept[i] = d[i];
    Park(&d[kN / 4]);
  }

  __device__ void Add(float (&kept)[kN / 4], const float (&d)[kN / 2]) const {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) kept[i] += d[i];
#pragma unroll
    for (int i = 0; i < Config::kParkedBlocks; ++i) {
      const float* more = &d[kN / 4 + 4 * i];
      float4 sum = LoadShared(ParkedAt(i));
      sum.x += more[0];
      sum.y += more[1];
      sum.z += more[2];
      sum.w += more[3];
      StoreShared(ParkedAt(i), sum);
    }
  }

  __device__ void Park(const float* sums) const {
#pragma unroll
    for (int i = 0; i < Config::kParkedBlocks; ++i) {
      StoreShared(ParkedAt(i),
                  make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
    }
  }

  // h = s · sum for the segment's rows. Few wide stores: many narrow ones stand in the way of all
  // that the multiprocessor's other warps ask of memory.
  __device__ void StoreShrunk(const float (&sum)[Config::kShrinkN / 2], int row0, int segment,
                              int part, int column0) const {
    const int rank = tables_.rank[part][segment];
    const float scale = FactorsOf(args_, tables_.slot[segment], part)->scale;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = row0 + LaneRow() + 8 * j;
      const bool mine = row >= tables_.begin[segment] && row < tables_.begin[segment + 1];
      __nv_bfloat16* line =
          args_.h + (static_cast<int64_t>(row) * args_.p.shape.parts + part) * args_.ldh;
#pragma unroll
      for (int i = 0; i < Config::kShrinkN / 32; ++i) {
        uint32_t pairs[4];  // columns 2 (lane % 4).. of 4 blocks of 8
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int at = 4 * (4 * i + k) + 2 * j;
          pairs[k] = Pack(scale * sum[at], scale * sum[at + 1]);
        }
        TransposeInFours(pairs);
        const int column = column0 + 8 * (4 * i + Lane() % 4);
        if (!mine || column >= rank) continue;
        *reinterpret_cast<uint4*>(line + column) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  }

  __device__ static uint32_t Pack(float first, float second) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }

  // Lane q of every four gets what lane i of them has at q, as its i-th. Whole warp.
  __device__ static void TransposeInFours(uint32_t (&values)[4]) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const bool is_upper = (Lane() & step) != 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((i & step) != 0) continue;
        const uint32_t other =
            __shfl_xor_sync(0xFFFFFFFF, is_upper ? values[i] : values[i + step], step);
        if (is_upper) {
          values[i] = other;
        } else {
          values[i + step] = other;
        }
      }
    }
  }

  // To be indexed by rows of W; nullptr: 1.
  __device__ const float* Magnitudes(int segment, int part) const {
    if (tables_.rank[part][segment] == 0) return nullptr;
    const float* g = FactorsOf(args_, tables_.slot[segment], part)->g;
    return g == nullptr ? nullptr : g - args_.part_begin[part];
  }

  // y = g · sum + bias for the parked sums of a warpgroup: 64 rows from row0 on, half of a panel's
  // columns from column0 on. The storer.
  __device__ void StoreHalf(int group, int row0, int column0) {
    BarrierWait(parked_ + 8 * group, half_parity_);
    const uint32_t sums = sums_ + group * (Config::kConsumerWarps / 2) * Config::kParkedBytes;
    if (args_.p.y_fp32) {
      StoreColumns<float>(sums, row0, column0);
    } else {
      StoreColumns<__nv_bfloat16>(sums, row0, column0);
    }
    __syncwarp();
    if (Lane() == 0) BarrierArrive(stored_ + 8 * group);
    half_parity_ ^= 1;
  }

  // 128 bytes of 4 rows at a time: a lane has 16 bytes, of the same columns in every fourth row.
  template <typename T>
  __device__ void StoreColumns(uint32_t sums, int row0, int column0) const {
    constexpr int kUnit = 16 / sizeof(T);  // columns
    constexpr int kUnits = 8 / kUnit;      // of a block
    constexpr int kPairs = kUnit / 2;
    const int out = args_.part_begin[args_.p.shape.parts];
    row0 += Lane() / 8;
#pragma unroll 1
    for (int unit = Lane() % 8; unit < kN / 2 / kUnit; unit += 8) {
      const int column = column0 + unit * kUnit;
      if (column >= out || row0 >= args_.p.rows) break;
      const int part = PartOf(column);
      float2 bias[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        bias[i] =
            args_.p.bias == nullptr ? make_float2(0.0f, 0.0f) : Pair(args_.p.bias + column + 2 * i);
      }
      // Of the lanes that have a row's sums, the first one of the unit's.
      const uint32_t from = sums + unit / kUnits * Config::kParkedBlockBytes +
                            (Lane() / 8 * 4 + unit % kUnits * 2) * 16;
      int segment = SegmentOf(row0);
      int end = row0;  // of the rows that `scale` is for
      float2 scale[kPairs];
#pragma unroll 1
      for (int warp = 0; warp < Config::kConsumerWarps / 2; ++warp) {
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
          const int row = row0 + 16 * warp + 4 * quarter;
          if (row >= args_.p.rows) break;
          if (row >= end) {
            while (row >= tables_.begin[segment + 1]) ++segment;
            end = tables_.begin[segment + 1];
            const float* g = Magnitudes(segment, part);
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
              scale[i] = g == nullptr ? make_float2(1.0f, 1.0f) : Pair(g + column + 2 * i);
            }
          }
          float2 y[kPairs];
#pragma unroll
          for (int i = 0; i < kPairs; ++i) {
            const float2 sum = LoadSharedPair(from + warp * Config::kParkedBytes +
                                              quarter % 2 * 256 + quarter / 2 * 8 + i * 16);
            y[i] =
                make_float2(fmaf(scale[i].x, sum.x, bias[i].x), fmaf(scale[i].y, sum.y, bias[i].y));
          }
          StoreUnit(static_cast<T*>(args_.p.y) + static_cast<int64_t>(row) * out + column, y);
        }
      }
    }
  }

  __device__ static void StoreUnit(float* to, const float2 (&y)[2]) {
    *reinterpret_cast<float4*>(to) = make_float4(y[0].x, y[0].y, y[1].x, y[1].y);
  }
  __device__ static void StoreUnit(__nv_bfloat16* to, const float2 (&y)[4]) {
    *reinterpret_cast<uint4*>(to) = make_uint4(Pack(y[0].x, y[0].y), Pack(y[1].x, y[1].y),
                                               Pack(y[2].x, y[2].y), Pack(y[3].x, y[3].y));
  }

  // Of a row of W.
  __device__ int PartOf(int row) const {
    return (row >= args_.part_begin[1]) + (row >= args_.part_begin[2]);
  }

  __device__ static float2 Pair(const float* address) {
    return __ldg(reinterpret_cast<const float2*>(address));
  }

  const PrefillArgs& args_;
  const PrefillTables& tables_;
  uint8_t* const acquired_;
  const uint32_t ring_;
  const uint32_t full_;
  const uint32_t empty_;
  const uint32_t sums_;
  const uint32_t parked_;
  const uint32_t stored_;
  // The next stage, and the parity of its phase.
  int stage_ = 0;
  uint32_t parity_ = 0;
  // Consumers and storers: of the phase that parks the next half.
  uint32_t half_parity_ = 0;
  // Consumers: the stage whose products may be running, or -1.
  int previous_ = -1;
};

// The kernel, of all threads, in shared memory that it is given; `dynamic`: 1024-byte aligned. In
// clusters of two blocks.
template <int kN>
__device__ void RunPrefill(const CUtensorMap* w_map, const CUtensorMap* x_map,
                           const CUtensorMap* h_map, const CUtensorMap* h_row_map,
                           const PrefillArgs& args, typename PrefillBlock<kN>::Shared& shared,
                           uint32_t dynamic) {
  using Config = PrefillConfig<kN>;
  using Block = PrefillBlock<kN>;
  if (threadIdx.x == 0) {
    PrefetchTensorMap(w_map);
    PrefetchTensorMap(x_map);
    PrefetchTensorMap(h_map);
    Block::InitBarriers(shared);
    shared.tables.adapted = 0;
  }
  __syncthreads();
  FillTables(args, shared.tables);
  for (int i = threadIdx.x; i < args.p.num_segments; i += kPrefillThreads) shared.acquired[i] = 0;
  __syncthreads();
  ClusterBarrier();
  LaunchDependents();
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
  Block block(args, shared, dynamic);
  if (warp < Config::kConsumerWarps) {
    IncreaseRegisters<Config::kRegistersConsumer>();
    block.Consume();
  } else {
    DecreaseRegisters<Config::kRegistersProducer>();
    if (warp == Config::kConsumerWarps) {
      if (threadIdx.x % 32 == 0) block.ProduceWeights(w_map);
    } else if (warp == Config::kConsumerWarps + 1) {
      block.ProduceBatch(x_map, h_map, h_row_map);
    } else {
      block.Store(warp - Config::kConsumerWarps - 2);
    }
    __syncwarp();
  }
  // The other block may still be writing and arriving here.
  ClusterBarrier();
}

template <int kN>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    PrefillKernel(const __grid_constant__ CUtensorMap w_map,
                  const __grid_constant__ CUtensorMap x_map,
                  const __grid_constant__ CUtensorMap h_map,
                  const __grid_constant__ CUtensorMap h_row_map,
                  const __grid_constant__ PrefillArgs args) {
  extern __shared__ uint8_t dynamic[];
  __shared__ typename PrefillBlock<kN>::Shared shared;
  static_assert(sizeof(shared) <= PrefillConfig<kN>::kStaticBytes);
  RunPrefill<kN>(&w_map, &x_map, &h_map, &h_row_map, args, shared,
                 (SharedAddress(dynamic) + 1023) / 1024 * 1024);
}

}  // namespace dorad::kernels
