// The emulator's form of kernels/isa/sm90/copy.cuh, as far as emulated kernels use it.
#pragma once

#include "kernels/isa/barrier.cuh"
#include "kernels/isa/sm90/tensor_encoder.h"
#include "tests/emulation/emulator.h"

namespace dorad::kernels {

inline void BarrierArriveExpect(uint32_t barrier, uint32_t bytes) {
  ArriveAt(emulation::ThisBlock().BarrierAt(barrier), bytes);
}

inline void MustLive(const emulation::Block& block) {
  if (block.alive == 0) emulation::Fail("a block that has left is reached into");
}

inline void CopyBytes(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  emulation::Block* const block = &emulation::ThisBlock();
  if (destination % 16 != 0 || bytes % 16 != 0) emulation::Fail("a copy is not aligned");
  emulation::Emulator::Get().Later([=] {
    MustLive(*block);
    std::memcpy(block->At(destination), source, bytes);
    emulation::Barrier& done = block->BarrierAt(barrier);
    done.bytes -= bytes;
    emulation::CheckPhase(done);
  });
}

inline void CopyBoxTo(emulation::Block* block, uint32_t destination, const CUtensorMap* map,
                      int column, int row, int plane, uint32_t barrier) {
  FakeMap from;
  std::memcpy(&from, map, sizeof(from));
  emulation::Emulator::Get().Later([=] {
    MustLive(*block);
    const int row_bytes = 2 * from.box[0];
    const int rows = from.box[1] * from.box[2];
    for (int r = 0; r < rows; ++r) {
      const int64_t y = row + r % from.box[1], z = plane + r / from.box[1];
      const bool is_in = y >= 0 && y < from.sizes[1] && z >= 0 && z < from.sizes[2];
      for (int c = 0; c < from.box[0]; ++c) {
        __nv_bfloat16 value = __float2bfloat16(0.0f);
        const int64_t x = column + c;
        if (is_in && x >= 0 && x < from.sizes[0]) {
          value = from.data[z * from.strides[2] + y * from.strides[1] + x];
        }
        uint32_t at = destination + r * row_bytes + 2 * c;
        at ^= (at >> 7 & (row_bytes / 16 - 1)) << 4;
        std::memcpy(block->At(at), &value, sizeof(value));
      }
    }
    emulation::Barrier& done = block->BarrierAt(barrier);
    done.bytes -= rows * row_bytes;
    emulation::CheckPhase(done);
  });
}
inline void CopyTensorBox(uint32_t destination, const CUtensorMap* map, int column, int row,
                          uint32_t barrier) {
  CopyBoxTo(&emulation::ThisBlock(), destination, map, column, row, 0, barrier);
}
inline void CopyTensorBox(uint32_t destination, const CUtensorMap* map, int column, int row,
                          int plane, uint32_t barrier) {
  CopyBoxTo(&emulation::ThisBlock(), destination, map, column, row, plane, barrier);
}
using CachePolicy = int;
inline CachePolicy EvictFirst() { return 0; }
inline CachePolicy EvictLast() { return 1; }
inline void CopyTensorBoxBy(CachePolicy, uint32_t destination, const CUtensorMap* map, int column,
                            int row, uint32_t barrier) {
  CopyTensorBox(destination, map, column, row, barrier);
}
inline void CopyTensorBoxToBlocks(uint32_t destination, const CUtensorMap* map, int column, int row,
                                  uint32_t barrier, uint16_t blocks) {
  const std::vector<emulation::Block*>& cluster = *emulation::ThisBlock().cluster;
  for (size_t i = 0; i < cluster.size(); ++i) {
    if ((blocks >> i & 1) != 0) CopyBoxTo(cluster[i], destination, map, column, row, 0, barrier);
  }
}
inline void PrefetchTensorMap(const CUtensorMap*) {}
inline void AcquireTensorMap(const CUtensorMap*) {}

inline void FenceProxyAsync() {}
inline void FenceProxyAsyncGlobal() {}

}  // namespace dorad::kernels
