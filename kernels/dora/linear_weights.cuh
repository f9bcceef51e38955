// The warps of a block that fetch W, A and B: linear_project.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "kernels/dora/linear_block.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/sm90/copy.cuh"

namespace dorad::kernels {

template <typename Isa, int kM, int kPanel, bool kAdapted>
class ProjectWeights : public ProjectBlock<Isa, kM, kPanel, kAdapted> {
  using Block = ProjectBlock<Isa, kM, kPanel, kAdapted>;
  using Config = typename Block::Config;
  using Block::args_;
  using Block::Cluster;
  using Block::EndChunk;
  using Block::FirstChunk;
  using Block::ForEachPanel;
  using Block::ForEachRank;
  using Block::ForEachShareStage;
  using Block::ForEachStage;
  using Block::HasPanel;
  using Block::HasPart;
  using Block::lane_;
  using Block::LeadStages;
  using Block::LogSiblings;
  using Block::ring_;
  using Block::shared_;
  using Block::sibling_;
  using Block::split_;
  using Block::tables_;
  using Block::WaitForTables;

 public:
  using Block::Block;

  // The fetching threads, as soon as the barriers are initialised: the first weights.
  __device__ void Start(const typename Isa::Matrix* w_map) {
    if (!HasPanel()) return;
    const int most = kAdapted ? LeadStages() : args_.flight;
    const int row = ((Cluster() << LogSiblings()) + sibling_) * kPanel;
    const auto rows = RowsOf<kPanel>(w_map, row);
    ForEachStage(FirstChunk(), EndChunk(), [&](int chunk, int count) {
      if (started_ == most) return;
      FetchWeights(rows, chunk, count);
      ++started_;
    });
  }

  // The whole warp of those threads: all later weights.
  __device__ void Produce(const typename Isa::Matrix* w_map) {
    WaitForTables();
    int issued = started_;
    const auto wait_for_room = [&] {
      if (issued >= args_.flight) ring_.WaitArrived(args_.flight);
      ++issued;
      ring_.WaitEmpty();
    };
    ForEachPanel([&](int group, int row, bool first) {
      if (kAdapted && first) {
        if constexpr (Isa::kHasCopyEngine) AcquireShareMaps();
        if (lane_ < Isa::kFetchThreads) issued += ProduceShare();
      }
      if (!HasPanel() || lane_ >= Isa::kFetchThreads) return;
      const auto rows = RowsOf<kPanel>(w_map, row);
      ForEachStage(FirstChunk() + started_ * Config::kStageChunks, EndChunk(),
                   [&](int chunk, int count) {
                     wait_for_room();
                     FetchWeights(rows, chunk, count);
                   });
      started_ = 0;
      if constexpr (!kAdapted) return;
      if constexpr (Isa::kHasCopyEngine) BarrierWait(SharedAddress(&shared_.acquired), 0);
      ForEachRank(group, [&](const LinearRank& at, int first_chunk, int end_chunk) {
        if (first_chunk == end_chunk) return;  // no rank, so maybe no slot either
        // Those that share a stage come with the batch.
        const bool is_mine = at.log_together == 0 && HasPart(row, at.part);
        const int slot = is_mine ? tables_.slot[at.segment] : 0;  // else any
        const auto b =
            BoxesOfB(MatrixOfB<Isa>(args_, slot, at.part), row - args_.part_begin[at.part]);
        ForEachStage(first_chunk, end_chunk, [&](int chunk, int count) {
          wait_for_room();
          if (is_mine) {
            Isa::Expect(ring_.weights_full(), count * Config::kChunkBytes);
            // Rows of other parts are out of bounds: zero.
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
              FetchBoxes(ring_.weights() + i * Config::kChunkBytes, b, (chunk + i) * kLinearStageK,
                         row - args_.part_begin[at.part]);
            }
            Isa::Complete(ring_.weights_full());
          } else {
            Isa::Skip(ring_.weights_full());
          }
          ring_.Advance();
        });
      });
    });
  }

 private:
  // This warp's share of each box.
  template <int kBoxRows, typename From>
  __device__ static typename Isa::Rows RowsOf(const From& from, int row) {
    int share = 0;
    if constexpr (Config::kWeightWarps > 1) {
      share = static_cast<int>(threadIdx.x / 32) - Config::kConsumerWarps;
    }
    return Isa::RowsOf(from, row, kBoxRows, share, Config::kWeightWarps);
  }
  template <int kBoxRows>
  static constexpr int kFours = kBoxRows / Config::kWeightWarps / 16;

  // The whole warp makes the copy engine read the maps of this block's part of A again.
  __device__ void AcquireShareMaps() const {
#pragma unroll 1
    for (int i = tables_.share[0] + lane_; i < tables_.share[1]; i += 32) {
      AcquireTensorMap(OwnBox(args_, tables_, i).map);
    }
    __syncwarp();
  }

  // The threads that fetch weights: the block's part of A. Returns the number of stages.
  __device__ int ProduceShare() {
    int stages = 0;
    const int end = tables_.share[1];
#pragma unroll 1
    for (int next = tables_.share[0]; next < end; next += Config::kMaxBoxes) {
      const int boxes = min(Config::kMaxBoxes, end - next);
      BoxOfA box[Config::kMaxBoxes];
#pragma unroll
      for (int i = 0; i < Config::kMaxBoxes; ++i) {
        if (i < boxes) box[i] = Found(OwnBox(args_, tables_, next + i));
      }
      // Stages of a few boxes are small: as many of them in flight as the ring has.
      ForEachShareStage([&](int chunk, int count) {
        ring_.WaitEmpty();
        Isa::Expect(ring_.weights_full(), count * boxes * Config::kBoxBytes);
#pragma unroll
        for (int i = 0; i < Config::kMaxBoxes; ++i) {
          if (i >= boxes) break;
#pragma unroll 1
          for (int j = 0; j < count; ++j) {
            Isa::template FetchOnce<kFours<kLinearBoxRows>>(
                ring_.weights() + j * Config::kChunkBytes + i * Config::kBoxBytes, Rows(box[i]),
                (chunk + j) * kLinearStageK, ring_.weights_full());
          }
        }
        Isa::Complete(ring_.weights_full());
        ring_.Advance();
        ++stages;
      });
    }
    return stages;
  }

  __device__ void FetchWeights(const typename Isa::Rows& rows, int chunk, int count) {
    Isa::Expect(ring_.weights_full(), count * Config::kChunkBytes);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      Isa::template FetchOnce<kFours<kPanel>>(ring_.weights() + i * Config::kChunkBytes, rows,
                                              (chunk + i) * kLinearStageK, ring_.weights_full());
    }
    Isa::Complete(ring_.weights_full());
    ring_.Advance();
  }

  // What is found once for all stages. Of the copy engine's boxes there is nothing to find.
  using BoxOfA = std::conditional_t<Isa::kHasCopyEngine, LinearBox, typename Isa::Rows>;
  __device__ BoxOfA Found(const LinearBox& box) const {
    if constexpr (Isa::kHasCopyEngine) {
      return box;
    } else {
      return RowsOf<kLinearBoxRows>(MatrixOfA<Isa>(args_, tables_, box), box.row);
    }
  }
  __device__ typename Isa::Rows Rows(const BoxOfA& box) const {
    if constexpr (Isa::kHasCopyEngine) {
      return RowsOf<kLinearBoxRows>(MatrixOfA<Isa>(args_, tables_, box), box.row);
    } else {
      return box;
    }
  }
  struct Boxes {
    typename Isa::Rows box[kPanel / kLinearBoxRows];
  };
  template <typename From>
  __device__ static auto BoxesOfB(const From& b, int row) {
    if constexpr (Isa::kHasCopyEngine) {
      return b;
    } else {
      Boxes boxes;
#pragma unroll
      for (int i = 0; i < kPanel / kLinearBoxRows; ++i) {
        boxes.box[i] = RowsOf<kLinearBoxRows>(b, row + i * kLinearBoxRows);
      }
      return boxes;
    }
  }
  // A panel's rows of B, from `row` on. Unrolled: one thread or warp does this for all.
  template <typename From>
  __device__ void FetchBoxes(uint32_t to, const From& b, int column, int row) const {
#pragma unroll
    for (int i = 0; i < kPanel / kLinearBoxRows; ++i) {
      typename Isa::Rows rows;
      if constexpr (Isa::kHasCopyEngine) {
        rows = RowsOf<kLinearBoxRows>(b, row + i * kLinearBoxRows);
      } else {
        rows = b.box[i];
      }
      Isa::template FetchOnce<kFours<kLinearBoxRows>>(to + i * Config::kBoxBytes, rows, column,
                                                      ring_.weights_full());
    }
  }

  int started_ = 0;  // stages of the first panel that Start fetched
};

}  // namespace dorad::kernels
