#pragma once
#include <gtest/gtest.h>
#include <cuda_runtime_api.h>
#include <cstring>
#include <vector>
namespace dorad::kernels {
#define DORAD_ASSERT_CUDA(e) ASSERT_EQ((e), cudaSuccess)
class KernelTest : public testing::Test {};
template <typename T> class DeviceBuffer { public:
 explicit DeviceBuffer(size_t n) : size_(n), d_(n * sizeof(T) + 1, (char)0xFF) {}
 explicit DeviceBuffer(const std::vector<T>& v) : DeviceBuffer(v.size()) { memcpy(d_.data(), v.data(), v.size() * sizeof(T)); }
 T* get() const { return (T*)d_.data(); } size_t size() const { return size_; }
 std::vector<T> Read() const { return std::vector<T>(get(), get() + size_); }
 size_t size_; mutable std::vector<char> d_; };
}
