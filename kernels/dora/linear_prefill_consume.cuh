// The consumers of Hopper's kernel behind DoraLinearPrefill: products, and the sums of a tile until
// they are stored. Part of linear_prefill_kernel.cuh.
#pragma once

#include <cstdint>

#include "kernels/dora/linear_prefill_block.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/memory.cuh"
#include "kernels/isa/sm90/copy.cuh"
#include "kernels/isa/sm90/wgmma.cuh"

namespace dorad::kernels {

template <int kN>
__device__ void PrefillBlock<kN>::Consume() {
  WaitForPrevious();
  const int first_tile = ForEachShrink([&](const Panel& panel, int slice) {
    float d[Config::kShrinkN / 2];
    float sum[Config::kShrinkN / 2] = {};
    const int end = ShrinkEnd(slice);
#pragma unroll 1
    for (int chunk = ShrinkBegin(slice); chunk < end; chunk += args_.plan.a_chunks) {
      Multiply<ShrinkRing, Config::kShrinkN>(
          d, min(args_.plan.a_chunks, end - chunk), true, [] {}, [] {});
      Drain<ShrinkRing>();
#pragma unroll
      for (int i = 0; i < Config::kShrinkN / 2; ++i) sum[i] += d[i];
    }
    if (slices_ > 1) {
      StoreShare(sum, panel, slice);
    } else {
      StoreShrunk(sum, FirstRow(panel.band) + LaneRow(), panel, 0);
    }
  });
  if (tables_.panels > 0) {
    // The copy engine will read h. A barrier and a release order the writes of all.
    FenceProxyAsyncGlobal();
    NamedBarrier(1, kConsumers);
    PrefillCounters* counters = args_.counters;
    if (threadIdx.x == 0) SignalRelease(slices_ > 1 ? &counters->shares : &counters->shrunk);
  }
  at_ = {};
  ConsumeTiles(first_tile);
}

template <int kN>
__device__ void PrefillBlock<kN>::ConsumeTiles(int first_tile) {
  float d[kN / 2];
  float kept[kN / 4];
  bool keeps = false;  // a first half
  Tile last = {};
  const auto park_kept = [&] {
    Park(sums_, kept);
    SignalParked();
    keeps = false;
  };
  ForEachTile(first_tile, [&](const Tile& tile) {
#pragma unroll 1
    for (int split = tile.begin; split < tile.end; ++split) {
      const int stages = FirstChunk(split + 1) - FirstChunk(split);
      Multiply<TileRing, kN>(
          d, stages, true, [] {},
          [&] {
            if (keeps && IsStored()) park_kept();
          });
      MultiplyRanks(d, tile, split);
      Drain<TileRing>();
      if (split > tile.begin) {
        Add(kept, d);
        continue;
      }
      if (keeps) {
        WaitStored();
        park_kept();
      }
      if (args_.divides) {
        Exchange(kept, d, tile);
        continue;
      }
      WaitStored();
      Keep(kept, d);
    }
    if (tile.is_last) {
      last = tile;
    } else {
      SignalParked();
      keeps = true;
    }
  });
  if (!last.is_last) return;  // there was no tile
  // After the barrier no consumer reads the ring any more: its memory takes the sums.
  NamedBarrier(1, kConsumers);
  Park(ring_, kept);
  __syncwarp();
  if (!args_.divides) StoreOwn(sums_, last, 1);
  StoreOwn(ring_, last, last.begin);
}

template <int kN>
__device__ void PrefillBlock<kN>::MultiplyRanks(float (&d)[kN / 2], const Tile& tile, int split) {
  const int row = TileRow(tile.band) + 64 * WarpGroup();
  ForEachRankRange(tile, split, [&](int segment, int, int first, int end) {
    const int begin = tables_.begin[segment] - row;
    const int rows = tables_.begin[segment + 1] - row;  // up to the segment's end
    if (begin >= 64 || rows <= 0) {
      Skip<TileRing>(end - first);
      return;
    }
    const bool whole = begin <= 0 && rows >= min(64, args_.p.rows - row);
    Multiply<TileRing, kN>(
        d, end - first, false,
        [&] {
          if (!whole) ZeroOthers(begin, rows);
        },
        [] {});
  });
}

template <int kN>
__device__ void PrefillBlock<kN>::ZeroOthers(int begin, int end) const {
  const int row = threadIdx.x % 128 / 2;  // two threads for each
  if (row < begin || row >= end) {
    const uint32_t half = Batch<TileRing>() + row * 2 * kLinearStageK + threadIdx.x % 2 * 64;
#pragma unroll
    for (int i = 0; i < 4; ++i) StoreShared(half + 16 * i, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
  }
  FenceProxyAsync();  // the tensor cores will read them
  NamedBarrier(2 + WarpGroup(), 128);
}

template <int kN>
template <typename Ring, int kColumns, typename F, typename G>
__device__ void PrefillBlock<kN>::Multiply(float (&d)[kColumns / 2], int stages, bool fresh,
                                           F before, G between) {
  stages = __shfl_sync(0xFFFFFFFF, stages, 0);  // tells the compiler that the warp agrees
#pragma unroll 1
  for (int i = 0; i < stages; ++i) {
    BarrierWait(Full<Ring>(), at_.parity);
    before();
    const uint64_t batch = WgmmaTile(Batch<Ring>());
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
    previous_ = at_.stage;
    Advance<Ring>();
  }
}

template <int kN>
template <typename Ring>
__device__ void PrefillBlock<kN>::Drain() {
  WgmmaWait<0>();
  if (previous_ >= 0) Release<Ring>(previous_);
  previous_ = -1;
}

template <int kN>
template <typename Ring>
__device__ void PrefillBlock<kN>::Skip(int stages) {
  Drain<Ring>();
#pragma unroll 1
  for (int i = 0; i < stages; ++i) {
    BarrierWait(Full<Ring>(), at_.parity);
    __syncwarp();
    Release<Ring>(at_.stage);
    Advance<Ring>();
  }
}

template <int kN>
__device__ void PrefillBlock<kN>::Keep(float (&kept)[kN / 4], const float (&d)[kN / 2]) const {
#pragma unroll
  for (int i = 0; i < kN / 4; ++i) kept[i] = d[i];
  Park(sums_, &d[kN / 4]);
}

template <int kN>
__device__ void PrefillBlock<kN>::Add(float (&kept)[kN / 4], const float (&d)[kN / 2]) const {
#pragma unroll
  for (int i = 0; i < kN / 4; ++i) kept[i] += d[i];
#pragma unroll
  for (int i = 0; i < Config::kParkedBlocks; ++i) {
    const float* more = &d[kN / 4 + 4 * i];
    float4 sum = LoadShared(ParkedAt(sums_, i));
    sum.x += more[0];
    sum.y += more[1];
    sum.z += more[2];
    sum.w += more[3];
    StoreShared(ParkedAt(sums_, i), sum);
  }
}

template <int kN>
__device__ void PrefillBlock<kN>::Exchange(float (&half)[kN / 4], const float (&d)[kN / 2],
                                           const Tile& tile) const {
  const int piece = tile.begin;
  float4* given = GivenAt(tile.index, piece);
#pragma unroll
  for (int i = 0; i < kN / 4; i += 4) {
    float gives[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float first = d[i + j];
      const float second = d[kN / 4 + i + j];
      half[i + j] = piece == 0 ? first : second;
      gives[j] = piece == 0 ? second : first;
    }
    given[i / 4 * kConsumers] = make_float4(gives[0], gives[1], gives[2], gives[3]);
  }
  NamedBarrier(1, kConsumers);
  if (threadIdx.x == 0) {
    const auto blocks = static_cast<uint32_t>(2 * TileItems(args_));
    PrefillCounters* counters = args_.counters;
    SignalRelease(&counters->given);
    SpinUntil(&counters->given, blocks);
    // The last block to come here leaves them as it found them.
    if (atomicAdd(&counters->taken, 1) == blocks - 1) counters->given = counters->taken = 0;
  }
  NamedBarrier(1, kConsumers);
  const float4* others = GivenAt(tile.index, 1 - piece);
#pragma unroll
  for (int i = 0; i < kN / 16; ++i) {
    const float4 other = __ldcg(others + i * kConsumers);
    half[4 * i] += other.x;
    half[4 * i + 1] += other.y;
    half[4 * i + 2] += other.z;
    half[4 * i + 3] += other.w;
  }
}

template <int kN>
__device__ void PrefillBlock<kN>::Park(uint32_t to, const float* sums) {
#pragma unroll
  for (int i = 0; i < Config::kParkedBlocks; ++i) {
    StoreShared(ParkedAt(to, i),
                make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
  }
}

}  // namespace dorad::kernels
