// A block of Hopper's kernel behind DoraLinearPrefill: the walks over panels and tiles that its
// roles share, and the ring of stages. Consumers are in linear_prefill_consume.cuh, producers in
// linear_prefill_produce.cuh, stores in linear_prefill_store.cuh. Part of
// linear_prefill_kernel.cuh.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/common/search.cuh"
#include "kernels/dora/linear_prefill_args.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/sm90/cluster.cuh"
#include "kernels/pipeline/ring.cuh"

namespace dorad::kernels {

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
        stored_(SharedAddress(shared.stored)),
        slices_(ShrinkSlices(args, static_cast<int>(shared.tables.panels),
                             static_cast<int>(gridDim.x) / 2, kN)) {}

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

  // One thread. kSharesRows: args.shares_rows, for short code: what one thread does for each stage
  // bounds the stream.
  template <bool kSharesRows>
  __device__ void ProduceWeights(const CUtensorMap* w_map);

  // One warp. x_map and h_map have boxes of half a tile where rows are shared, else of a tile.
  template <bool kSharesRows>
  __device__ void ProduceBatch(const CUtensorMap* x_map, const CUtensorMap* h_map);

  // Consumers: whole warpgroups.
  __device__ void Consume();

  // Whole warps, one for each warpgroup of consumers.
  __device__ void Store(int group) {
    WaitForPrevious();
    const int first_tile = ForEachShrink([](const Panel&, int) {});
    if (slices_ > 1) AddShares(group);
    ForEachTile(first_tile, [&](const Tile& tile) {
      if (tile.is_last) return;
      const int row = TileRow(tile.band) + 64 * group;
      const int column = TileColumn(tile.panel);
      StoreHalf(group, row, column + kN / 2);
      StoreHalf(group, row, column);
    });
  }

 private:
  static constexpr uint16_t kBothBlocks = 3;
  static constexpr int kConsumers = 32 * Config::kConsumerWarps;  // threads

  // What a cluster computes of a tile: pieces [begin, end) of K, all or one. With one it ends with
  // the sums of that half of the tile's columns, from both pieces.
  struct Tile {
    int band;
    int panel;
    int begin;
    int end;
    int index;     // of all
    bool is_last;  // of the cluster
  };

  // A tile's second half is parked at its end, the first one as soon as that is stored: while the
  // first piece of the next tile is multiplied, or before what follows. Of the last tile consumers
  // store their own rows, which is faster.
  __device__ void ConsumeTiles(int first_tile);

  // Goes on over the split's share of the ranks. Of a stage of h, rows of other segments are zeroed
  // here: fetched one by one, the segment's own would take longer than their products.
  __device__ void MultiplyRanks(float (&d)[kN / 2], const Tile& tile, int split);

  // Of the stage's rows of this warpgroup, those outside of [begin, end).
  __device__ void ZeroOthers(int begin, int end) const;

  __device__ static int Lane() { return threadIdx.x % 32; }
  // Of the consumers.
  __device__ static int WarpGroup() { return static_cast<int>(threadIdx.x / 128); }
  // Of the block in its cluster.
  __device__ static int BlockRank() { return blockIdx.x % 2; }
  // Whether some of 16 rows of the batch are the segment's.
  __device__ bool HasRows(int segment, int row) const {
    return row < tables_.begin[segment + 1] && row + 16 > tables_.begin[segment];
  }
  // Of the shrink: the block's first row of the batch.
  __device__ static int FirstRow(int band) {
    return band * kPrefillBandRows + BlockRank() * kPrefillTileRows;
  }
  // Of a tile: a block's first row of the batch, and this block's of W. The last tiles overlap
  // those before them: rows beyond the batch would take longer to fetch. Both store the same.
  __device__ int TileRow(int band, int block) const {
    const int row = args_.shares_rows ? band * kPrefillTileRows
                                      : band * kPrefillBandRows + block * kPrefillTileRows;
    return max(min(row, args_.p.rows - kPrefillTileRows), 0);
  }
  __device__ int TileRow(int band) const { return TileRow(band, BlockRank()); }
  __device__ int TileColumn(int panel) const {
    return (args_.shares_rows ? 2 * panel + BlockRank() : panel) * kN;
  }
  // Consumers: of the tile, the first of the two rows (the other is 8 on) of the lane.
  __device__ static int LaneRow() { return threadIdx.x / 32 * 16 + Lane() / 4; }

  __device__ int FirstChunk(int split) const {
    return args_.plan.chunks * split >> args_.plan.log_splits;
  }

  __device__ int SegmentOf(int row) const {
    return LastNotAfter(args_.p.num_segments, row,
                        [this](int segment) { return tables_.begin[segment]; });
  }

  // The walks below are the same in every role and in both blocks of a cluster.

  // A panel of the shrink: rows of A for a segment's rows of a band.
  struct Panel {
    int index;  // of all
    int band;
    int segment;
    int part;
    int column;  // the first one of h
  };

  // f(panel, piece) for each panel in `pieces`, dealt out: the next-th, and every step-th on.
  // Returns what `next` has become beyond the last one.
  template <typename F>
  __device__ int ForEachPiece(int next, int step, int pieces, F f) const {
    if (tables_.panels == 0) return next;
    int base = 0;
    int panels = 0;  // before
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
          const int count = CeilDiv(tables_.rank[part][segment], Config::kShrinkN);
          base += count * pieces;
#pragma unroll 1
          for (; next < base; next += step) {
            const int from_end = base - 1 - next;
            const int panel = from_end / pieces;
            f(Panel{panels + panel, band, segment, part, panel * Config::kShrinkN},
              from_end - panel * pieces);
          }
          panels += count;
        }
      }
    }
    return next - base;
  }

  // f(panel, slice of K). Returns the cluster's first tile of y: tiles are dealt on where the
  // panels end.
  template <typename F>
  __device__ int ForEachShrink(F f) const {
    return ForEachPiece(blockIdx.x / 2, gridDim.x / 2, slices_, f);
  }

  // The chunks of a slice.
  __device__ int ShrinkBegin(int slice) const { return slice * args_.plan.a_chunks; }
  __device__ int ShrinkEnd(int slice) const {
    return slices_ == 1 ? args_.plan.chunks : min(ShrinkBegin(slice + 1), args_.plan.chunks);
  }

  // f(tile)
  template <typename F>
  __device__ void ForEachTile(int first, F f) const {
    const int items = TileItems(args_);
#pragma unroll 1
    for (int item = first; item < items; item += gridDim.x / 2) {
      const int index = args_.divides ? item / 2 : item;
      const PrefillTile at = TileAt(args_, index);
      const int begin = args_.divides ? item % 2 : 0;
      f(Tile{at.band, at.panel, begin, args_.divides ? begin + 1 : args_.plan.splits, index,
             item + static_cast<int>(gridDim.x / 2) >= items});
    }
  }

  // f(segment, part, first chunk, end) of columns of B that the split's sum goes on over, for the
  // tiles of both blocks.
  template <typename F>
  __device__ void ForEachRankRange(const Tile& tile, int split, F f) const {
    if (tables_.panels == 0) return;
    const int blocks = args_.shares_rows ? 2 : 1;
    const int row = TileRow(tile.band, 0);
    const int row_end = TileRow(tile.band, 1) + kPrefillTileRows;
    const int w_row = tile.panel * blocks * kN;
    const int w_end = w_row + blocks * kN;
#pragma unroll 1
    for (int segment = SegmentOf(row);
         segment < args_.p.num_segments && tables_.begin[segment] < row_end; ++segment) {
#pragma unroll 1
      for (int part = 0; part < args_.p.shape.parts; ++part) {
        if (w_row >= args_.part_begin[part + 1] || w_end <= args_.part_begin[part]) continue;
        const int chunks = CeilDiv(tables_.rank[part][segment], kLinearStageK);
        const int first = chunks * split >> args_.plan.log_splits;
        const int end = chunks * (split + 1) >> args_.plan.log_splits;
        if (first < end) f(segment, part, first, end);
      }
    }
  }

  template <typename Ring>
  __device__ uint32_t Stage() const {
    return ring_ + at_.stage * Ring::kStageBytes;
  }
  template <typename Ring>
  __device__ uint32_t Full() const {
    return full_ + 8 * (Ring::kFirst + at_.stage);
  }
  template <typename Ring>
  __device__ uint32_t Empty(int stage) const {
    return empty_ + 8 * (Ring::kFirst + stage);
  }

  template <typename Ring>
  __device__ void Advance() {
    at_.Advance(Ring::kStages);
  }

  template <typename Ring>
  __device__ void WaitEmpty() const {
    BarrierWait(Empty<Ring>(at_.stage), at_.parity ^ 1);
  }

  // A producer: from the shrink's ring to the one that takes its place, when all is consumed.
  __device__ void LeaveShrink();

  // The map of a segment's A (factor 0) or B (1). The weight producer.
  __device__ const CUtensorMap* Acquired(int segment, int part, int factor);

  // Boxes of kLinearBoxRows rows into the next stage. kShared: of both blocks, which fetch half of
  // them each.
  template <typename Ring, bool kShared>
  __device__ void ProduceBoxes(const CUtensorMap* map, int chunk, int row, int boxes);

  // The rows of x or h of the block's tile, from `row` on, in boxes of kBoxRows. kShared: a box of
  // each block, for both. One warp.
  template <typename Ring, int kBoxRows, bool kShared>
  __device__ void ProduceRows(const CUtensorMap* map, int column, int row);

  __device__ void WaitForH() const;

  // The warpgroup's rows of the batch in the next stage.
  template <typename Ring>
  __device__ uint32_t Batch() const {
    return Stage<Ring>() + WarpGroup() * 64 * 2 * kLinearStageK;
  }

  // Starts the products of the next `stages`, `before` and `between` before and after those of
  // each, and waits for all but the last. fresh: d begins at zero.
  template <typename Ring, int kColumns, typename F, typename G>
  __device__ void Multiply(float (&d)[kColumns / 2], int stages, bool fresh, F before, G between);

  // Waits for the products of the last stage.
  template <typename Ring>
  __device__ void Drain();

  // Gives back stages that hold nothing for this block. They may be the whole ring: the one
  // before them has to go back first.
  template <typename Ring>
  __device__ void Skip(int stages);

  // The stage is this warp's no longer, in neither block: the other one writes here too.
  template <typename Ring>
  __device__ void Release(int stage) const {
    if (Lane() < 2) BarrierArriveRemote(RemoteAddress(Empty<Ring>(stage), Lane()));
  }

  // Consumers: gives the other cluster what it lacks of its half of the tile's columns.
  // `half`: this cluster's, complete.
  __device__ void Exchange(float (&half)[kN / 4], const float (&d)[kN / 2], const Tile& tile) const;

  // Where this thread's sums over a piece are, four for each thread at a time.
  __device__ float4* GivenAt(int tile, int piece) const {
    constexpr int kFours = kN / 16;
    return reinterpret_cast<float4*>(args_.given) +
           ((tile * 2 + piece) * 2 + BlockRank()) * kFours * kConsumers + threadIdx.x;
  }

  // Where this warp parks its sums, with those of all at `sums`.
  __device__ static uint32_t Parked(uint32_t sums) {
    return sums + threadIdx.x / 32 * Config::kParkedBytes;
  }
  // And this thread those of 8 columns.
  __device__ static uint32_t ParkedAt(uint32_t sums, int block) {
    return Parked(sums) + block * Config::kParkedBlockBytes + Lane() * 16;
  }

  // Consumers: stores this warp's rows of a half of the tile that is parked at `sums`.
  __device__ void StoreOwn(uint32_t sums, const Tile& tile, int half) const {
    StoreParked(Parked(sums), 1, TileRow(tile.band) + static_cast<int>(threadIdx.x / 32 * 16),
                TileColumn(tile.panel) + half * (kN / 2));
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
  __device__ void Keep(float (&kept)[kN / 4], const float (&d)[kN / 2]) const;

  __device__ void Add(float (&kept)[kN / 4], const float (&d)[kN / 2]) const;

  __device__ static void Park(uint32_t to, const float* sums);

  // h = s · sum for the segment's rows, from `first` columns into the panel on. row: of the first
  // of the lane's two (the other is 8 on). Few wide stores: many narrow ones stand in the way of
  // all that the multiprocessor's other warps ask of memory.
  template <int kSums>
  __device__ void StoreShrunk(const float (&sum)[kSums], int row, const Panel& panel,
                              int first) const;

  // Where a thread's sums over a slice are, four at a time, for the block of that rank.
  __device__ float4* ShareOf(int panel, int slice, int block, int four, int thread) const {
    constexpr int kFours = Config::kShrinkN / 8;
    return reinterpret_cast<float4*>(args_.shares) +
           (((panel * slices_ + slice) * 2 + block) * kFours + four) * kConsumers + thread;
  }

  // Consumers: the sums over a slice.
  __device__ void StoreShare(const float (&sum)[Config::kShrinkN / 2], const Panel& panel,
                             int slice) const;

  // Storers: add up some of h, in the order of K, once all shares are there. Meanwhile consumers
  // multiply.
  __device__ void AddShares(int storer) const;

  // To be indexed by rows of W; nullptr: 1.
  __device__ const float* Magnitudes(int segment, int part) const;

  // y = g · sum + bias for the parked sums of a warpgroup: 64 rows from row0 on, half of a panel's
  // columns from column0 on. The storer.
  __device__ void StoreHalf(int group, int row0, int column0);

  // The same of `warps` warps' sums, 16 rows each.
  __device__ void StoreParked(uint32_t sums, int warps, int row0, int column0) const;

  // 128 bytes of 4 rows at a time: a lane has 16 bytes, of the same columns in every fourth row.
  template <typename T>
  __device__ void StoreColumns(uint32_t sums, int warps, int row0, int column0) const;

  __device__ static void StoreUnit(float* to, const float2 (&y)[2]) {
    *reinterpret_cast<float4*>(to) = make_float4(y[0].x, y[0].y, y[1].x, y[1].y);
  }
  __device__ static void StoreUnit(__nv_bfloat16* to, const float2 (&y)[4]) {
    *reinterpret_cast<uint4*>(to) = make_uint4(PackPair(y[0].x, y[0].y), PackPair(y[1].x, y[1].y),
                                               PackPair(y[2].x, y[2].y), PackPair(y[3].x, y[3].y));
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
  const int slices_;  // of the shrink
  RingPosition at_;
  // Consumers and storers: of the phase that parks the next half.
  uint32_t half_parity_ = 0;
  // Consumers: the stage whose products may be running, or -1.
  int previous_ = -1;
};

}  // namespace dorad::kernels
