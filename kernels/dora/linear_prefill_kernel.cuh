// The kernel behind DoraLinearPrefill: see linear_prefill.h for what it computes.
//
// Two blocks are a cluster and work on one band of rows of the batch, half of it each, and one
// panel of rows of W at a time. Each fetches its own half of x, and half of the panel for both.
// (x, W) pairs of 64 elements of K go through a ring of shared memory into wgmma, x as the M
// operand (64 rows a warpgroup). What the pairs are is known to the producers alone:
//   panels of the shrink: (x, A of a slot), summed in pieces of K, as DoraLinear's, into h
//   tiles of y:           for each of the plan's pieces of K: (x, W), then its share of
//                         (h masked to a segment's rows, B of its slot), into the same accumulators
// All clusters shrink first, then walk their tiles. Sums of pieces are added, and wait to be
// stored, in places of their own: half of a tile's in registers, half in shared memory. So y is
// stored while the products of the next tile run, by a short loop over shared memory: code comes
// from memory too, and what is unrolled over a tile is waited for at every tile.
//
// Warps: two warpgroups of consumers | weight producer | batch producer | two idle.
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
  static constexpr int kBoxes = (kN + kLinearBoxRows - 1) / kLinearBoxRows;  // of B, in a panel
  static constexpr int kBoxBytes = kLinearBoxRows * 2 * kLinearStageK;
  static constexpr int kBatchBytes = kPrefillTileRows * 2 * kLinearStageK;
  static constexpr int kStageBytes = kBatchBytes + kBoxes * kBoxBytes;
  // Sums in shared memory: of a warp, 8 columns of its 16 rows, so far apart that 8 such blocks
  // begin in different banks.
  static constexpr int kParkedBlocks = kN / 16;
  static constexpr int kParkedBlockBytes = 32 * 16 + 16;
  static constexpr int kParkedBytes = kParkedBlocks * kParkedBlockBytes;
  static constexpr int kStaticBytes = 8 * 1024;  // static shared memory, rounded up
  static constexpr int kStages =
      (227 * 1024 - 1024 - kStaticBytes - kConsumerWarps * kParkedBytes) / kStageBytes;
  static constexpr int kDynamicBytes =
      kStages * kStageBytes + kConsumerWarps * kParkedBytes + 1024;  // for alignment
  static constexpr int kRegistersProducer = 40;
  static constexpr int kRegistersConsumer = 232;
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

  struct Shared {
    PrefillTables tables;
    uint8_t acquired[kPrefillMaxSegments];  // the weight producer's: a bit for each map
    uint64_t full[Config::kStages];         // both producers of the block
    uint64_t empty[Config::kStages];        // the consumers of both blocks
  };

  __device__ PrefillBlock(const PrefillArgs& args, Shared& shared, uint32_t ring)
      : args_(args),
        tables_(shared.tables),
        acquired_(shared.acquired),
        ring_(ring),
        parked_(ring + Config::kStages * Config::kStageBytes +
                threadIdx.x / 32 * Config::kParkedBytes),
        full_(SharedAddress(shared.full)),
        empty_(SharedAddress(shared.empty)) {}

  // One thread, before the cluster starts.
  __device__ static void InitBarriers(Shared& shared) {
#pragma unroll 1
    for (int stage = 0; stage < Config::kStages; ++stage) {
      BarrierInit(SharedAddress(&shared.full[stage]), 2);
      BarrierInit(SharedAddress(&shared.empty[stage]), 2 * Config::kConsumerWarps);
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
      const int boxes = min(CeilDivide(Config::kShrinkN, kLinearBoxRows),
                            CeilDivide(tables_.rank[part][segment] - row, kLinearBoxRows));
#pragma unroll 1
      for (int chunk = 0; chunk < args_.plan.chunks; ++chunk) ProduceBoxes(map, chunk, row, boxes);
    });
    ForEachTile(first_tile, [&](int band, int panel) {
      const int row = panel * kN;
#pragma unroll 1
      for (int split = 0; split < args_.plan.splits; ++split) {
        const int end = FirstChunk(split + 1);
#pragma unroll 1
        for (int chunk = FirstChunk(split); chunk < end; ++chunk) {
          WaitEmpty();
          BarrierArriveExpect(full_ + 8 * stage_, kN * 2 * kLinearStageK);
          CopyTensorBoxToBlocks(
              Tile() + Config::kBatchBytes + BlockRank() * (kHalf * 2 * kLinearStageK), w_map,
              chunk * kLinearStageK, row + BlockRank() * kHalf, full_ + 8 * stage_, kBothBlocks);
          Advance();
        }
        ForEachRankRange(band, panel, split, [&](int segment, int part, int first, int end) {
          const CUtensorMap* map = Acquired(segment, part, 1);
          // Rows of other parts are out of bounds: zero.
#pragma unroll 1
          for (int chunk = first; chunk < end; ++chunk) {
            ProduceBoxes(map, chunk, row - args_.part_begin[part], Config::kBoxes);
          }
        });
      }
    });
  }

  // One warp.
  __device__ void ProduceBatch(const CUtensorMap* x_map, const CUtensorMap* h_map,
                               const CUtensorMap* h_row_map) {
    WaitForPrevious();
    const auto produce = [&](const CUtensorMap* map, int column, int row) {
      WaitEmpty();
      __syncwarp();  // no lane may miss a phase
      if (Lane() == 0) {
        BarrierArriveExpect(full_ + 8 * stage_, Config::kBatchBytes);
        CopyTensorBox(Tile(), map, column, row, full_ + 8 * stage_);
      }
      Advance();
    };
    const int first_tile = ForEachShrink([&](int band, int, int, int) {
#pragma unroll 1
      for (int chunk = 0; chunk < args_.plan.chunks; ++chunk) {
        produce(x_map, chunk * kLinearStageK, FirstRow(band));
      }
    });
    bool h_ready = false;
    ForEachTile(first_tile, [&](int band, int panel) {
#pragma unroll 1
      for (int split = 0; split < args_.plan.splits; ++split) {
        const int end = FirstChunk(split + 1);
#pragma unroll 1
        for (int chunk = FirstChunk(split); chunk < end; ++chunk) {
          produce(x_map, chunk * kLinearStageK, FirstRow(band));
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
              produce(h_map, column, row);
            } else {
              ProduceRows(h_row_map, column, row, segment);
            }
          }
        });
      }
      WarmL1(band, panel);
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
        Multiply<Config::kShrinkN>(d, min(args_.plan.a_chunks, args_.plan.chunks - chunk), true,
                                   [](int) {});
        Drain();
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
    ConsumeTiles(first_tile);
  }

 private:
  static constexpr uint16_t kBothBlocks = 3;

  // A tile is stored during the first piece of the next one.
  __device__ void ConsumeTiles(int first_tile) {
    float d[kN / 2];
    float kept[kN / 4];
    ForEachTile(first_tile, [&](int band, int panel) {
#pragma unroll 1
      for (int split = 0; split < args_.plan.splits; ++split) {
        const int stages = FirstChunk(split + 1) - FirstChunk(split);
        const int steps = CeilDivide(Steps(), stages);  // of the tile before, at each stage
        const int end = split == 0 && stored_row_ >= 0 ? Steps() : 0;
        Multiply<kN>(d, stages, true, [&](int stage) {
          if (stage * steps < end) StoreSteps(kept, stage * steps, (stage + 1) * steps);
        });
        MultiplyRanks(d, band, panel, split);
        Drain();
        if (split == 0) {
          Keep(kept, d);
        } else {
          Add(kept, d);
        }
      }
      SetStored(band, panel);
    });
    if (stored_row_ >= 0) StoreSteps(kept, 0, Steps());
  }

  // Goes on over the split's share of the ranks.
  __device__ void MultiplyRanks(float (&d)[kN / 2], int band, int panel, int split) {
    ForEachRankRange(band, panel, split, [&](int segment, int, int first, int end) {
      if (HasRows(band, segment)) {
        Multiply<kN>(d, end - first, false, [](int) {});
      } else {
        Skip(end - first);
      }
    });
  }

  // The sums are those of this tile.
  __device__ void SetStored(int band, int panel) {
    stored_row_ = FirstRow(band) + threadIdx.x / 32 * 16;
    stored_column_ = panel * kN;
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

  __device__ uint32_t Tile() const { return ring_ + stage_ * Config::kStageBytes; }

  __device__ void Advance() {
    if (++stage_ == Config::kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  __device__ void WaitEmpty() const { BarrierWait(empty_ + 8 * stage_, parity_ ^ 1); }

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
  __device__ void ProduceBoxes(const CUtensorMap* map, int chunk, int row, int boxes) {
    WaitEmpty();
    BarrierArriveExpect(full_ + 8 * stage_, boxes * Config::kBoxBytes);
#pragma unroll 1
    for (int box = BlockRank(); box < boxes; box += 2) {
      CopyTensorBoxToBlocks(Tile() + Config::kBatchBytes + box * Config::kBoxBytes, map,
                            chunk * kLinearStageK, row + box * kLinearBoxRows, full_ + 8 * stage_,
                            kBothBlocks);
    }
    Advance();
  }

  __device__ void WaitForH() const {
    if (Lane() == 0) SpinUntil(&args_.counters->shrunk, gridDim.x);
    __syncwarp();
    FenceProxyAsyncGlobal();
  }

  // A tile of h whose rows are not all the segment's; the others' zeros come from out of
  // bounds. One warp.
  __device__ void ProduceRows(const CUtensorMap* h_row_map, int column, int row0, int segment) {
    WaitEmpty();
    __syncwarp();
    if (Lane() == 0) BarrierArriveExpect(full_ + 8 * stage_, Config::kBatchBytes);
    __syncwarp();
#pragma unroll 1
    for (int i = Lane(); i < kPrefillTileRows; i += 32) {
      const int row = row0 + i;
      const bool mine = row >= tables_.begin[segment] && row < tables_.begin[segment + 1];
      CopyTensorBox(Tile() + i * 2 * kLinearStageK, h_row_map, column, mine ? row : args_.p.rows,
                    full_ + 8 * stage_);
    }
    __syncwarp();
    Advance();
  }

  // Starts the products of the next `stages`, `between` after those of each, and waits for all
  // but the last. fresh: d begins at zero.
  template <int kColumns, typename F>
  __device__ void Multiply(float (&d)[kColumns / 2], int stages, bool fresh, F between) {
    stages = __shfl_sync(0xFFFFFFFF, stages, 0);  // tells the compiler that the warp agrees
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      BarrierWait(full_ + 8 * stage_, parity_);
      const uint64_t batch = WgmmaTile(Tile() + threadIdx.x / 128 * 8192);
      const uint64_t weights = WgmmaTile(Tile() + Config::kBatchBytes);
      WgmmaFence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        Wgmma<kColumns>(d, batch + 2 * step, weights + 2 * step, step > 0 || i > 0 || !fresh);
      }
      WgmmaCommit();
      between(i);
      // The stage before this one can go back: its products are complete.
      WgmmaWait<1>();
      if (previous_ >= 0) Release(previous_);
      previous_ = stage_;
      Advance();
    }
  }

  // Waits for the products of the last stage.
  __device__ void Drain() {
    WgmmaWait<0>();
    if (previous_ >= 0) Release(previous_);
    previous_ = -1;
  }

  // Gives back stages that hold nothing for this block. They may be the whole ring: the one
  // before them has to go back first.
  __device__ void Skip(int stages) {
    Drain();
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      BarrierWait(full_ + 8 * stage_, parity_);
      __syncwarp();
      Release(stage_);
      Advance();
    }
  }

  // The stage is this warp's no longer, in neither block: the other one writes here too.
  __device__ void Release(int stage) const {
    if (Lane() < 2) BarrierArriveRemote(RemoteAddress(empty_ + 8 * stage, Lane()));
  }

  // Where this thread's sums of 8 columns of a tile's second half are parked.
  __device__ uint32_t ParkedAt(int block) const {
    return parked_ + block * Config::kParkedBlockBytes + Lane() * 16;
  }

  // The first piece's sums: half of them stay in registers.
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

  // h = s · sum for the segment's rows.
  __device__ void StoreShrunk(const float (&sum)[Config::kShrinkN / 2], int row0, int segment,
                              int part, int column0) const {
    const int rank = tables_.rank[part][segment];
    const float scale = FactorsOf(args_, tables_.slot[segment], part)->scale;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = row0 + LaneRow() + 8 * j;
      if (row < tables_.begin[segment] || row >= tables_.begin[segment + 1]) continue;
      __nv_bfloat16* line =
          args_.h + (static_cast<int64_t>(row) * args_.p.shape.parts + part) * args_.ldh;
#pragma unroll
      for (int i = 0; i < Config::kShrinkN / 8; ++i) {
        const int column = column0 + 8 * i + 2 * (Lane() % 4);
        if (column >= rank) continue;
        *reinterpret_cast<__nv_bfloat162*>(line + column) =
            __floats2bfloat162_rn(scale * sum[4 * i + 2 * j], scale * sum[4 * i + 2 * j + 1]);
      }
    }
  }

  // Brings g and bias of a tile near, for the consumers.
  __device__ void WarmL1(int band, int panel) const {
    constexpr int kSector = 8;  // columns that come together
    constexpr int kMostSegments = 8;
    const int column = panel * kN + Lane() * kSector;
    if (Lane() >= kN / kSector || column >= args_.part_begin[args_.p.shape.parts]) return;
    const int part = PartOf(column);
    float sum = args_.p.bias == nullptr ? 0.0f : __ldg(args_.p.bias + column);
    int left = kMostSegments;
#pragma unroll 1
    for (int segment = SegmentOf(min(FirstRow(band), args_.p.rows - 1));
         segment < args_.p.num_segments && HasRows(band, segment) && left > 0; ++segment, --left) {
      if (const float* g = Magnitudes(segment, part); g != nullptr) sum += __ldg(g + column);
    }
    asm volatile("" ::"f"(sum));
  }

  // To be indexed by rows of W; nullptr: 1.
  __device__ const float* Magnitudes(int segment, int part) const {
    if (tables_.rank[part][segment] == 0) return nullptr;
    const float* g = FactorsOf(args_, tables_.slot[segment], part)->g;
    return g == nullptr ? nullptr : g - args_.part_begin[part];
  }

  // A step stores 4 of a warp's 16 rows, 128 bytes of each. First those of the parked sums.
  template <typename T>
  static constexpr int kUnit = 16 / sizeof(T);  // columns that a lane stores
  template <typename T>
  static constexpr int kHalfSteps = 4 * ((kN / 2 + 8 * kUnit<T> - 1) / (8 * kUnit<T>));

  __device__ int Steps() const {
    return 2 * (args_.p.y_fp32 ? kHalfSteps<float> : kHalfSteps<__nv_bfloat16>);
  }

  // Steps [first, end) of the last tile, but no more than there are.
  __device__ void StoreSteps(const float (&kept)[kN / 4], int first, int end) const {
    if (args_.p.y_fp32) {
      StoreStepsOf<float>(kept, first, end);
    } else {
      StoreStepsOf<__nv_bfloat16>(kept, first, end);
    }
  }

  template <typename T>
  __device__ void StoreStepsOf(const float (&kept)[kN / 4], int first, int end) const {
    end = min(end, 2 * kHalfSteps<T>);
#pragma unroll 1
    for (int step = first; step < end; ++step) {
      __syncwarp();
      if (step == kHalfSteps<T>) {
        Park(kept);
        __syncwarp();
      }
      const bool is_second = step < kHalfSteps<T>;
      StoreStep<T>(is_second ? step : step - kHalfSteps<T>, is_second ? kN / 2 : 0);
    }
    __syncwarp();
  }

  // y = g · sum + bias; the parked sums are of the tile's columns from first_column on.
  template <typename T>
  __device__ void StoreStep(int step, int first_column) const {
    constexpr int kUnits = 8 / kUnit<T>;  // of a block
    const int unit = step / 4 * 8 + Lane() % 8;
    const int block = unit / kUnits;
    const int lane_row = step % 4 * 4 + Lane() / 8;
    const int row = stored_row_ + lane_row;
    const int column = stored_column_ + first_column + unit * kUnit<T>;
    const int out = args_.part_begin[args_.p.shape.parts];
    if (block >= Config::kParkedBlocks || row >= args_.p.rows || column >= out) return;
    // Of the lanes that have this row's sums, the first one of the unit's.
    const uint32_t from = parked_ + block * Config::kParkedBlockBytes +
                          (lane_row % 8 * 4 + unit % kUnits * 2) * 16 + lane_row / 8 * 8;
    const float* g = Magnitudes(SegmentOf(row), PartOf(column));
    float2 y[kUnit<T> / 2];
#pragma unroll
    for (int i = 0; i < kUnit<T> / 2; ++i) {
      const float2 sum = LoadSharedPair(from + 16 * i);
      const float2 scale = g == nullptr ? make_float2(1.0f, 1.0f) : Pair(g + column + 2 * i);
      const float2 bias =
          args_.p.bias == nullptr ? make_float2(0.0f, 0.0f) : Pair(args_.p.bias + column + 2 * i);
      y[i] = make_float2(fmaf(scale.x, sum.x, bias.x), fmaf(scale.y, sum.y, bias.y));
    }
    const int64_t to = static_cast<int64_t>(row) * out + column;
    if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<float4*>(static_cast<float*>(args_.p.y) + to) =
          make_float4(y[0].x, y[0].y, y[1].x, y[1].y);
    } else {
      __nv_bfloat162 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(y[i].x, y[i].y);
      *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(args_.p.y) + to) =
          *reinterpret_cast<const uint4*>(pairs);
    }
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
  const uint32_t parked_;  // consumers: the warp's
  const uint32_t full_;
  const uint32_t empty_;
  // The next stage, and the parity of its phase.
  int stage_ = 0;
  uint32_t parity_ = 0;
  // Consumers: the stage whose products may be running, or -1; the tile whose sums are
  // complete.
  int previous_ = -1;
  int stored_row_ = -1;  // the warp's first, or -1
  int stored_column_ = 0;
};

// In clusters of two blocks.
template <int kN>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    PrefillKernel(const __grid_constant__ CUtensorMap w_map,
                  const __grid_constant__ CUtensorMap x_map,
                  const __grid_constant__ CUtensorMap h_map,
                  const __grid_constant__ CUtensorMap h_row_map,
                  const __grid_constant__ PrefillArgs args) {
  using Config = PrefillConfig<kN>;
  using Block = PrefillBlock<kN>;
  extern __shared__ uint8_t dynamic[];
  __shared__ typename Block::Shared shared;
  static_assert(sizeof(shared) <= Config::kStaticBytes);
  if (threadIdx.x == 0) {
    PrefetchTensorMap(&w_map);
    PrefetchTensorMap(&x_map);
    PrefetchTensorMap(&h_map);
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
  Block block(args, shared, (SharedAddress(dynamic) + 1023) / 1024 * 1024);
  if (warp < Config::kConsumerWarps) {
    IncreaseRegisters<Config::kRegistersConsumer>();
    block.Consume();
  } else {
    DecreaseRegisters<Config::kRegistersProducer>();
    if (warp == Config::kConsumerWarps) {
      if (threadIdx.x % 32 == 0) block.ProduceWeights(&w_map);
    } else if (warp == Config::kConsumerWarps + 1) {
      block.ProduceBatch(&x_map, &h_map, &h_row_map);
    }
    __syncwarp();
  }
  // The other block may still be writing and arriving here.
  ClusterBarrier();
}

}  // namespace dorad::kernels
