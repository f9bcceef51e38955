// The form of every GPU: warps that all fetch, multiply and reduce. One ring of stages takes what
// they need in order: the steps over K of 128 columns of D, then the tile of Z for these, and so
// on. Each of two groups of four warps has half of the tile's rows. Internal to norm_gemm_mma.cu.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/dora/norm_gemm.h"
#include "kernels/dora/norm_gemm_items.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/memory.cuh"
#include "kernels/isa/mma/isa.cuh"
#include "kernels/isa/mma/matrix.h"
#include "kernels/pipeline/ring.cuh"

namespace dorad::kernels::norm {

using PlainParams = Params<PlainMatrix>;

constexpr int kMmaThreads = 256;
constexpr int kMmaStages = 3;
constexpr int kColumns = 128;                // of D at once
constexpr int kHalfBytes = 128 * kBoxBytes;  // of a stage: X and Y, or the halves of Z
constexpr int kWarpRows = 16;                // of each half, fetched by a warp
constexpr int kStageBytes = 2 * kHalfBytes;
constexpr int kMmaSharedBytes = kMmaStages * kStageBytes + kAlignment;
static_assert(kMmaSharedBytes <= 98 * 1024);

template <Reduction kind_, int tile_n_, bool z_by_n_ = false>
struct MmaConfig : Tiling<kind_, tile_n_, z_by_n_> {
  static constexpr bool has_z = kind_ != Reduction::kStore;
  // Z: halves of 64 columns. By N: halves of 64 rows of D, one for each group of warps.
  static constexpr int z_box_bytes = z_by_n_ ? kHalfBytes / 2 : kHalfBytes;
  static constexpr int z_group_bytes = kHalfBytes;
  static_assert(tile_n_ % kColumns == 0);
};

// The parts of an item's columns; those beyond D are left out.
template <typename C>
__device__ inline uint32_t PartsOf(const Item& item, const Problem& problem) {
  const uint32_t left = (problem.n - item.n + kColumns - 1) / kColumns;
  return std::min(left, static_cast<uint32_t>(C::tile_n / kColumns));
}

// Fills one stage after the other. All threads.
template <typename C>
class Fetcher {
 public:
  // full: the stages' barriers, at which each warp arrives.
  __device__ Fetcher(const PlainParams& p, uint32_t stages, uint32_t full)
      : p_(p), stages_(stages), full_(full), index_(blockIdx.x) {
    Begin();
  }

  // The next stage of all, if there is one more.
  __device__ void Next() {
    if (index_ >= p_.items) return;
    const auto& maps = p_.maps[item_.problem];
    const Problem& problem = p_.problems[item_.problem];
    const int warp = static_cast<int>(threadIdx.x / 32);
    const uint32_t to = stages_ + stage_ * kStageBytes + warp * kWarpRows * kBoxBytes;
    const int row = warp * kWarpRows;
    const auto m = static_cast<int>(item_.m);
    const auto n = static_cast<int>(item_.n + part_ * kColumns);
    if (step_ < item_.step_end) {
      const auto k = static_cast<int>(step_ * kStepK);
      FetchRows(to, maps.x, static_cast<int>(step_ % problem.period_steps * kStepK), m + row);
      if constexpr (C::y_by_k) {
        // Two blocks of 64 columns.
        FetchRows(to + kHalfBytes, maps.y, n + row / kStepK * 64, k + row % kStepK);
      } else {
        FetchRows(to + kHalfBytes, maps.y, k, n + row);
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (C::z_by_n) {
          FetchRows(to + half * kHalfBytes, maps.z, m + 64 * half, n + row);
        } else {
          FetchRows(to + half * kHalfBytes, maps.z, n + 64 * half, m + row);
        }
      }
    }
    MmaIsa<4>::Complete(full_ + 8 * stage_);
    stage_ = stage_ + 1 == kMmaStages ? 0 : stage_ + 1;
    Advance();
  }

 private:
  // For a warp: 16 rows of 64 elements, whose 16-byte pieces lie in the swizzle.
  __device__ static void FetchRows(uint32_t to, const PlainMatrix& from, int column, int row) {
    constexpr int kRows = 4;  // at once: eight lanes a row
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int piece = lane % 8;
    const int k = column + piece * 8;
    const int bytes = max(min(from.columns - k, 8), 0) * 2;
#pragma unroll
    for (int r = lane / 8; r < kWarpRows; r += kRows) {
      const bool valid = bytes > 0 && row + r < from.rows;
      const __nv_bfloat16* source =
          valid ? from.data + static_cast<int64_t>(row + r) * from.ld + k : from.data;
      CopyAsyncPart(to + r * kBoxBytes + ((piece ^ r % 8) << 4), source, valid ? bytes : 0);
    }
  }

  __device__ void Begin() {
    if (index_ >= p_.items) return;
    item_ = ItemOf<C>(p_, index_);
    step_ = item_.step_begin;
    part_ = 0;
  }

  // A part: the steps, and one more for Z.
  __device__ void Advance() {
    if (++step_ < item_.step_end + (C::has_z ? 1 : 0)) return;
    step_ = item_.step_begin;
    if (++part_ < PartsOf<C>(item_, p_.problems[item_.problem])) return;
    index_ += gridDim.x;
    Begin();
  }

  const PlainParams& p_;
  const uint32_t stages_;
  const uint32_t full_;
  uint32_t index_;
  Item item_;
  uint32_t part_ = 0;
  uint32_t step_ = 0;
  uint32_t stage_ = 0;
};

// The kernel. stages: shared memory, kMmaStages stages, aligned to kAlignment; full: as many
// barriers, 8 bytes each.
template <typename C>
__device__ inline void RowGemmBlock(const PlainParams& p, uint32_t stages, uint32_t full) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32 % 4);
  const int group = static_cast<int>(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMmaStages; ++i) BarrierInit(full + 8 * i, kMmaThreads / 32);
    BarrierInitFence();
  }
  __syncthreads();
  Fetcher<C> fetcher(p, stages, full);
  for (int i = 0; i + 1 < kMmaStages; ++i) fetcher.Next();
  RingPosition ring;
  // The next stage's address, when it is full. The one before it has been read by all, and is
  // filled anew.
  const auto next = [&] {
    __syncthreads();
    fetcher.Next();
    BarrierWait(full + 8 * ring.stage, ring.parity);
    const uint32_t at = stages + ring.stage * kStageBytes;
    ring.Advance(kMmaStages);
    return at;
  };
  for (uint32_t index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Item item = ItemOf<C>(p, index);
    const Problem& problem = p.problems[item.problem];
    const uint32_t low = item.m + group * 64 + warp * 16 + lane / 4;
    const uint32_t parts = PartsOf<C>(item, problem);
    float sum[2][2] = {};
    for (uint32_t part = 0; part < parts; ++part) {
      float d[kColumns / 2] = {};
      for (uint32_t k = item.step_begin; k < item.step_end; ++k) {
        const uint32_t x = next();
        const uint32_t rows = x + group * 64 * kBoxBytes;
        if constexpr (C::y_by_k) {
          MmaIsa<4>::MultiplyByK<kColumns>(d, rows, x + kHalfBytes, kStepK * kBoxBytes);
        } else {
          MmaIsa<4>::Multiply<kColumns>(d, rows, x + kHalfBytes);
        }
      }
      if constexpr (C::has_z) {
        const ZAddress<C> z_address(next(), group, warp, lane);
#pragma unroll
        for (int box = 0; box < kColumns / 64; ++box) {
          ReduceBox(z_address, box, d, problem.scale, sum);
        }
      } else {
        StoreTile(d, low, problem.m, item.n + part * kColumns, problem.n, lane,
                  problem.partial + static_cast<int64_t>(item.split) * problem.m * problem.n);
      }
    }
    if constexpr (C::has_z) {
      StoreSums(sum, low, problem.m, lane,
                problem.partial + static_cast<int64_t>(item.partial) * problem.m);
    }
  }
}

}  // namespace dorad::kernels::norm
