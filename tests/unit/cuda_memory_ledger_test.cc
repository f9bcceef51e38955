#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/error.h"
#include "server/cuda/device.h"

namespace dorad::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(MemoryLedger, TakesWhatFitsAndGivesBack) {
  MemoryLedger ledger(100);
  EXPECT_TRUE(ledger.Reserve("kv", 60).ok());
  EXPECT_TRUE(ledger.Reserve("adapters", 40).ok());
  EXPECT_FALSE(ledger.Reserve("adapters", 1).ok());
  ledger.Release("kv", 10);
  EXPECT_TRUE(ledger.Reserve("adapters", 10).ok());
  EXPECT_EQ(ledger.bytes("adapters"), 50);
  EXPECT_EQ(ledger.bytes("kv"), 50);
  EXPECT_EQ(ledger.bytes("weights"), 0);
  EXPECT_EQ(ledger.total(), 100);
}

TEST(MemoryLedger, ARefusalTellsWhatIsNeededHeldAndAllowed) {
  MemoryLedger ledger(40'000'000'000);
  ASSERT_TRUE(ledger.Reserve("weights", 16'380'000'000).ok());
  ASSERT_TRUE(ledger.Reserve("kv", 23'000'000'000).ok());
  ASSERT_TRUE(ledger.Reserve("loading", 0).ok());
  const absl::Status status = ledger.Reserve("adapters", 2'100'000'000);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), "OUT_OF_MEMORY");
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("adapters need 2.10 GB"), HasSubstr("memory.vram_limit is 40.00 GB"),
                    HasSubstr("39.38 GB are held (kv 23.00 GB, weights 16.38 GB)"),
                    Not(HasSubstr("loading"))));
  EXPECT_EQ(ledger.total(), 39'380'000'000);
}

TEST(MemoryLedger, WithoutALimitNothingOverflows) {
  MemoryLedger ledger;
  ASSERT_TRUE(ledger.Reserve("kv", int64_t{1} << 62).ok());
  EXPECT_FALSE(ledger.Reserve("kv", INT64_MAX).ok());
  ledger.set_limit(1);
  EXPECT_FALSE(ledger.Reserve("kv", 0).ok());
}

TEST(MemoryLedger, APlanThatDoesNotFitIsListed) {
  MemoryLedger ledger(50'000'000'000);
  const MemoryLedger::Kinds plan = {{"weights", 16'000'000'000}, {"kv", 30'000'000'000}};
  EXPECT_TRUE(ledger.CheckPlan(plan, {140'000'000'000, 150'000'000'000}).ok());
  const absl::Status taken = ledger.CheckPlan(plan, {20'000'000'000, 150'000'000'000});
  EXPECT_EQ(ReasonOf(taken), "OUT_OF_MEMORY");
  EXPECT_THAT(std::string(taken.message()),
              AllOf(HasSubstr("46.00 GB"), HasSubstr("(kv 30.00 GB, weights 16.00 GB)"),
                    HasSubstr("20.00 GB of the GPU's 150.00 GB are free")));
  ASSERT_TRUE(ledger.Reserve("workspace", 5'000'000'000).ok());
  EXPECT_FALSE(ledger.CheckPlan(plan, {140'000'000'000, 150'000'000'000}).ok());
}

// Two that fit only one by one: never both.
TEST(MemoryLedger, ThreadsNeverExceedTheLimitTogether) {
  constexpr int64_t kEach = 7;
  MemoryLedger ledger(20);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&ledger] {
      for (int step = 0; step < 20000; ++step) {
        if (!ledger.Reserve("adapters", kEach).ok()) continue;
        EXPECT_LE(ledger.total(), 20);
        ledger.Release("adapters", kEach);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ledger.total(), 0);
}

}  // namespace
}  // namespace dorad::cuda
