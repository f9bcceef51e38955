// The gated delta rule for sequences of at most one row and whole shapes: blocks stay and take one
// state's block after the other, which a warp of theirs copies to shared memory ahead. So memory is
// always busy. Defines LaunchDeltaStep.
#pragma once

#include <algorithm>

#include "kernels/decoder/delta_state.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/device.h"
#include "kernels/isa/launch.h"
#include "kernels/isa/memory.cuh"
#include "kernels/isa/shared.cuh"
#include "kernels/isa/sm90/copy.cuh"

namespace dorad::kernels::delta {

// With two, two blocks fit into a multiprocessor of compute capability 8.0.
template <typename Isa>
constexpr int kStages = Isa::kHasCopyEngine ? 3 : 2;
constexpr int kBlocks = 2;  // of a multiprocessor that holds as many

struct alignas(128) Stage {
  float state[kMostKeys * kColumns];  // [kMostKeys, tile]
  Row row;
  std::byte* to;  // nullptr: there is nothing to compute
  float* out;
  bool has_state;
};

template <typename Isa>
struct Shared {
  Stage stages[kStages<Isa>];
  uint64_t full[kStages<Isa>];
  uint64_t empty[kStages<Isa>];
};

// A block of a state, with the row that moves it on.
struct Item {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  int row = 0;
  int head = 0;
  int column = 0;
};

__device__ inline Item ItemAt(const DeltaParams& p, int index, int items) {
  Item item;
  if (index >= items) return item;
  const int sequence = index / p.states.state_blocks;
  const int from = p.rows.states.from[sequence], to = p.rows.states.to[sequence];
  const int row = p.rows.states.row_begin[sequence];
  if (to < 0 || p.rows.states.row_begin[sequence + 1] == row) return item;
  item.row = row;
  const Columns columns = ColumnsOf(p, index % p.states.state_blocks, /*parts=*/1);
  item.head = columns.head;
  item.column = columns.column;
  item.to = BlockAt(p, to, columns.block);
  if (from >= 0) item.from = BlockAt(p, from, columns.block);
  return item;
}

template <typename T>
__device__ inline T* FromLane(T* pointer, int lane) {
  return reinterpret_cast<T*>(
      __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), lane));
}

// Multiples of 16 bytes to a stage: by one thread where there is a copy engine, else by a warp.
template <typename Isa>
__device__ inline void CopyTo(void* to, const void* from, uint32_t bytes, uint32_t full) {
  if constexpr (Isa::kHasCopyEngine) {
    CopyBytes(SharedAddress(to), from, bytes, full);
  } else {
    const uint32_t destination = SharedAddress(to);
#pragma unroll 8
    for (uint32_t at = threadIdx.x % 32 * 16; at < bytes; at += 32 * 16) {
      CopyAsync16(destination + at, static_cast<const std::byte*>(from) + at, true);
    }
  }
}

// One warp. Its lanes look up the next 32 items together.
template <typename Isa>
__device__ inline void Produce(const DeltaParams& p, int items, Shared<Isa>& shared) {
  constexpr int kStages = delta::kStages<Isa>;
  const DeltaShape& shape = p.shape;
  const int lane = threadIdx.x % 32;
  const uint32_t state_bytes = 4 * kMostKeys * p.states.tile;
  const auto copy_state = [&](const std::byte* from, int stage) {
    if ((lane == 0 || !Isa::kHasCopyEngine) && from != nullptr) {
      CopyTo<Isa>(shared.stages[stage].state, from, state_bytes,
                  SharedAddress(&shared.full[stage]));
    }
  };
  // What a stage holds beside the state: by the item's lane, or by all lanes without a copy engine.
  const auto fill = [&](const Item& item, float update, float decay, int stage) {
    const auto put = [lane](auto& to, auto value) {
      if (Isa::kHasCopyEngine || lane == 0) to = value;
    };
    Stage& to = shared.stages[stage];
    put(to.to, item.to);
    put(to.has_state, item.from != nullptr);
    const float* const mixed = p.mixed + int64_t{item.row} * shape.qkv_size();
    const float* const q =
        mixed + item.head / (shape.value_heads / shape.key_heads) * shape.key_dim;
    const int64_t v_at = 2 * shape.key_size() + item.head * shape.value_dim + item.column;
    put(to.out, p.mixed + int64_t{item.row} * shape.qkv_size() + v_at);
    put(to.row.update, update);
    put(to.row.decay, decay);
    const uint32_t full = SharedAddress(&shared.full[stage]);
    uint32_t bytes = item.from == nullptr ? 0 : state_bytes;
    if (item.to != nullptr) {
      bytes += 2 * kMostKeys * 4 + 4 * p.states.tile;
      CopyTo<Isa>(to.row.q, q, kMostKeys * 4, full);
      CopyTo<Isa>(to.row.k, q + shape.key_size(), kMostKeys * 4, full);
      CopyTo<Isa>(to.row.v, mixed + v_at, 4 * p.states.tile, full);
    }
    Isa::Expect(full, bytes);
    Isa::Complete(full);
  };
  int turn = 0;
  bool is_waiting = true;
  for (int first = blockIdx.x; first < items; first += 32 * gridDim.x) {
    const Item mine = ItemAt(p, first + lane * gridDim.x, items);
    const int count = min(32, (items - first - 1) / static_cast<int>(gridDim.x) + 1);
    if (is_waiting) {
      // No kernel of this step writes these states.
      for (int j = 0; j < min(count, kStages); ++j) copy_state(FromLane(mine.from, j), j);
      WaitForPrevious();
    }
    const float* const factors = p.factors + int64_t{mine.row} * 2 * shape.value_heads + mine.head;
    const float update = factors[0], decay = factors[shape.value_heads];
    for (int j = 0; j < count; ++j, ++turn) {
      const int stage = turn % kStages;
      const bool is_copied = is_waiting && j < kStages;
      if (!is_copied) {
        BarrierWait(SharedAddress(&shared.empty[stage]), (turn / kStages & 1) ^ 1);
        copy_state(FromLane(mine.from, j), stage);
      }
      if constexpr (Isa::kHasCopyEngine) {
        if (lane == j) fill(mine, update, decay, stage);
      } else {
        const auto of_j = [j](auto value) { return __shfl_sync(kAllLanes, value, j); };
        fill({FromLane(mine.from, j), FromLane(mine.to, j), of_j(mine.row), of_j(mine.head),
              of_j(mine.column)},
             of_j(update), of_j(decay), stage);
      }
    }
    is_waiting = false;
  }
}

template <typename Isa>
__device__ inline void Consume(const DeltaParams& p, int items, Shared<Isa>& shared) {
  constexpr int kStages = delta::kStages<Isa>;
  const int part = threadIdx.x % kParts, column = threadIdx.x / kParts * 4;
  const bool is_in = column < p.states.tile;
  const auto place = [&](int key) { return key * p.states.tile + column; };
  int turn = 0;
  for (int index = blockIdx.x; index < items; index += gridDim.x, ++turn) {
    const int stage = turn % kStages;
    const Stage& at = shared.stages[stage];
    BarrierWait(SharedAddress(&shared.full[stage]), turn / kStages & 1);
    State s;
    s.ForEach(part, [&](int key, float4& four) {
      four = is_in && at.has_state ? *reinterpret_cast<const float4*>(at.state + place(key))
                                   : float4{};
    });
    const RowPart row(at.row, part, column);
    float* const out = at.out;
    auto* const to = reinterpret_cast<float*>(at.to);
    __syncwarp();
    if (threadIdx.x % 32 == 0) BarrierArrive(SharedAddress(&shared.empty[stage]));
    if (to == nullptr) continue;
    const float4 seen = Seen(s, row);
    const float4 outputs = Update(s, row, seen);
    if (is_in) {
      s.ForEach(part, [&](int key, const float4& four) {
        __stcg(reinterpret_cast<float4*>(to + place(key)), four);
      });
    }
    const float y = SumPartsOfOne(outputs, part);
    if (is_in && part < 4) out[column + ColumnOfSum(part)] = y;
  }
}

template <typename Isa>
__device__ void RunStepBlock(const DeltaParams& p, int items, Shared<Isa>& shared) {
  constexpr int kStages = delta::kStages<Isa>;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      BarrierInit(SharedAddress(&shared.full[i]), 1);
      BarrierInit(SharedAddress(&shared.empty[i]), kThreads / 32);
    }
    BarrierInitFence();
  }
  __syncthreads();
  if (threadIdx.x >= kThreads) {
    Produce(p, items, shared);
  } else {
    WaitForPrevious();
    Consume(p, items, shared);
  }
}

template <typename Isa>
__global__ void __launch_bounds__(kThreads + 32, kBlocks)
    StepKernel(const DeltaParams p, int items) {
  LaunchDependents();
  RunStepBlock<Isa>(p, items, *reinterpret_cast<Shared<Isa>*>(DynamicShared<128>()));
}

template <typename Isa>
cudaError_t LaunchDeltaStep(const DeltaParams& params, cudaStream_t stream) {
  int multiprocessors = 0;
  DORAD_CUDA_RETURN_IF_ERROR(Multiprocessors(&multiprocessors));
  const int items = params.states.state_blocks * params.rows.states.sequences;
  static_assert(sizeof(Shared<Isa>) <= Isa::kSharedBytes / (Isa::kHasCopyEngine ? kBlocks : 1));
  return LaunchEarly(StepKernel<Isa>, std::min(items, kBlocks * multiprocessors), kThreads + 32,
                     sizeof(Shared<Isa>), stream, params, items);
}

}  // namespace dorad::kernels::delta
