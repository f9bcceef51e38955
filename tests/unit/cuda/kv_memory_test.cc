#include "server/backends/cuda/kv_memory.h"

#include "server/backends/cuda/kv_image.h"
#include "tests/unit/kernels/device.h"
#include "tests/unit/support/test.h"

namespace dorad::cuda {
namespace {

class KvMemoryTest : public kernels::KernelTest {
 protected:
  static constexpr int64_t kChunks = 3;

  void SetUp() override {
    kernels::KernelTest::SetUp();
    if (IsSkipped()) return;
    auto memory = KvMemory::Create(layout_, kChunks * layout_.chunk_pages(), &ledger_);
    ASSERT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
  }

  // A page's bytes in one plane, all of them one value.
  void Fill(int32_t page, int64_t plane, int value) {
    DORAD_ASSERT_CUDA(cudaMemset(At(page, plane), value, layout_.page_bytes()));
    DORAD_ASSERT_CUDA(cudaDeviceSynchronize());
  }
  int ValueOf(int32_t page, int64_t plane) {
    std::vector<uint8_t> bytes(static_cast<size_t>(layout_.page_bytes()));
    EXPECT_EQ(cudaMemcpy(bytes.data(), At(page, plane), bytes.size(), cudaMemcpyDeviceToHost),
              cudaSuccess);
    for (const uint8_t byte : bytes) {
      if (byte != bytes.front()) return -1;
    }
    return bytes.front();
  }
  std::byte* At(int32_t page, int64_t plane) {
    return memory_.as() + plane * layout_.plane_bytes() + layout_.Offset(page);
  }

  const KvLayout layout_{4, 6144, kMappedPageBytes};
  MemoryLedger ledger_;
  KvMemory memory_;
};

TEST_F(KvMemoryTest, ChunksGoAndComeWhileOthersStay) {
  const auto chunk = static_cast<int32_t>(layout_.chunk_pages());
  EXPECT_EQ(ledger_.bytes("kv"), kChunks * layout_.chunk_bytes());
  Fill(5, 3, 17);
  Fill(2 * chunk + 1, 0, 18);
  memory_.Unmap(1);
  EXPECT_EQ(ledger_.bytes("kv"), 2 * layout_.chunk_bytes());
  EXPECT_EQ(ValueOf(5, 3), 17);
  EXPECT_EQ(ValueOf(2 * chunk + 1, 0), 18);
  ASSERT_TRUE(memory_.Map(1).ok());
  Fill(chunk + 7, 2, 19);
  EXPECT_EQ(ValueOf(chunk + 7, 2), 19);
  EXPECT_EQ(ValueOf(5, 3), 17);
}

TEST_F(KvMemoryTest, AChunkComesBackOnlyWhenTheMemoryIsSpare) {
  memory_.Unmap(1);
  ledger_.SetReserve(0, [] { return DeviceMemory{int64_t{1} << 30, int64_t{2} << 30}; });
  ledger_.set_low_water(int64_t{1} << 30);
  EXPECT_EQ(ReasonOf(memory_.Map(1)), "OUT_OF_MEMORY");
  ledger_.set_low_water(int64_t{2} << 30);
  EXPECT_TRUE(memory_.Map(1).ok());
}

TEST_F(KvMemoryTest, PagesOfAllChunksComeBackFromTheHostAndWhatIsAwayStaysAway) {
  const auto chunk = static_cast<int32_t>(layout_.chunk_pages());
  const std::vector<int32_t> pages = {0, 1, chunk - 1, 2 * chunk, 3 * chunk - 1};
  for (size_t i = 0; i < pages.size(); ++i) {
    for (int64_t plane = 0; plane < layout_.planes(); ++plane) {
      Fill(pages[i], plane, static_cast<int>(10 * i + plane));
    }
  }
  memory_.Unmap(1);
  auto stream = Stream::Create();
  ASSERT_TRUE(stream.ok());
  const auto image = KvImage::Save(memory_.as(), layout_, pages, *stream);
  ASSERT_TRUE(image.ok()) << image.status();
  EXPECT_EQ(memory_.UnmapAll(), 2 * layout_.chunk_bytes());
  EXPECT_EQ(ledger_.bytes("kv"), 0);
  ledger_.set_limit(layout_.chunk_bytes());
  EXPECT_EQ(ReasonOf(memory_.MapAgain()), "OUT_OF_MEMORY");
  EXPECT_EQ(ledger_.bytes("kv"), 0);
  ledger_.set_limit(MemoryLedger::kNoLimit);
  ASSERT_TRUE(memory_.MapAgain().ok());
  EXPECT_EQ(ledger_.bytes("kv"), 2 * layout_.chunk_bytes());
  ASSERT_TRUE(image->Restore(memory_.as(), *stream).ok());
  for (size_t i = 0; i < pages.size(); ++i) {
    for (int64_t plane = 0; plane < layout_.planes(); ++plane) {
      EXPECT_EQ(ValueOf(pages[i], plane), static_cast<int>(10 * i + plane));
    }
  }
  EXPECT_TRUE(memory_.Map(1).ok());
}

}  // namespace
}  // namespace dorad::cuda
