// The emulator's form of kernels/common/barrier.cuh, as far as emulated kernels use it: see there
// what each function is. A tensor map holds a FakeMap.
#pragma once

#include "tests/emulation/emulator.h"

namespace dorad::kernels {

struct FakeMap {
  const __nv_bfloat16* data;
  int rows, columns, ld, box_rows;
};

inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) -
                               emulation::ThisBlock().shared);
}

// A remote address names the block of the cluster too.
inline constexpr uint32_t kRemote = 0x80000000;
inline uint32_t RemoteAddress(uint32_t address, int rank) {
  return kRemote | static_cast<uint32_t>(rank) << 24 | address;
}
inline uint32_t LocalPart(uint32_t remote) { return remote & 0xFFFFFF; }
inline emulation::Block& RemoteBlock(uint32_t remote) {
  emulation::Block* block = emulation::ThisBlock().cluster->at(remote >> 24 & 0x7F);
  if ((remote & kRemote) == 0) emulation::Fail("not a remote address");
  return *block;
}
inline void MustLive(const emulation::Block& block) {
  if (block.alive == 0) emulation::Fail("a block that has left is reached into");
}
inline int ClusterRank() { return emulation::ThisBlock().rank; }

inline void BarrierInit(uint32_t barrier, uint32_t arrivals) {
  const int count = static_cast<int>(arrivals);
  emulation::ThisBlock().barriers[barrier] = {count, count, 0, 0};
}
inline void BarrierInitFence() {}
inline void ArriveAt(emulation::Barrier& barrier, int64_t bytes) {
  barrier.bytes += bytes;
  --barrier.pending;
  emulation::CheckPhase(barrier);
}
inline void BarrierArrive(uint32_t barrier) {
  ArriveAt(emulation::ThisBlock().BarrierAt(barrier), 0);
}
inline void BarrierArrive(uint32_t barrier, uint32_t arrivals) {
  for (uint32_t i = 0; i < arrivals; ++i) BarrierArrive(barrier);
}
inline void BarrierArriveExpect(uint32_t barrier, uint32_t bytes) {
  ArriveAt(emulation::ThisBlock().BarrierAt(barrier), bytes);
}
inline void BarrierArriveRemote(uint32_t barrier) {
  emulation::Block& block = RemoteBlock(barrier);
  MustLive(block);
  ArriveAt(block.BarrierAt(LocalPart(barrier)), 0);
}
inline void BarrierHoldForCopies(uint32_t) {}  // CopyAsync16 is done at once
inline void BarrierWait(uint32_t barrier, uint32_t parity) {
  const emulation::Barrier& awaited = emulation::ThisBlock().BarrierAt(barrier);
  emulation::Emulator::Get().WaitWhile(awaited.phase, parity);
}

inline bool BarrierIsComplete(uint32_t barrier, uint32_t parity) {
  return emulation::ThisBlock().BarrierAt(barrier).phase != parity;
}

inline void CopyAsync16(uint32_t destination, const void* source, bool valid) {
  unsigned char* to = emulation::ThisBlock().At(destination);
  if (valid) {
    std::memcpy(to, source, 16);
  } else {
    std::memset(to, 0, 16);
  }
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

inline void StoreRemote(uint32_t address, float4 value, uint32_t barrier) {
  emulation::Block* block = &RemoteBlock(address);
  if (block != &RemoteBlock(barrier)) emulation::Fail("a store and its barrier in two blocks");
  emulation::Emulator::Get().Later([=] {
    MustLive(*block);
    std::memcpy(block->At(LocalPart(address)), &value, sizeof(value));
    emulation::Barrier& done = block->BarrierAt(LocalPart(barrier));
    done.bytes -= sizeof(value);
    emulation::CheckPhase(done);
  });
}
inline void StoreShared(uint32_t address, float2 value) {
  std::memcpy(emulation::ThisBlock().At(address), &value, sizeof(value));
}
inline void StoreShared(uint32_t address, float4 value) {
  std::memcpy(emulation::ThisBlock().At(address), &value, sizeof(value));
}
inline float2 LoadSharedPair(uint32_t address) {
  float2 value;
  std::memcpy(&value, emulation::ThisBlock().At(address), sizeof(value));
  return value;
}
inline float4 LoadShared(uint32_t address) {
  float4 value;
  std::memcpy(&value, emulation::ThisBlock().At(address), sizeof(value));
  return value;
}
inline void FenceProxyAsync() {}
inline void FenceProxyAsyncGlobal() {}

inline void LaunchDependents() {}
inline void WaitForPrevious() {
  while (!emulation::ThisBlock().grid->CanFollow()) emulation::Emulator::Get().SwitchAway();
}
inline void NamedBarrier(int id, int threads) {
  emulation::Meet(emulation::ThisBlock().named[id], threads);
}
inline void NamedBarrierArrive(int id, int threads) {
  emulation::Arrive(emulation::ThisBlock().named[id], threads);
}
inline void ClusterArrive() {
  const emulation::Block& block = emulation::ThisBlock();
  emulation::Emulator::Get().thread().cluster_arrival = emulation::Arrive(
      *block.cluster_meeting, block.threads * static_cast<int>(block.cluster->size()));
}
inline void ClusterWait() {
  emulation::Await(*emulation::ThisBlock().cluster_meeting,
                   emulation::Emulator::Get().thread().cluster_arrival);
}
inline void ClusterBarrier() {
  ClusterArrive();
  ClusterWait();
}
inline void SignalRelease(uint32_t* counter) {
  ++*counter;
  emulation::Emulator::Get().Progress();
}
inline void SpinUntil(const uint32_t* counter, uint32_t value) {
  emulation::Emulator::Get().WaitUntil(*counter, value);
}

}  // namespace dorad::kernels
