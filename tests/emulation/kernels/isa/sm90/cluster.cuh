// The emulator's form of kernels/isa/sm90/cluster.cuh.
#pragma once

#include "kernels/isa/barrier.cuh"
#include "kernels/isa/sm90/copy.cuh"
#include "tests/emulation/emulator.h"

namespace dorad::kernels {

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
template <typename T>
T* RemotePointer(T* shared, int rank) {
  emulation::Block& block = *emulation::ThisBlock().cluster->at(rank);
  MustLive(block);
  return reinterpret_cast<T*>(block.At(SharedAddress(shared)));
}
inline int ClusterRank() { return emulation::ThisBlock().rank; }

inline void BarrierArriveRemote(uint32_t barrier) {
  emulation::Block& block = RemoteBlock(barrier);
  MustLive(block);
  ArriveAt(block.BarrierAt(LocalPart(barrier)), 0);
}

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

}  // namespace dorad::kernels
