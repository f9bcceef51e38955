// The emulator's form of kernels/isa/memory.cuh, as far as emulated kernels use it.
#pragma once

#include "tests/emulation/emulator.h"

namespace dorad::kernels {

inline void CopyAsyncPart(uint32_t destination, const void* source, int bytes) {
  unsigned char* to = emulation::ThisBlock().At(destination);
  emulation::Emulator::Get().Later([=] {
    std::memcpy(to, source, bytes);
    std::memset(to + bytes, 0, 16 - bytes);
  });
}
inline void CopyAsync16(uint32_t destination, const void* source, bool valid) {
  CopyAsyncPart(destination, source, valid ? 16 : 0);
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

inline void StoreRelaxed(uint4* to, const uint4& bits) {
  *to = bits;
  emulation::Emulator::Get().Progress();
}
// Who polls for a number that is not all ones lets others run.
inline uint4 LoadRelaxed(const uint4* from) {
  const uint4 bits = *from;
  if ((bits.x & bits.y & bits.z & bits.w) == 0xFFFFFFFF) emulation::Emulator::Get().SwitchAway();
  return bits;
}

inline void SignalRelease(uint32_t* counter) {
  ++*counter;
  emulation::Emulator::Get().Progress();
}
inline uint32_t SignalAcquireRelease(uint32_t* counter) {
  SignalRelease(counter);
  return *counter - 1;
}
inline void SpinUntil(const uint32_t* counter, uint32_t value) {
  emulation::Emulator::Get().WaitUntil(*counter, value);
}

}  // namespace dorad::kernels
