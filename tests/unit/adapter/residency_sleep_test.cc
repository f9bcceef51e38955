#include "tests/unit/adapter/residency_fixture.h"

namespace dorad::adapter {
namespace {

TEST_F(ResidencyTest, SleepEvictsAllThatCanComeBack) {
  Start(100, 20);
  const EntryPtr stored = *Add(1, 10), pinned = *Add(2, 10, Kind::kPinned);
  const EntryPtr ephemeral = *Add(3, 10, Kind::kEphemeral);
  const EntryPtr too_large = *Add(4, 30, Kind::kEphemeral);
  EXPECT_EQ(residency_->Sleep(), 30);
  EXPECT_EQ(residency_->stats().bytes, 30) << "what would be lost stays";
  EXPECT_TRUE(too_large->resident());
  EXPECT_EQ(alive_, 1);
  const EntryPtr added = *Add(5, 10);
  EXPECT_FALSE(added->resident()) << "what comes leaves at once";
  EXPECT_EQ(Try(*stored), "away");
  RunTasks();
  EXPECT_FALSE(stored->resident()) << "nothing comes back";
  EXPECT_TRUE(Wake().ok());
  EXPECT_TRUE(pinned->resident());
  RunTasks();
  EXPECT_TRUE(stored->resident()) << "it was wanted";
  for (const EntryPtr* entry : {&stored, &pinned, &ephemeral, &added}) {
    if (Try(**entry) == "away") RunTasks();
    EXPECT_EQ(Try(**entry), "");
  }
}

TEST_F(ResidencyTest, SleepAndWakeMayRepeat) {
  Start(100, 40);
  const EntryPtr a = *Add(1, 10, Kind::kEphemeral);
  EXPECT_EQ(residency_->Sleep(), 10);
  EXPECT_EQ(residency_->Sleep(), 0);
  EXPECT_TRUE(Wake().ok());
  EXPECT_TRUE(Wake().ok());
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  EXPECT_EQ(Try(*a), "");
}

TEST_F(ResidencyTest, AFailedWakeLeavesAllAsleep) {
  Start(100);
  const EntryPtr pinned = *Add(1, 10, Kind::kPinned);
  EXPECT_EQ(residency_->Sleep(), 10);
  failing_ = true;
  EXPECT_EQ(Wake().code(), absl::StatusCode::kDataLoss);
  EXPECT_FALSE(pinned->resident());
  failing_ = false;
  EXPECT_TRUE(Wake().ok());
  EXPECT_EQ(Try(*pinned), "") << "nobody is told of a failure that is over";
}

TEST_F(ResidencyTest, PinnedWeightsWakeBehindOthersThatWereWantedFirst) {
  Start(10);
  const EntryPtr pinned = *Add(1, 8, Kind::kPinned);
  const EntryPtr a = *Add(2, 2), b = *Add(3, 2);
  residency_->Sleep();
  EXPECT_EQ(residency_->stats().bytes, 0);
  // Each fits beside the pinned one; both come first, and are kept for those who asked.
  EXPECT_EQ(Try(*a), "away");
  EXPECT_EQ(Try(*b), "away");
  // Time passes again and again: on a busy machine both may come after the first leap.
  std::atomic<bool> is_awake = false;
  std::thread passing([&] {
    while (!is_awake) {
      absl::SleepFor(absl::Milliseconds(50));
      absl::MutexLock lock(&now_mu_);
      now_ += absl::Seconds(3);
    }
  });
  EXPECT_TRUE(Wake().ok());
  is_awake = true;
  passing.join();
  EXPECT_TRUE(pinned->resident());
}

TEST_F(ResidencyTest, NothingIsLoadedWhileSuspended) {
  Start(10, 10);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10), c = *Add(3, 10);
  EXPECT_EQ(Try(*a), "away");  // sent for, and not begun
  residency_->Suspend();
  failing_ = true;  // as without the base's weights
  RunTasks();
  EXPECT_EQ(Try(*a), "away");
  EXPECT_EQ(Try(*b), "away");
  RunTasks();
  EXPECT_FALSE(a->resident() || b->resident());
  failing_ = false;
  residency_->Resume();
  RunTasks();
  EXPECT_EQ(Try(*a), "");
  RunTasks();
  EXPECT_EQ(Try(*b), "");
  EXPECT_LE(residency_->stats().bytes, 10);
}

}  // namespace
}  // namespace dorad::adapter
