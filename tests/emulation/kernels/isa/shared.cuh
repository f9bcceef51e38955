// The emulator's form of kernels/isa/shared.cuh.
#pragma once

#include "tests/emulation/emulator.h"

namespace dorad::kernels {

template <typename T>
T& StaticShared() {
  static_assert(sizeof(T) <= emulation::kStaticBytes);
  return *reinterpret_cast<T*>(emulation::ThisBlock().shared + emulation::kStaticAt);
}

template <int kAlignment>
uint8_t* DynamicShared() {
  constexpr uint32_t kAligned = (emulation::kDynamicAt + kAlignment - 1) / kAlignment * kAlignment;
  return emulation::ThisBlock().shared + kAligned;
}

}  // namespace dorad::kernels
