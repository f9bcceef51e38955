#include "server/backends/cuda/staging.h"

#include "tests/unit/kernels/device.h"
#include "tests/unit/support/test.h"

namespace dorad::cuda {
namespace {

class UploaderTest : public kernels::KernelTest {};

std::vector<uint8_t> Bytes(size_t size, uint32_t seed) {
  std::vector<uint8_t> bytes(size);
  for (uint8_t& byte : bytes)
    byte = static_cast<uint8_t>((seed = seed * 1664525 + 1013904223) >> 24);
  return bytes;
}

TEST_F(UploaderTest, BringsEveryByteOfEveryCopy) {
  for (const Uploader::Options& options :
       {Uploader::Options{1, 1 << 20, 1}, Uploader::Options{4, 1000, 3},
        Uploader::Options{8, 4096, 2}}) {
    const auto uploader = Uploader::Create(options);
    ASSERT_TRUE(uploader.ok()) << uploader.status();
    for (const bool pinned : {false, true}) {
      const std::vector<size_t> sizes = {1, 999, 1000, 1001, 0, 123457};
      std::vector<std::vector<uint8_t>> from;
      std::vector<PinnedBuffer> locked;
      std::vector<std::unique_ptr<kernels::DeviceBuffer<uint8_t>>> to;
      // Two batches at once, in the same places of different targets.
      std::vector<std::shared_ptr<Uploader::Batch>> batches;
      for (int round = 0; round < 2; ++round) {
        std::vector<Uploader::Copy> copies;
        for (const size_t size : sizes) {
          from.push_back(Bytes(size, static_cast<uint32_t>(from.size())));
          auto buffer = PinnedBuffer::Allocate(static_cast<int64_t>(size) + 1);
          ASSERT_TRUE(buffer.ok());
          std::memcpy(buffer->as<>() + 1, from.back().data(), size);
          locked.push_back(*std::move(buffer));
          to.push_back(std::make_unique<kernels::DeviceBuffer<uint8_t>>(size + 2));
          copies.push_back(
              {pinned ? static_cast<const void*>(locked.back().as<>() + 1) : from.back().data(),
               to.back()->get() + 1, static_cast<int64_t>(size)});
        }
        // Whatever the default stream does with the buffers comes first.
        DORAD_ASSERT_CUDA(cudaDeviceSynchronize());
        batches.push_back((*uploader)->Start(copies, pinned));
      }
      for (const auto& batch : batches) ASSERT_TRUE((*uploader)->Wait(*batch).ok());
      ASSERT_TRUE((*uploader)->stream().Synchronize("the test").ok());
      for (size_t i = 0; i < from.size(); ++i) {
        const std::vector<uint8_t> got = to[i]->Read();
        EXPECT_EQ(std::vector<uint8_t>(got.begin() + 1, got.end() - 1), from[i]) << i;
        EXPECT_EQ(got.front(), 0xFF);
        EXPECT_EQ(got.back(), 0xFF);
      }
    }
  }
}

TEST_F(UploaderTest, AFailedCopyFailsItsBatch) {
  const auto uploader = Uploader::Create({2, 1000, 2});
  ASSERT_TRUE(uploader.ok());
  const std::vector<uint8_t> bytes = Bytes(5000, 1);
  // Not a device address; found before anything runs.
  const auto bad = (*uploader)->Start({{bytes.data(), nullptr, 5000}}, false);
  EXPECT_FALSE((*uploader)->Wait(*bad).ok());
  (void)cudaGetLastError();
  const kernels::DeviceBuffer<uint8_t> to(5000);
  const auto good = (*uploader)->Start({{bytes.data(), to.get(), 5000}}, false);
  EXPECT_TRUE((*uploader)->Wait(*good).ok());
  EXPECT_EQ(to.Read(), bytes);
}

}  // namespace
}  // namespace dorad::cuda
