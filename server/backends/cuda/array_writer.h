// Packs arrays into pinned host memory for one copy to the device, and tells their addresses there.
// All is written twice: first without memory, for the size. Confined to one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "server/backends/cuda/device.h"

namespace dorad::cuda {

class ArrayWriter {
 public:
  // Of the same size, or nullptr for both.
  ArrayWriter(std::byte* host, std::byte* device) : host_(host), device_(device) {}

  bool writing() const { return host_ != nullptr; }
  int64_t bytes() const { return layout_.bytes(); }

  // The host's array (nullptr in the first pass), and its address on the device.
  template <typename T>
  std::remove_const_t<T>* Array(int64_t size, T** on_device) {
    const int64_t offset = layout_.Add(size * static_cast<int64_t>(sizeof(T)));
    if (!writing()) return nullptr;
    *on_device = reinterpret_cast<T*>(device_ + offset);
    return reinterpret_cast<std::remove_const_t<T>*>(host_ + offset);
  }

 private:
  std::byte* const host_;
  std::byte* const device_;
  Layout layout_;
};

}  // namespace dorad::cuda
