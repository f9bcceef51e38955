// A row that one block works on, whose logits lie in device memory: for every GPU. Internal to
// kernels/sampling.
#pragma once

#include <cstdint>

#include "kernels/sampling/row.cuh"

namespace dorad::kernels {

struct InBlock {
  static constexpr int kBlocks = 1;
  static constexpr int kBarriers = 1;  // unused
  using SharedMemory = RowShared<InBlock>;
  struct Memory {
    float* logits;  // the block's part of the workspace; then the groups' maxima
  };

  __device__ static float* Logits(const Row<InBlock>& row) { return row.logits; }
  __device__ static float* GroupMaxima(const Row<InBlock>& row) {
    return row.logits + row.share * kChunk;
  }
  // Of a block's part, for `chunks` chunks.
  static constexpr size_t LogitsSize(int chunks) {
    return static_cast<size_t>(kChunk + kWarp) * static_cast<size_t>(chunks);
  }

  __device__ static int Rank() { return 0; }
  __device__ static void Sync() { __syncthreads(); }
  template <typename T>
  __device__ static T* Remote(T* local, int) {
    return local;
  }

  __device__ static void StartLoad(const Row<InBlock>& row) {
    for (int chunk = row.warp; chunk < row.own; chunk += row.warps) LoadChunk(row, chunk);
    __syncwarp();
  }
  __device__ static void AwaitChunk(int) {}
};
static_assert(sizeof(RowShared<InBlock>) <= 98 * 1024);

}  // namespace dorad::kernels
