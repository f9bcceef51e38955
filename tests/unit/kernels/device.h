// What the kernels' tests need of a GPU: buffers, and a skip (never a pass) where there is none.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "kernels/isa/isa.h"
#include "tests/unit/kernels/isas.h"

namespace dorad::kernels {

#define DORAD_ASSERT_CUDA(expression)                               \
  do {                                                              \
    const cudaError_t status_ = (expression);                       \
    ASSERT_EQ(status_, cudaSuccess) << cudaGetErrorString(status_); \
  } while (false)

// Base of the fixtures.
class KernelTest : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "needs a CUDA GPU";
    }
  }
  static void SkipWithout(KernelIsa isa) {
    if (!HasKernels(isa)) GTEST_SKIP() << "no code of the instruction set for this GPU";
  }
};

// Base of the fixtures of kernels with several instruction sets, as the parameter has it. Skipped
// where the GPU, or the build, does not have it.
class IsaTest : public KernelTest, public testing::WithParamInterface<KernelIsa> {
 protected:
  void SetUp() override {
    KernelTest::SetUp();
    if (IsSkipped()) return;
    tested_isa = GetParam();
    SkipWithout(tested_isa);
  }
};

// Device memory of `size` elements, filled with 0xFF bytes (NaN in every floating format), so that
// an element that a kernel does not write is seen. Complete when it is made: streams that do not
// wait for the default one would otherwise have it filled after what they wrote.
template <typename T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t size) : size_(size) {
    if (cudaMalloc(&data_, Bytes()) != cudaSuccess) data_ = nullptr;
    if (data_ != nullptr) cudaMemset(data_, 0xFF, Bytes());
    cudaDeviceSynchronize();
  }
  explicit DeviceBuffer(const std::vector<T>& values) : DeviceBuffer(values.size()) {
    cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice);
    cudaDeviceSynchronize();
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  T* get() const { return static_cast<T*>(data_); }
  size_t size() const { return size_; }
  // Waits for the device.
  std::vector<T> Read() const {
    std::vector<T> values(size_);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return values;
  }

 private:
  size_t Bytes() const { return size_ * sizeof(T) + 1; }

  void* data_ = nullptr;
  const size_t size_;
};

}  // namespace dorad::kernels
