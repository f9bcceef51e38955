// The warps of a block that fetch x, add up h and copy it: linear_project.cuh.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "kernels/dora/linear_block.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/memory.cuh"
#include "kernels/isa/sm90/copy.cuh"

namespace dorad::kernels {

template <typename Isa, int kM, int kPanel, bool kAdapted>
class ProjectBatch : public ProjectBlock<Isa, kM, kPanel, kAdapted> {
  using Block = ProjectBlock<Isa, kM, kPanel, kAdapted>;
  using Config = typename Block::Config;
  using Group = typename Block::Group;
  using Block::args_;
  using Block::finish_;
  using Block::ForEachPanel;
  using Block::ForEachPiece;
  using Block::ForEachRank;
  using Block::ForEachShareStage;
  using Block::ForEachStage;
  using Block::HasPanel;
  using Block::HasPart;
  using Block::HasShares;
  using Block::kTileBytes;
  using Block::lane_;
  using Block::LogSiblings;
  using Block::ring_;
  using Block::rows_;
  using Block::shared_;
  using Block::sibling_;
  using Block::split_;
  using Block::tables_;
  using Block::WaitForTables;
  using Block::x_bytes_;

 public:
  using Block::Block;

  // Warp `producer` of kBatchWarps. x_map has boxes of x_rows / siblings rows, x_tile_map those of
  // min(64, x_rows).
  __device__ void Produce(const typename Isa::Matrix* x_map, const typename Isa::Matrix* x_tile_map,
                          int producer) {
    const auto own_x = OwnRows(x_map);
    const auto own_x_tile = OwnRows(x_tile_map);
    WaitForPrevious();
    // A stage of x: the first warps'.
    const auto produce = [&](uint32_t bytes, auto copy) {
      if (Config::IsOneOfX(producer)) {
        ring_.WaitEmpty();
        __syncwarp();
        if (lane_ < Isa::kFetchThreads) {
          Isa::Expect(ring_.batch_full(), bytes);
          copy();
          Isa::Complete(ring_.batch_full());
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
                Isa::Fetch(ring_.batch() + i * x_bytes_ + tile * kTileBytes,
                           Isa::RowsOf(own_x_tile, tile * 64, min(64, args_.x_rows), producer,
                                       Config::kXWarps),
                           (chunk + i) * kLinearStageK, ring_.batch_full());
              }
            }
          });
        });
      });
    };
    const int box_rows = args_.x_rows >> LogSiblings();
    uint16_t blocks = 0;
#pragma unroll 1
    for (int i = 0; i < 1 << LogSiblings(); ++i) {
      blocks |= 1 << (i << args_.plan.log_splits | split_);
    }
    const typename Isa::Rows x_rows =
        Isa::RowsOf(own_x, 0, args_.x_rows, producer, Config::kXWarps);
    const auto produce_x = [&](int begin, int end) {
      ForEachStage(begin, end, [&](int chunk, int count) {
        produce(count * x_bytes_, [&] {
#pragma unroll 1
          for (int i = 0; i < count; ++i) {
            const uint32_t to = ring_.batch() + i * x_bytes_;
            const int column = (chunk + i) * kLinearStageK;
            if (LogSiblings() == 0) {
              Isa::Fetch(to, x_rows, column, ring_.batch_full());
            } else if constexpr (Isa::kHasClusters) {
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
      if (producer >= Config::kXWarps && HasPanel()) {
        if (Isa::kHasCopyEngine && kAdapted && first && producer == 1) AcquireRankMaps();
        StageFinish(row, panel++, producer - Config::kXWarps);
      }
      ForEachPiece(first, [&](int begin, int end, bool is_lead) {
        produce_x(begin, end);
        if (!is_lead) return;
        WaitForTables();
        if (!HasShares()) return;
        produce_share();
        if (producer >= Config::kXWarps) AddH(producer - Config::kXWarps);
      });
      if (!HasPanel()) return;
      if constexpr (!kAdapted) return;
      bool has_stages = false;
      bool has_met = false;
      int turn = 0;
      ForEachRank(group, [&](const LinearRank& at, int first_chunk, int end_chunk) {
        const bool has_part = HasPart(row, at.part);
        ForEachStage(first_chunk, end_chunk, [&](int chunk, int count) {
          has_stages = true;
          if (turn == producer) {
            // Addresses before the wait for h.
            Rows rows = RowsOfH(ring_.batch(), at, chunk * kLinearStageK);
            if (!has_met) MeetForH(producer);
            has_met = true;
            ring_.WaitEmpty();
            // One loop for h and B: code comes from memory, too.
            const int copies = !has_part ? 0 : at.log_together > 0 ? count + 1 : count;
#pragma unroll 1
            for (int i = 0; i < copies; ++i) {
              if (i == count) {
                rows = RowsOfB(ring_.weights(), at, row);
              } else if (i > 0) {
                rows = RowsOfH(ring_.batch() + i * x_bytes_, at, (chunk + i) * kLinearStageK);
              }
              Copy(rows);
            }
            BarrierHoldForCopies(ring_.batch_full());
            __syncwarp();
            if (Config::IsOneOfX(lane_)) BarrierArrive(ring_.batch_full());  // for all of them
          }
          if (++turn == turns) turn = 0;
          ring_.Advance();
        });
      });
      if (has_stages && !has_met) MeetForH(producer);
    });
    if (HasShares() && producer == Config::kXWarps && lane_ == 0) Leave();
  }

 private:
  // The block's rows of x.
  __device__ auto OwnRows(const typename Isa::Matrix* x) const {
    if constexpr (Isa::kHasCopyEngine) {
      return x;
    } else {
      typename Isa::Matrix own = *x;
      own.data += static_cast<int64_t>(rows_.first) * own.ld;
      own.rows = rows_.count;
      return own;
    }
  }

  // One warp makes the copy engine read the maps of B anew, once for all panels.
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
      SignalRelease(&SignalsOf<Isa>(args_)->shares);
      SpinUntil(&SignalsOf<Isa>(args_)->shares, gridDim.x);
    }
    NamedBarrier(3, 32 * kAdders);
    // A few sums are spread over multiprocessors.
    AddShares<Config::kAddAtOnce>(args_, tables_, rows_,
                                  static_cast<int>(adder * gridDim.x + blockIdx.x),
                                  static_cast<int>(gridDim.x) * kAdders);
    NamedBarrier(3, 32 * kAdders);
    if (leads) SignalRelease(&SignalsOf<Isa>(args_)->h);
  }

  // All producers of the batch, before a panel's first stage of h: until all of h is there, and the
  // one who fetches x has come this far. The others waited for no stage since, and a barrier tells
  // the last two phases apart only.
  __device__ void MeetForH(int producer) const {
    if (producer == Config::kXWarps && lane_ == 0) SpinUntil(&SignalsOf<Isa>(args_)->h, gridDim.x);
    NamedBarrier(4, 32 * Config::kBatchWarps);
  }

  // The thread that waits for signals, when it needs none any more: the last block leaves them as
  // it found them.
  __device__ void Leave() const {
    if (atomicAdd(&SignalsOf<Isa>(args_)->left, 1) == gridDim.x - 1) {
      *SignalsOf<Isa>(args_) = LinearSignals();
    }
  }

  // The segment and the column of its rank that this lane copies, of a stage from column k0 on.
  struct Column {
    int segment;
    int k;
    bool has_rank;
  };
  __device__ Column ColumnAt(const LinearRank& at, int k0) const {
    const int column = lane_ % 8 * 8;
    const int i = column >> at.log_columns();
    const int segment = at.segment + i;
    const int k = k0 + column - (i << at.log_columns());
    return {segment, k, k < tables_.rank[at.part][segment]};
  }

  // Rows that a warp copies into a stage, four at a time: [begin, begin + count) as they are, the
  // others as zeros.
  struct Rows {
    uint32_t to;                // of the lane's first one
    const __nv_bfloat16* from;  // the same
    int64_t step;               // elements between four rows
    int row;                    // the lane's first one
    int end;
    int begin;
    uint32_t count;
  };

  // Columns k0.. of h in `tile`, where rows of other segments are zero: of the tiles that have rows
  // of the segments.
  __device__ Rows RowsOfH(uint32_t tile, const LinearRank& at, int k0) const {
    const Column column = ColumnAt(at, k0);
    const int begin = tables_.begin[column.segment];
    const int row = BeginOf(tables_, at) / 64 * 64 + lane_ / 8;
    return {tile + row * 128 + ((lane_ ^ row) % 8 << 4),
            args_.h +
                (static_cast<int64_t>(at.part) * args_.p.rows + rows_.first + row) * args_.ldh +
                column.k,
            4 * static_cast<int64_t>(args_.ldh),
            row,
            min((EndOf(tables_, at) + 63) / 64 * 64, args_.x_rows),
            begin,
            column.has_rank ? static_cast<uint32_t>(tables_.end[column.segment] - begin) : 0};
  }

  // A panel's rows, from `w_row` of W on, of factors that share a stage, as the copy engine would
  // place them; rows of other parts are zero.
  __device__ Rows RowsOfB(uint32_t tile, const LinearRank& at, int w_row) const {
    const Column column = ColumnAt(at, 0);
    const int slot = column.has_rank ? tables_.slot[column.segment] : 0;  // else any
    const DoraFactors& f = args_.p.table.factors[ModuleIndex(args_, slot, at.part)];
    const int row = w_row - args_.part_begin[at.part] + lane_ / 8;
    return {tile + lane_ / 8 * 128 + ((lane_ ^ lane_ / 8) % 8 << 4),
            f.b + static_cast<int64_t>(row) * f.ldb + column.k,
            4 * static_cast<int64_t>(f.ldb),
            row,
            row - lane_ / 8 + kPanel,
            0,
            column.has_rank ? static_cast<uint32_t>(args_.p.shape.out[at.part]) : 0};
  }

  __device__ void Copy(Rows rows) const {
#pragma unroll 4
    for (; rows.row < rows.end; rows.row += 4) {
      const bool valid = static_cast<uint32_t>(rows.row - rows.begin) < rows.count;
      CopyAsync16(rows.to, valid ? rows.from : args_.h, valid);
      rows.from += rows.step;
      rows.to = (rows.to + 4 * 128) ^ 64;  // the swizzle of the row four further on
    }
  }
};

}  // namespace dorad::kernels
