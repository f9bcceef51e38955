
#include "server/backends/cuda/device.h"
#include "tests/unit/support/test.h"

namespace dorad::cuda {
namespace {

using enum MemoryLedger::Source;

TEST(MemoryLedger, TakesWhatFitsAndGivesBack) {
  MemoryLedger ledger(100);
  EXPECT_TRUE(ledger.Reserve("kv", 60, kDevice).ok());
  EXPECT_TRUE(ledger.Reserve("adapters", 40, kDevice).ok());
  EXPECT_FALSE(ledger.Reserve("adapters", 1, kDevice).ok());
  ledger.Release("kv", 10);
  EXPECT_TRUE(ledger.Reserve("adapters", 10, kDevice).ok());
  EXPECT_EQ(ledger.bytes("adapters"), 50);
  EXPECT_EQ(ledger.bytes("kv"), 50);
  EXPECT_EQ(ledger.bytes("weights"), 0);
  EXPECT_EQ(ledger.total(), 100);
}

TEST(MemoryLedger, ARefusalTellsWhatIsNeededHeldAndAllowed) {
  MemoryLedger ledger(40'000'000'000);
  ASSERT_TRUE(ledger.Reserve("weights", 16'380'000'000, kDevice).ok());
  ASSERT_TRUE(ledger.Reserve("kv", 23'000'000'000, kDevice).ok());
  ASSERT_TRUE(ledger.Reserve("loading", 0, kDevice).ok());
  const absl::Status status = ledger.Reserve("adapters", 2'100'000'000, kDevice);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), "OUT_OF_MEMORY");
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("adapters need 2.10 GB"), HasSubstr("memory.vram_limit is 40.00 GB"),
                    HasSubstr("39.38 GB are held (kv 23.00 GB, weights 16.38 GB)"),
                    Not(HasSubstr("loading"))));
  EXPECT_EQ(ledger.total(), 39'380'000'000);
}

TEST(MemoryLedger, ARefusalTellsWhenNothingThatGivesWayWouldHelp) {
  MemoryLedger ledger(100);
  ledger.SetGivesWay({{"adapters", 0}, {"kv", 10}});
  ASSERT_TRUE(ledger.Reserve("weights", 40, kDevice).ok());
  ASSERT_TRUE(ledger.Reserve("kv", 30, kDevice).ok());
  ASSERT_TRUE(ledger.Reserve("adapters", 30, kDevice).ok());
  const absl::Status fits = ledger.Reserve("adapters", 50, kDevice);
  EXPECT_EQ(ReasonOf(fits), "OUT_OF_MEMORY");
  EXPECT_TRUE(MetadataOf(fits).empty());
  const absl::Status never = ledger.Reserve("adapters", 51, kDevice);
  EXPECT_EQ(ReasonOf(never), "OUT_OF_MEMORY");
  EXPECT_EQ(MetadataOf(never).count(kNeverFits), 1u);
}

TEST(MemoryLedger, WithoutALimitNothingOverflows) {
  MemoryLedger ledger;
  ASSERT_TRUE(ledger.Reserve("kv", int64_t{1} << 62, kDevice).ok());
  EXPECT_FALSE(ledger.Reserve("kv", INT64_MAX, kDevice).ok());
  ledger.set_limit(1);
  EXPECT_FALSE(ledger.Reserve("kv", 0, kDevice).ok());
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
  ASSERT_TRUE(ledger.Reserve("workspace", 5'000'000'000, kDevice).ok());
  EXPECT_FALSE(ledger.CheckPlan(plan, {140'000'000'000, 150'000'000'000}).ok());
}

TEST(MemoryLedger, APlanLeavesTheReserveToOthers) {
  MemoryLedger ledger;
  ledger.SetReserve(10, [] { return DeviceMemory{}; });
  EXPECT_TRUE(ledger.CheckPlan({{"kv", 90}}, {100, 200}).ok());
  const absl::Status refused = ledger.CheckPlan({{"kv", 91}}, {100, 200});
  EXPECT_EQ(ReasonOf(refused), "OUT_OF_MEMORY");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("memory.reserve leaves"));
}

// A device on which others hold memory, too.
class MemoryPressure : public ::testing::Test {
 protected:
  MemoryPressure() {
    ledger_.SetReserve(10, [this] {
      ++questions_;
      return device_;
    });
  }

  MemoryLedger ledger_{1000};
  absl::StatusOr<DeviceMemory> device_ = DeviceMemory{100, 2000};
  int questions_ = 0;
};

TEST_F(MemoryPressure, WhatWouldTakeOthersReserveIsRefusedAndNotCounted) {
  EXPECT_TRUE(ledger_.Reserve("adapters", 90, kDevice).ok());
  device_ = DeviceMemory{10, 2000};
  EXPECT_FALSE(ledger_.Reserve("adapters", 1, kDevice).ok());
  EXPECT_EQ(ledger_.bytes("adapters"), 90);
  EXPECT_EQ(ledger_.refusals().reserve, 1);
  EXPECT_EQ(ledger_.refusals().limit, 0);
  device_ = DeviceMemory{11, 2000};
  EXPECT_TRUE(ledger_.Reserve("adapters", 1, kDevice).ok());
}

TEST_F(MemoryPressure, ARefusalNamesKindWantedFreeAndReserve) {
  ledger_.set_limit(MemoryLedger::kNoLimit);
  ledger_.SetReserve(500'000'000, [] { return DeviceMemory{1'250'000'000, 150'000'000'000}; });
  ledger_.Add("weights", 16'000'000'000);
  const absl::Status refused = ledger_.Reserve("adapters", 2'100'000'000, kDevice);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(refused), "OUT_OF_MEMORY");
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("adapters need 2.10 GB"),
                    HasSubstr("1.25 GB of the GPU's 150.00 GB are free"),
                    HasSubstr("memory.reserve leaves 0.50 GB"),
                    HasSubstr("holds 16.00 GB (weights 16.00 GB)")));
}

TEST_F(MemoryPressure, TheLimitIsAskedBeforeTheDevice) {
  EXPECT_FALSE(ledger_.Reserve("adapters", 1001, kDevice).ok());
  EXPECT_EQ(questions_, 0);
  EXPECT_EQ(ledger_.refusals().limit, 1);
}

TEST_F(MemoryPressure, WhatBuffersHaveFreedIsTheirsToTakeAgain) {
  device_ = DeviceMemory{20, 2000, 50};
  EXPECT_FALSE(ledger_.Reserve("kv", 11, kDevice).ok());
  EXPECT_FALSE(ledger_.Reserve("adapters", 61, kPool).ok());
  EXPECT_TRUE(ledger_.Reserve("adapters", 60, kPool).ok());
}

TEST_F(MemoryPressure, SpareMemoryEndsAtTheLowMarkAndLeavesThePoolItsOwn) {
  device_ = DeviceMemory{1000, 2000, 300};
  ledger_.set_low_water(1200);
  EXPECT_FALSE(ledger_.Reserve("kv", 201, kSpare).ok());
  EXPECT_TRUE(ledger_.Reserve("kv", 200, kSpare).ok());
  ledger_.set_low_water(1900);
  EXPECT_FALSE(ledger_.Reserve("kv", 501, kSpare).ok()) << "the pool has 300 of the limit's 1000";
  EXPECT_TRUE(ledger_.Reserve("kv", 500, kSpare).ok());
  EXPECT_FALSE(ledger_.Reserve("kv", 301, kSpare).ok());
  EXPECT_TRUE(ledger_.Reserve("adapters", 300, kPool).ok());
  EXPECT_EQ(ledger_.refusals().limit + ledger_.refusals().reserve, 0);
}

TEST_F(MemoryPressure, RunningStepsAndWhatIsHeldAlreadyAreNotHeldUp) {
  device_ = DeviceMemory{0, 2000};
  EXPECT_TRUE(ledger_.Reserve(MemoryLedger::kWorkspace, 5, kPool).ok());
  EXPECT_TRUE(ledger_.Reserve("graphs", 5, kGranted).ok());
  EXPECT_EQ(questions_, 0);
}

TEST_F(MemoryPressure, ADeviceThatDoesNotAnswerIsNoLicence) {
  device_ = absl::InternalError("gone");
  EXPECT_EQ(ledger_.Reserve("adapters", 1, kDevice), device_.status());
  EXPECT_EQ(ledger_.total(), 0);
}

// Two that fit only one by one: never both.
TEST(MemoryLedger, ThreadsNeverExceedTheLimitTogether) {
  constexpr int64_t kEach = 7;
  MemoryLedger ledger(20);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&ledger] {
      for (int step = 0; step < 20000; ++step) {
        if (!ledger.Reserve("adapters", kEach, kDevice).ok()) continue;
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
