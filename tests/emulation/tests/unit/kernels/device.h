// The emulator's form of tests/unit/kernels/device.h, as far as its tests use it: buffers in the
// host's memory.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <vector>

#include "tests/emulation/emulator.h"
#include "tests/unit/kernels/isas.h"

namespace dorad::kernels {

template <typename T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t size) : data_(operator new(Bytes(size), kAlignment)), size_(size) {
    std::memset(data_, 0xFF, Bytes(size));
  }
  explicit DeviceBuffer(const std::vector<T>& values) : DeviceBuffer(values.size()) {
    std::copy(values.begin(), values.end(), get());
  }
  ~DeviceBuffer() { operator delete(data_, kAlignment); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  T* get() const { return static_cast<T*>(data_); }
  // Runs what was launched before.
  std::vector<T> Read() const {
    emulation::Emulator::Get().Run();
    return std::vector<T>(get(), get() + size_);
  }

 private:
  static constexpr std::align_val_t kAlignment{256};  // as cudaMalloc
  static size_t Bytes(size_t size) { return size * sizeof(T) + 1; }

  void* const data_;
  const size_t size_;
};

}  // namespace dorad::kernels
