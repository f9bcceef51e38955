// The emulator's form of kernels/isa/sm90/copy.cuh, as far as emulated kernels use it. A tensor map
// holds a FakeMap.
#pragma once

#include "kernels/isa/barrier.cuh"
#include "tests/emulation/emulator.h"

namespace dorad::kernels {

struct FakeMap {
  const __nv_bfloat16* data;
  int rows, columns, ld, box_rows;
};

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
                      int column, int row, uint32_t barrier) {
  FakeMap from;
  std::memcpy(&from, map, sizeof(from));
  emulation::Emulator::Get().Later([=] {
    MustLive(*block);
    for (int r = 0; r < from.box_rows; ++r) {
      for (int c = 0; c < 64; ++c) {
        __nv_bfloat16 value = __float2bfloat16(0.0f);
        const int y = row + r;
        const int x = column + c;
        if (y >= 0 && y < from.rows && x >= 0 && x < from.columns) {
          value = from.data[static_cast<int64_t>(y) * from.ld + x];
        }
        const uint32_t line = destination + r * 128;
        const uint32_t at = line + ((c / 8 ^ (line >> 7 & 7)) << 4) + c % 8 * 2;
        std::memcpy(block->At(at), &value, sizeof(value));
      }
    }
    emulation::Barrier& done = block->BarrierAt(barrier);
    done.bytes -= from.box_rows * 128;
    emulation::CheckPhase(done);
  });
}
inline void CopyTensorBox(uint32_t destination, const CUtensorMap* map, int column, int row,
                          uint32_t barrier) {
  CopyBoxTo(&emulation::ThisBlock(), destination, map, column, row, barrier);
}
inline void CopyTensorBoxOnce(uint32_t destination, const CUtensorMap* map, int column, int row,
                              uint32_t barrier) {
  CopyTensorBox(destination, map, column, row, barrier);
}
inline void CopyTensorBoxToBlocks(uint32_t destination, const CUtensorMap* map, int column, int row,
                                  uint32_t barrier, uint16_t blocks) {
  const std::vector<emulation::Block*>& cluster = *emulation::ThisBlock().cluster;
  for (size_t i = 0; i < cluster.size(); ++i) {
    if ((blocks >> i & 1) != 0) CopyBoxTo(cluster[i], destination, map, column, row, barrier);
  }
}
inline void PrefetchTensorMap(const CUtensorMap*) {}
inline void AcquireTensorMap(const CUtensorMap*) {}

inline void FenceProxyAsync() {}
inline void FenceProxyAsyncGlobal() {}

}  // namespace dorad::kernels
