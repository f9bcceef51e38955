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

inline void SignalRelease(uint32_t* counter) {
  ++*counter;
  emulation::Emulator::Get().Progress();
}
inline void SpinUntil(const uint32_t* counter, uint32_t value) {
  emulation::Emulator::Get().WaitUntil(*counter, value);
}

}  // namespace dorad::kernels
