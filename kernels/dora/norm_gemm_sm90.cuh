// The form of Hopper. One producer warp feeds shared memory with the bulk copy engine; two
// warpgroups, each with half of the tile's rows, multiply and reduce. The steps over K use a ring
// of stages, the tile of Z a separate buffer, so that Z is loaded during the product, and the first
// steps of the next tile during the reduction. Internal to norm_gemm_sm90.cu.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "kernels/dora/norm_gemm.h"
#include "kernels/dora/norm_gemm_items.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/sm90/copy.cuh"
#include "kernels/isa/sm90/wgmma.cuh"
#include "kernels/pipeline/ring.cuh"

namespace dorad::kernels::norm {

constexpr int kConsumers = 256;
constexpr int kThreads = 128 + kConsumers;
constexpr int kRegistersProducer = 40;
constexpr int kRegistersConsumer = 232;
constexpr int kSharedBytes = 226 * 1024 - kAlignment;

template <Reduction kind_, int tile_n_, bool z_by_n_ = false>
struct Config : Tiling<kind_, tile_n_, z_by_n_> {
  using Base = Tiling<kind_, tile_n_, z_by_n_>;
  using Base::kind, Base::tile_n;
  static constexpr int x_bytes = kTileM * kBoxBytes;
  static constexpr int y_bytes = tile_n * kBoxBytes;
  static constexpr int stage_bytes = x_bytes + y_bytes;
  // Z: boxes of 64 columns, each in its own buffer. By N, a box is two, one for each warpgroup: 64
  // rows of N by 64 columns of M.
  static constexpr int z_box_bytes = kTileM * kBoxBytes;
  static constexpr int z_group_bytes = z_box_bytes / 2;
  static constexpr int z_boxes = kind == Reduction::kStore ? 0 : tile_n / 64;
  static constexpr int z_bytes = z_boxes * z_box_bytes;
  static constexpr int stages = std::min(6, (kSharedBytes - z_bytes) / stage_bytes);
  static constexpr int shared_bytes = stages * stage_bytes + z_bytes + kAlignment;
};

using TensorParams = Params<CUtensorMap>;
static_assert(sizeof(TensorParams) <= 4096);

// Shared memory. Barriers of a stage or box follow each other in steps of 8 bytes.
struct Shared {
  uint32_t stages;
  uint32_t z;
  uint32_t full;
  uint32_t empty;
  uint32_t z_full;
  uint32_t z_empty;
};

template <typename C>
__device__ void Produce(const TensorParams& p, const Shared& shared) {
  RingPosition ring;
  uint32_t z_phase = 0;
  for (uint32_t index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Item item = ItemOf<C>(p, index);
    const auto& maps = p.maps[item.problem];
    const uint32_t period_steps = p.problems[item.problem].period_steps;
    const auto n = static_cast<int>(item.n);
    const auto m = static_cast<int>(item.m);
    uint32_t box = 0;
    for (uint32_t k = item.step_begin; k < item.step_end; ++k) {
      const uint32_t full = shared.full + 8 * ring.stage;
      BarrierWait(shared.empty + 8 * ring.stage, ring.parity ^ 1);
      BarrierArriveExpect(full, C::stage_bytes);
      const uint32_t x = shared.stages + ring.stage * C::stage_bytes;
      const uint32_t y = x + C::x_bytes;
      CopyTensorBox(x, &maps.x, static_cast<int>(k % period_steps * kStepK), m, full);
      const auto from = static_cast<int>(k * kStepK);
      if constexpr (C::y_by_k) {
#pragma unroll
        for (int part = 0; part < C::tile_n / 64; ++part) {
          CopyTensorBox(y + part * kStepK * kBoxBytes, &maps.y, n + 64 * part, from, full);
        }
      } else {
        CopyTensorBox(y, &maps.y, from, n, full);
      }
      ring.Advance(C::stages);
      // Loads Z after the steps that fit while the previous tile is reduced (until then its buffer
      // is in use), and in parts: a whole tile at once would delay the next steps.
      const uint32_t done = k + 1 - item.step_begin;
      constexpr uint32_t kBoxes = C::z_boxes;
      uint32_t due = 0;
      if (k + 1 == item.step_end) {
        due = kBoxes;
      } else if (done >= C::stages) {
        due = std::min(kBoxes, done + 1 - C::stages);
      }
      for (; box < due; ++box) {
        const uint32_t z_full = shared.z_full + 8 * box;
        BarrierWait(shared.z_empty + 8 * box, z_phase ^ 1);
        BarrierArriveExpect(z_full, C::z_box_bytes);
        const uint32_t to = shared.z + box * C::z_box_bytes;
        const int z_n = n + static_cast<int>(64 * box);
        if constexpr (C::z_by_n) {
          CopyTensorBox(to, &maps.z, m, z_n, z_full);
          CopyTensorBox(to + C::z_box_bytes / 2, &maps.z, m + 64, z_n, z_full);
        } else {
          CopyTensorBox(to, &maps.z, z_n, m, z_full);
        }
      }
    }
    z_phase ^= 1;
  }
}

template <typename C>
__device__ void Consume(const TensorParams& p, const Shared& shared) {
  const int thread = threadIdx.x - 128;
  const int group = thread / 128;
  const int lane = thread % 32;
  const int row = group * 64 + thread % 128 / 32 * 16;  // of the tile, this warp's first
  const ZAddress<C> z_address(shared.z, group, thread % 128 / 32, lane);
  RingPosition ring;
  uint32_t z_phase = 0;
  const auto release = [&](uint32_t barrier) {
    if (lane == 0) BarrierArrive(barrier);
  };
  float d[C::tile_n / 2];
  uint32_t index = blockIdx.x;
  Item next = ItemOf<C>(p, index);
  while (index < p.items) {
    const Item item = next;
    uint32_t previous = 0;
    for (uint32_t k = item.step_begin; k < item.step_end; ++k) {
      BarrierWait(shared.full + 8 * ring.stage, ring.parity);
      const uint32_t x = shared.stages + ring.stage * C::stage_bytes + group * 64 * kBoxBytes;
      const uint32_t y = shared.stages + ring.stage * C::stage_bytes + C::x_bytes;
      WgmmaFence();
#pragma unroll
      for (int i = 0; i < kStepK / 16; ++i) {
        const int accumulate = k > item.step_begin || i > 0;
        const uint64_t a = WgmmaTile(x + 32 * i);
        if constexpr (C::y_by_k) {
          WgmmaByK(d, a, WgmmaTileByK(y + 16 * kBoxBytes * i, kStepK * kBoxBytes), accumulate);
        } else {
          Wgmma<C::tile_n>(d, a, WgmmaTile(y + 32 * i), accumulate);
        }
      }
      WgmmaCommit();
      WgmmaWait<1>();
      if (k > item.step_begin) release(shared.empty + 8 * previous);
      previous = ring.stage;
      ring.Advance(C::stages);
    }
    index += gridDim.x;
    // While the last step is still running.
    next = ItemOf<C>(p, index < p.items ? index : 0);
    const Problem& problem = p.problems[item.problem];
    float* const partial = problem.partial;
    const float scale = problem.scale;
    const uint32_t rows = problem.m;
    asm volatile("" ::"r"(next.m), "r"(next.step_end), "l"(partial), "f"(scale), "r"(rows));
    WgmmaWait<0>();
    release(shared.empty + 8 * previous);

    const uint32_t low = item.m + row + lane / 4;
    if constexpr (C::kind == Reduction::kStore) {
      StoreTile(d, low, rows, item.n, problem.n, lane,
                partial + static_cast<int64_t>(item.split) * rows * problem.n);
    } else {
      float sum[2][2] = {};
#pragma unroll
      for (int box = 0; box < C::z_boxes; ++box) {
        BarrierWait(shared.z_full + 8 * box, z_phase);
        ReduceBox(z_address, box, d, scale, sum);
        __syncwarp();
        release(shared.z_empty + 8 * box);
      }
      z_phase ^= 1;
      StoreSums(sum, low, rows, lane, partial + static_cast<int64_t>(item.partial) * rows);
    }
  }
}

template <typename C>
__global__ void __launch_bounds__(kThreads, 1)
    RowGemmKernel(const __grid_constant__ TensorParams p) {
  extern __shared__ uint8_t raw[];
  __shared__ alignas(8) uint64_t barriers[2 * (C::stages + C::z_boxes)];
  Shared shared;
  shared.stages = (SharedAddress(raw) + kAlignment - 1) / kAlignment * kAlignment;
  shared.z = shared.stages + C::stages * C::stage_bytes;
  shared.full = SharedAddress(barriers);
  shared.empty = shared.full + 8 * C::stages;
  shared.z_full = shared.empty + 8 * C::stages;
  shared.z_empty = shared.z_full + 8 * C::z_boxes;
  LaunchDependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.count; ++i) {
      PrefetchTensorMap(&p.maps[i].x);
      PrefetchTensorMap(&p.maps[i].y);
      if (C::z_boxes > 0) PrefetchTensorMap(&p.maps[i].z);
    }
    for (int i = 0; i < C::stages; ++i) {
      BarrierInit(shared.full + 8 * i, 1);
      BarrierInit(shared.empty + 8 * i, kConsumers / 32);
    }
    for (int i = 0; i < C::z_boxes; ++i) {
      BarrierInit(shared.z_full + 8 * i, 1);
      BarrierInit(shared.z_empty + 8 * i, kConsumers / 32);
    }
    BarrierInitFence();
  }
  __syncthreads();
  WaitForPrevious();
  if (threadIdx.x < 128) {
    DecreaseRegisters<kRegistersProducer>();
    if (threadIdx.x == 0) Produce<C>(p, shared);
  } else {
    IncreaseRegisters<kRegistersConsumer>();
    Consume<C>(p, shared);
  }
}

}  // namespace dorad::kernels::norm
