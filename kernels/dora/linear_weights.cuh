// The warp of a block that fetches W, A and B: linear_project.cuh.
#pragma once

#include <cuda.h>

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
  using Block::ForEachPanel;
  using Block::ForEachRank;
  using Block::ForEachShareStage;
  using Block::ForEachStage;
  using Block::HasPanel;
  using Block::HasPart;
  using Block::lane_;
  using Block::LeadStages;
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
    const int first = FirstChunk(args_.plan, split_);
    const int row = (Cluster() * args_.siblings + sibling_) * kPanel;
    ForEachStage(first, FirstChunk(args_.plan, split_ + 1), [&](int chunk, int count) {
      if (started_ == most) return;
      FetchWeights(w_map, chunk, count, row);
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
      ForEachStage(FirstChunk(args_.plan, split_) + started_ * Config::kStageChunks,
                   FirstChunk(args_.plan, split_ + 1), [&](int chunk, int count) {
                     wait_for_room();
                     FetchWeights(w_map, chunk, count, row);
                   });
      started_ = 0;
      if constexpr (!kAdapted) return;
      if constexpr (Isa::kHasCopyEngine) BarrierWait(SharedAddress(&shared_.acquired), 0);
      ForEachRank(group, [&](const LinearRank& at, int first_chunk, int end_chunk) {
        if (first_chunk == end_chunk) return;  // no rank, so maybe no slot either
        // Those that share a stage come with the batch.
        const bool is_mine = at.log_together == 0 && HasPart(row, at.part);
        const int slot = is_mine ? tables_.slot[at.segment] : 0;  // else any
        const auto b = MatrixOfB<Isa>(args_, slot, at.part);
        ForEachStage(first_chunk, end_chunk, [&](int chunk, int count) {
          wait_for_room();
          if (is_mine) {
            Isa::Expect(ring_.weights_full(), count * Config::kChunkBytes);
            // Rows of other parts are out of bounds: zero.
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
              FetchBoxes<kPanel / kLinearBoxRows>(ring_.weights() + i * Config::kChunkBytes, b,
                                                  (chunk + i) * kLinearStageK,
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
      LinearBox box[Config::kMaxBoxes];
#pragma unroll
      for (int i = 0; i < Config::kMaxBoxes; ++i) {
        if (i < boxes) box[i] = OwnBox(args_, tables_, next + i);
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
            Isa::FetchOnce(ring_.weights() + j * Config::kChunkBytes + i * Config::kBoxBytes,
                           MatrixOfA<Isa>(args_, tables_, box[i]), (chunk + j) * kLinearStageK,
                           box[i].row, ring_.weights_full());
          }
        }
        Isa::Complete(ring_.weights_full());
        ring_.Advance();
        ++stages;
      });
    }
    return stages;
  }

  __device__ void FetchWeights(const typename Isa::Matrix* w_map, int chunk, int count, int row) {
    Isa::Expect(ring_.weights_full(), count * Config::kChunkBytes);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      Isa::FetchOnce(ring_.weights() + i * Config::kChunkBytes, w_map, (chunk + i) * kLinearStageK,
                     row, ring_.weights_full());
    }
    Isa::Complete(ring_.weights_full());
    ring_.Advance();
  }

  // kBoxes adjacent boxes of B. Unrolled: one thread or warp does this for all.
  template <int kBoxes, typename From>
  __device__ void FetchBoxes(uint32_t to, const From& b, int column, int row) const {
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      Isa::FetchOnce(to + i * Config::kBoxBytes, b, column, row + i * kLinearBoxRows,
                     ring_.weights_full());
    }
  }

  int started_ = 0;  // stages of the first panel that Start fetched
};

}  // namespace dorad::kernels
