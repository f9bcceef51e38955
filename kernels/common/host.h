// Checks of pointers before a launch. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dorad::kernels {

// nullptr counts as aligned; IsThere refuses it.
inline bool IsAligned(const void* pointer, size_t alignment = 16) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

// An aligned pointer that is not nullptr.
inline bool IsThere(const void* pointer, size_t alignment) {
  return pointer != nullptr && IsAligned(pointer, alignment);
}

}  // namespace dorad::kernels
