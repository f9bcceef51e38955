// A row in the shared memory of a cluster of blocks (sm_90): logits are read once. Internal to
// kernels/sampling.
#pragma once

#include <cstdint>

#include "kernels/isa/barrier.cuh"
#include "kernels/isa/sm90/cluster.cuh"
#include "kernels/isa/sm90/copy.cuh"
#include "kernels/sampling/row.cuh"

namespace dorad::kernels {

struct InCluster {
  static constexpr int kBlocks = 8;
  static constexpr int kBarriers = kMostChunks / kBlocks;  // one for each chunk of a block
  using SharedMemory = RowShared<InCluster>;
  struct Memory {};

  // Shared memory: the block's logits and maxima follow RowShared.
  __device__ static float* Logits(const Row<InCluster>&) {
    return reinterpret_cast<float*>(DynamicShared<128>() + ShareOffset());
  }
  __device__ static float* GroupMaxima(const Row<InCluster>& row) {
    return Logits(row) + row.share * kChunk;
  }
  static constexpr size_t ShareOffset() { return (sizeof(RowShared<InCluster>) + 127) / 128 * 128; }
  static constexpr size_t SharedBytes(int share) {
    return ShareOffset() + sizeof(float) * (kChunk + kWarp) * share;
  }

  __device__ static int Rank() { return ClusterRank(); }
  __device__ static void Sync() {
    __syncwarp();  // the barrier is for whole warps
    ClusterBarrier();
  }
  template <typename T>
  __device__ static T* Remote(T* local, int rank) {
    return RemotePointer(local, rank);
  }

  // Starts the copy of the warp's chunks; whole ones of aligned rows by the copy engine. For a
  // warp.
  __device__ static void StartLoad(const Row<InCluster>& row) {
    const bool aligned = (reinterpret_cast<uintptr_t>(row.x) & 15) == 0;
    for (int chunk = row.warp; chunk < row.own; chunk += row.warps) {
      const int id = row.IdAt(chunk);
      float* to = Share(row) + chunk * kChunk;
      const uint32_t landed = SharedAddress(&Shared<InCluster>()->landed[chunk]);
      if (aligned && id + kChunk <= row.vocabulary) {
        if (row.lane == 0) {
          BarrierInit(landed, 1);
          BarrierInitFence();
          BarrierArriveExpect(landed, kChunk * sizeof(float));
          CopyBytes(SharedAddress(to), row.x + id, kChunk * sizeof(float), landed);
        }
        continue;
      }
      if (row.lane == 0) BarrierInit(landed, 1);
      LoadChunk(row, chunk);
      __syncwarp();
      if (row.lane == 0) BarrierArrive(landed);
    }
    __syncwarp();
  }
  __device__ static void AwaitChunk(int chunk) {
    BarrierWait(SharedAddress(&Shared<InCluster>()->landed[chunk]), 0);
  }
};
static_assert(InCluster::SharedBytes(InCluster::kBarriers) <= 227 * 1024);

}  // namespace dorad::kernels
