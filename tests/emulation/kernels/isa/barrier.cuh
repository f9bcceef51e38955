// The emulator's form of kernels/isa/barrier.cuh: see there what each function is.
#pragma once

#include "tests/emulation/emulator.h"

namespace dorad::kernels {

inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) -
                               emulation::ThisBlock().shared);
}

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

inline void BarrierHoldForCopies(uint32_t address) {
  emulation::Barrier& barrier = emulation::ThisBlock().BarrierAt(address);
  ++barrier.pending;
  // What is done later is done in order: after this thread's copies.
  emulation::Emulator::Get().Later([&barrier] { ArriveAt(barrier, 0); });
}
inline void BarrierWait(uint32_t barrier, uint32_t parity) {
  const emulation::Barrier& awaited = emulation::ThisBlock().BarrierAt(barrier);
  emulation::Emulator::Get().WaitWhile(awaited.phase, parity);
}

inline bool BarrierIsComplete(uint32_t barrier, uint32_t parity) {
  return emulation::ThisBlock().BarrierAt(barrier).phase != parity;
}

inline void NamedBarrier(int id, int threads) {
  emulation::Meet(emulation::ThisBlock().named[id], threads);
}
inline void NamedBarrierArrive(int id, int threads) {
  emulation::Arrive(emulation::ThisBlock().named[id], threads);
}

}  // namespace dorad::kernels
