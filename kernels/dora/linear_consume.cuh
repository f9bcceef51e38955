// The warpgroups of a block that multiply and finish: linear_project.cuh.
#pragma once

#include <cstdint>

#include "kernels/dora/linear_block.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/memory.cuh"
#include "kernels/isa/sm90/cluster.cuh"
#include "kernels/isa/sm90/copy.cuh"
#include "kernels/isa/sm90/wgmma.cuh"

namespace dorad::kernels {

template <typename Isa, int kM, int kPanel, bool kAdapted>
class ProjectConsumers : public ProjectBlock<Isa, kM, kPanel, kAdapted> {
  using Block = ProjectBlock<Isa, kM, kPanel, kAdapted>;
  using Config = typename Block::Config;
  using Group = typename Block::Group;
  using Block::args_;
  using Block::exchange_;
  using Block::finish_;
  using Block::ForEachPanel;
  using Block::ForEachPiece;
  using Block::ForEachRank;
  using Block::HasPanel;
  using Block::HasPart;
  using Block::HasShares;
  using Block::kTileBytes;
  using Block::lane_;
  using Block::LogSiblings;
  using Block::ring_;
  using Block::rows_;
  using Block::shared_;
  using Block::split_;
  using Block::tables_;
  using Block::WaitForTables;
  using Block::x_bytes_;

 public:
  using Block::Block;

  // Consumers: whole warpgroups.
  __device__ void Consume() {
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    const int first_tile = warp / Isa::kGroupWarps * Config::kTiles;
    const int tiles = (rows_.count + 63) / 64;
    if constexpr (Config::kLeadStages == 0) {
      WaitForTables();
      if (HasShares()) MultiplyShare(first_tile, warp);
    }
    uint32_t parity = 0;
    ForEachPanel([&](int group, int row, bool first) {
      float d[Config::kTiles][kValues<kPanel>];
      Clear(d);
      ForEachPiece(first, [&](int begin, int end, bool is_lead) {
        Accumulate(d, end - begin, first_tile, 0, min(Config::kTiles, tiles - first_tile), false);
        if constexpr (Config::kLeadStages > 0) {
          if (!is_lead) return;
          WaitForTables();
          if (HasShares()) MultiplyShare(first_tile, warp);
        }
      });
      if (!HasPanel()) return;
      if constexpr (kAdapted) {
        ForEachRank(group, [&](const LinearRank& at, int first_chunk, int end_chunk) {
          const int begin = max(BeginOf(tables_, at) / 64 - first_tile, 0);
          const int end = min((EndOf(tables_, at) + 63) / 64 - first_tile, Config::kTiles);
          if (begin < end && HasPart(row, at.part)) {
            Accumulate(d, end_chunk - first_chunk, first_tile, begin, end, true);
          } else {
            Skip(end_chunk - first_chunk);
          }
        });
      }
      BarrierWait(SharedAddress(&shared_.staged), parity);
      parity ^= 1;
      if (!Isa::kHasClusters && split_ + 1 < args_.plan.splits) {
        Give(d, first_tile, warp, row);
      } else if (!Isa::kHasClusters || args_.plan.splits == 1) {
        if (!Isa::kHasClusters && split_ > 0) Take(d, first_tile, warp, row);
#pragma unroll
        for (int tile = 0; tile < Config::kTiles; ++tile) {
          ForEachBlock<kPanel>(d[tile], [&](int first, const auto& values) {
            finish_.template Rows<kOwnColumns<kPanel>>(
                values, 64 * (first_tile + tile) + FirstRow(warp) + first, row,
                ColumnPart(warp) * kOwnColumns<kPanel>, warp);
          });
        }
      } else if constexpr (Config::kExchangeBytes != 0) {
        Meet(d, first_tile, warp, row);
      }
      BarrierArrive(SharedAddress(&shared_.finished));
    });
  }

 private:
  // Of a product with kN columns, a warp's part.
  static constexpr int kColumnParts = Isa::kGroupWarps / Isa::kRowWarps;
  template <int kN>
  static constexpr int kOwnColumns = kN / kColumnParts;
  template <int kN>
  static constexpr int kBlockValues = 16 * kOwnColumns<kN> / 32;  // of a lane, of 16 rows
  template <int kN>
  static constexpr int kValues = Isa::kRowBlocks* kBlockValues<kN>;

  __device__ static int ColumnPart(int warp) { return warp % Isa::kGroupWarps / Isa::kRowWarps; }
  // A warp's first row of a tile.
  __device__ static int FirstRow(int warp) {
    return 16 * Isa::kRowBlocks * (warp % Isa::kRowWarps);
  }
  // f(first row, values) for the blocks of 16 rows that a warp has.
  template <int kN, typename F>
  __device__ static void ForEachBlock(const float (&d)[kValues<kN>], F f) {
    if constexpr (Isa::kRowBlocks == 1) {
      f(0, d);
    } else {
#pragma unroll
      for (int block = 0; block < Isa::kRowBlocks; ++block) {
        float values[kBlockValues<kN>];
#pragma unroll
        for (int i = 0; i < kBlockValues<kN>; ++i) values[i] = d[block * kBlockValues<kN> + i];
        f(16 * block, values);
      }
    }
  }
  // Whether this warp has no rows of a tile, where warps multiply by themselves.
  __device__ bool IsIdle(int tile) const {
    if constexpr (Isa::kHasCopyEngine) return false;
    return 64 * tile + FirstRow(static_cast<int>(threadIdx.x / 32)) >= rows_.count;
  }

  // Gives a stage back, to all who fetch into it. One warp.
  __device__ void Release(int stage) const {
    if (LogSiblings() == 0) {
      if (lane_ == 0) BarrierArrive(ring_.Empty(stage));
    } else if (lane_ < 1 << LogSiblings()) {
      BarrierArriveRemote(
          RemoteAddress(ring_.Empty(stage), lane_ << args_.plan.log_splits | split_));
    }
  }

  template <int kSize>
  __device__ static void Clear(float (&d)[Config::kTiles][kSize]) {
#pragma unroll
    for (int tile = 0; tile < Config::kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) d[tile][i] = 0.0f;
    }
  }

  // This warpgroup's part of the block's share of the shrink: of its tiles of the batch.
  __device__ void MultiplyShare(int first_tile, int warp) {
    ForEachGroup<Config::kMaxBoxes>(args_, tables_, [&](const Group& group) {
      // Tensor-core code wants to know its registers: one loop for each case. What it computes of
      // boxes beyond the group's is not used.
      constexpr int kFew = Config::kMaxBoxes == 4 && kM == 1 ? 2 : Config::kMaxBoxes;
      const int boxes = __shfl_sync(0xFFFFFFFF, group.boxes, 0);
      if (group.first_tile >= first_tile + Config::kTiles || group.last_tile < first_tile) {
        Skip(args_.plan.a_chunks);
      } else if (kFew == Config::kMaxBoxes || boxes <= kFew) {
        MultiplyBoxes<kFew>(group, first_tile, warp);
      } else {
        MultiplyBoxes<Config::kMaxBoxes>(group, first_tile, warp);
      }
    });
    __syncwarp();
    if (lane_ == 0) BarrierArrive(SharedAddress(&shared_.share));
  }

  template <int kBoxes>
  __device__ void MultiplyBoxes(const Group& group, int first_tile, int warp) {
    constexpr int kBlocks = kOwnColumns<kBoxes * kLinearBoxRows> / 8;  // of 8 columns, of a warp
    float sums[Config::kTiles][kValues<kBoxes * kLinearBoxRows>];
    Clear(sums);
    // What is computed of tiles that were not fetched is not used.
    AccumulateTiles<kBoxes * kLinearBoxRows, 0, Config::kTiles>(sums, args_.plan.a_chunks,
                                                                first_tile, false);
#pragma unroll
    for (int tile = 0; tile < Config::kTiles; ++tile) {
      if (first_tile + tile < group.first_tile || first_tile + tile > group.last_tile) continue;
#pragma unroll
      for (int part = 0; part < kColumnParts; ++part) {
        if (part != ColumnPart(warp)) continue;
        constexpr int kBoxBlocks = kLinearBoxRows / 8;
#pragma unroll
        for (int i = 0; i < kBoxes; ++i) {
          if (i >= group.boxes) break;
          if constexpr (Isa::kRowBlocks == 1) {
            StoreShare<kBlocks>(args_, tables_, rows_.first, sums[tile],
                                kBoxBlocks * i - kBlocks * part,
                                64 * (first_tile + tile) + FirstRow(warp), group.box[i]);
          } else {
            ForEachBlock<kBoxes * kLinearBoxRows>(sums[tile], [&](int first, const auto& values) {
              StoreShare<kBlocks>(args_, tables_, rows_.first, values,
                                  kBoxBlocks * i - kBlocks * part,
                                  64 * (first_tile + tile) + FirstRow(warp) + first, group.box[i]);
            });
          }
        }
      }
    }
  }

  // Adds the products of the next `chunks` to tiles [begin, end) of the warpgroup's, which begin at
  // the batch's tile `first_tile`; `copied`: threads wrote their batch tiles.
  __device__ void Accumulate(float (&d)[Config::kTiles][kValues<kPanel>], int chunks,
                             int first_tile, int begin, int end, bool copied) {
    // Tensor-core code wants to know its registers: one loop for each case.
    if (Config::kTiles == 1 || (begin == 0 && end == Config::kTiles)) {
      AccumulateTiles<kPanel, 0, Config::kTiles>(d, chunks, first_tile, copied);
    } else if (begin == 0) {
      AccumulateTiles<kPanel, 0, 1>(d, chunks, first_tile, copied);
    } else {
      AccumulateTiles<kPanel, Config::kTiles - 1, 1>(d, chunks, first_tile, copied);
    }
  }

  // kN: rows of W, or of A.
  template <int kN, int kFirst, int kCount>
  __device__ void AccumulateTiles(float (&d)[Config::kTiles][kValues<kN>], int chunks,
                                  int first_tile, bool copied) {
    chunks = __shfl_sync(0xFFFFFFFF, chunks, 0);  // tells the compiler that the warp agrees
#pragma unroll 1
    for (; chunks >= Config::kStageChunks; chunks -= Config::kStageChunks) {
      AccumulateStage<kN, kFirst, kCount, Config::kStageChunks>(d, first_tile, copied);
    }
    if (Config::kStageChunks > 1 && chunks > 0) {
      AccumulateStage<kN, kFirst, kCount, 1>(d, first_tile, copied);
    }
  }

  template <int kN, int kFirst, int kCount, int kChunks>
  __device__ void AccumulateStage(float (&d)[Config::kTiles][kValues<kN>], int first_tile,
                                  bool copied) {
    ring_.WaitFull();
    Isa::Begin(copied);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const auto weights = Isa::Tile(ring_.weights() + chunk * Config::kChunkBytes);
      const uint32_t batch = ring_.batch() + chunk * x_bytes_ + first_tile * kTileBytes;
#pragma unroll
      for (int tile = kFirst; tile < kFirst + kCount; ++tile) {
        if (IsIdle(first_tile + tile)) continue;
        Isa::template Multiply<kN>(d[tile], Isa::Tile(batch + tile * kTileBytes), weights);
      }
    }
    Isa::End();
    Release(ring_.stage);
    ring_.Advance();
  }

  // Gives back stages that hold nothing for this warp.
  __device__ void Skip(int chunks) {
#pragma unroll 1
    for (; chunks > 0; chunks -= Config::kStageChunks) {
      ring_.WaitFull();
      __syncwarp();  // no lane may miss a phase
      Release(ring_.stage);
      ring_.Advance();
    }
  }

  // f(tile, i-th four of this thread's sums, where they are given) of a panel's.
  template <typename F>
  __device__ void ForEachGiven(int first_tile, int warp, int row, F f) const {
    constexpr int kFours = kValues<kPanel> / 4;
    constexpr int kThreads = 32 * Config::kConsumerWarps;
    float4* given =
        args_.given + Given(row) * Config::kTiles * kFours * int64_t{kThreads} + threadIdx.x;
#pragma unroll
    for (int tile = 0; tile < Config::kTiles; ++tile) {
      if (64 * (first_tile + tile) + FirstRow(warp) >= rows_.count) continue;
#pragma unroll
      for (int i = 0; i < kFours; ++i) f(tile, 4 * i, given + (tile * kFours + i) * kThreads);
    }
  }
  __device__ int Given(int row) const {
    return static_cast<int>(blockIdx.y) * args_.plan.panels + row / kPanel;
  }

  // The sums of the first piece of K go to the block of the second one. All consumers.
  __device__ void Give(const float (&d)[Config::kTiles][kValues<kPanel>], int first_tile, int warp,
                       int row) const {
    ForEachGiven(first_tile, warp, row, [&](int tile, int i, float4* to) {
      __stcg(to, make_float4(d[tile][i], d[tile][i + 1], d[tile][i + 2], d[tile][i + 3]));
    });
    NamedBarrier(2, 32 * Config::kConsumerWarps);
    if (threadIdx.x == 0) SignalRelease(args_.is_given + Given(row));
  }
  __device__ void Take(float (&d)[Config::kTiles][kValues<kPanel>], int first_tile, int warp,
                       int row) const {
    if (threadIdx.x == 0) {
      SpinUntil(args_.is_given + Given(row), 1);
      args_.is_given[Given(row)] = 0;
    }
    NamedBarrier(2, 32 * Config::kConsumerWarps);
    ForEachGiven(first_tile, warp, row, [&](int tile, int i, const float4* from) {
      const float4 first = __ldcg(from);
      d[tile][i] += first.x;
      d[tile][i + 1] += first.y;
      d[tile][i + 2] += first.z;
      d[tile][i + 3] += first.w;
    });
  }

  // Each split finishes half of the panel's columns: it sends the sums of the other half to the
  // other one. p0 + p1 does not depend on who adds.
  __device__ void Meet(const float (&d)[Config::kTiles][kPanel / 2], int first_tile, int warp,
                       int row) {
    constexpr int kBlocks = kPanel / 16;  // of 8 columns, of a half
    const uint32_t barrier = SharedAddress(&shared_.met);
    const int rows = args_.p.rows;
    if (threadIdx.x == 0) {
      const int warp_tiles = (rows + 15) / 16;  // of 16 rows
      BarrierArriveExpect(barrier, warp_tiles * kBlocks * 512);
    }
    const uint32_t other_barrier = RemoteAddress(barrier, ClusterRank() ^ 1);
#pragma unroll
    for (int tile = 0; tile < Config::kTiles; ++tile) {
      if (64 * (first_tile + tile) + 16 * (warp % 4) >= rows) continue;
      const uint32_t to = RemoteAddress(Sums(first_tile + tile), ClusterRank() ^ 1);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        float4 value;
        value.x = split_ == 0 ? d[tile][kPanel / 4 + 4 * i] : d[tile][4 * i];
        value.y = split_ == 0 ? d[tile][kPanel / 4 + 4 * i + 1] : d[tile][4 * i + 1];
        value.z = split_ == 0 ? d[tile][kPanel / 4 + 4 * i + 2] : d[tile][4 * i + 2];
        value.w = split_ == 0 ? d[tile][kPanel / 4 + 4 * i + 3] : d[tile][4 * i + 3];
        StoreRemote(to + i * 2048, value, other_barrier);
      }
    }
    BarrierWait(barrier, 0);  // used once: with splits, a block has one panel
#pragma unroll
    for (int tile = 0; tile < Config::kTiles; ++tile) {
      const int batch_row = 64 * (first_tile + tile) + 16 * (warp % 4);
      if (batch_row >= rows) continue;
      float half[kPanel / 4];
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const float4 value = LoadShared(Sums(first_tile + tile) + i * 2048);
        const float other[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          half[4 * i + j] =
              (split_ == 0 ? d[tile][4 * i + j] : d[tile][kPanel / 4 + 4 * i + j]) + other[j];
        }
      }
      finish_.template Rows<kPanel / 2>(half, batch_row, row, split_ * kPanel / 2, warp);
    }
  }

  // Where this thread's sums of a tile of the batch come to lie: blocks of 8 columns, 2048 bytes
  // apart.
  __device__ uint32_t Sums(int tile) const {
    return exchange_ + tile * (kPanel / 16) * 2048 + threadIdx.x % 128 * 16;
  }
};

}  // namespace dorad::kernels
