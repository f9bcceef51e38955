#include "server/rpc/arriving_files.h"

#include <string>
#include <thread>

#include "server/platform/error.h"
#include "tests/unit/support/test.h"

namespace dorad::rpc {
namespace {

constexpr absl::Duration kLong = absl::Seconds(60);

class ArrivingFilesTest : public testing::Test {
 protected:
  std::shared_ptr<UploadBudget> budget_ = std::make_shared<UploadBudget>(8 << 20);
  std::shared_ptr<ArrivingFiles> files_ = std::make_shared<ArrivingFiles>("{}", 10, budget_);
};

TEST_F(ArrivingFilesTest, AReaderGetsWhatIsThere) {
  EXPECT_EQ(files_->Await(0, absl::ZeroDuration()), 0u);
  ASSERT_TRUE(files_->Append("hello").ok());
  EXPECT_EQ(files_->Await(0, kLong), 5u);
  EXPECT_EQ(files_->Bytes(1, 3), "ell");
  EXPECT_EQ(files_->Await(5, absl::Milliseconds(1)), 5u);
}

TEST_F(ArrivingFilesTest, AReaderWaitsForAByteAndForTheEnd) {
  std::string read;
  std::thread reader([&] {
    for (uint64_t at = 0; at < files_->size();) {
      const uint64_t there = files_->Await(at, kLong);
      if (there <= at) return;
      read += files_->Bytes(at, there - at);
      at = there;
    }
  });
  for (const char* part : {"ab", "cde", "f"}) ASSERT_TRUE(files_->Append(part).ok());
  files_->End();
  reader.join();
  EXPECT_EQ(read, "abcdef");
  EXPECT_TRUE(files_->ended());
}

TEST_F(ArrivingFilesTest, BytesDoNotMoveWhileTheFileGrows) {
  const uint64_t size = 4 << 20;
  ArrivingFiles large("{}", size, budget_);
  ASSERT_TRUE(large.Append("first").ok());
  const char* const before = large.Bytes(0, 5).data();
  const std::string block(1 << 20, 'x');
  while (large.received() + block.size() <= size) ASSERT_TRUE(large.Append(block).ok());
  EXPECT_EQ(large.Bytes(0, 5).data(), before);
  EXPECT_EQ(large.image()->data(), reinterpret_cast<const std::byte*>(before));
}

TEST_F(ArrivingFilesTest, TheBudgetIsGivenBackWithTheLastOwner) {
  const std::string block(6 << 20, 'x');
  auto first = std::make_shared<ArrivingFiles>("{}", block.size(), budget_);
  ASSERT_TRUE(first->Append(block).ok());
  std::shared_ptr<ArrivingFiles> reader = first;
  first.reset();
  ArrivingFiles second("{}", block.size(), budget_);
  EXPECT_EQ(ReasonOf(second.Append(block)), "PUBLISH_BUSY");
  EXPECT_EQ(second.received(), 0u);
  reader.reset();
  EXPECT_TRUE(second.Append(block).ok());
}

}  // namespace
}  // namespace dorad::rpc
