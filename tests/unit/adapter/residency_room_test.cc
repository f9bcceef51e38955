#include "tests/unit/adapter/residency_fixture.h"

namespace dorad::adapter {
namespace {

TEST_F(ResidencyTest, TheKvCacheShrinksAfterTheIdleWeightsAndByMoreEachTime) {
  std::vector<int64_t> requests;
  shrink_kv_ = [&](int64_t bytes) {
    requests.push_back(bytes);
    return requests.size() < 3 ? bytes : 0;
  };
  Start(0);
  const EntryPtr idle = *Add(1, 10);
  int attempts = 0;
  const absl::Status status = residency_->WithRoom([&] {
    EXPECT_EQ(idle->resident(), ++attempts == 1)
        << "idle weights are evicted before the cache shrinks";
    return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY", "no memory");
  });
  EXPECT_EQ(ReasonOf(status), "OUT_OF_MEMORY");
  ASSERT_EQ(requests.size(), 3u);
  EXPECT_GT(requests[1], requests[0]);
  EXPECT_EQ(attempts, 4) << "the first, one after the eviction, one after each shrink";
}

TEST_F(ResidencyTest, NoRequestToShrinkIsSmallerThanTheLast) {
  int64_t last = 0;
  int requests = 0;
  shrink_kv_ = [&](int64_t bytes) -> int64_t {
    EXPECT_GE(bytes, last);
    last = bytes;
    return ++requests < 100 ? 1 : 0;
  };
  Start(0);
  (void)residency_->WithRoom(
      [] { return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY", ""); });
  EXPECT_EQ(requests, 100);
}

TEST_F(ResidencyTest, AnAttemptThatNeverFitsEvictsNothing) {
  shrink_kv_ = [](int64_t bytes) {
    ADD_FAILURE() << "the cache must not shrink";
    return bytes;
  };
  Start(0);
  const EntryPtr idle = *Add(1, 10);
  int attempts = 0;
  const absl::Status status = residency_->WithRoom([&] {
    ++attempts;
    return WithMetadata(MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY", ""),
                        kNeverFits, "true");
  });
  EXPECT_EQ(ReasonOf(status), "OUT_OF_MEMORY");
  EXPECT_EQ(attempts, 1);
  EXPECT_TRUE(idle->resident());
}

TEST_F(ResidencyTest, GiveBackEvictsTheLeastRecentlyUsed) {
  Start(0, 20);
  const EntryPtr stored = *Add(1, 10), hosted = *Add(2, 10, Kind::kEphemeral);
  const EntryPtr pinned = *Add(3, 10, Kind::kPinned), used = *Add(4, 10);
  const EntryPtr latest = *Add(5, 10);
  const WeightsPin use = TakeUse(*used);
  EXPECT_EQ(residency_->stats().idle_bytes, 30);
  EXPECT_EQ(residency_->GiveBack(11), 20);
  EXPECT_FALSE(stored->resident());
  EXPECT_FALSE(hosted->resident());
  EXPECT_TRUE(hosted->in_host_memory());
  EXPECT_TRUE(latest->resident());
  EXPECT_EQ(residency_->GiveBack(100), 10) << "no more can leave";
  EXPECT_TRUE(pinned->resident());
  EXPECT_TRUE(used->resident());
  EXPECT_EQ(residency_->stats().idle_bytes, 0);
  EXPECT_EQ(residency_->stats().bytes, 20);
  EXPECT_EQ(residency_->GiveBack(1), 0);
  EXPECT_EQ(Try(*hosted), "away");
  RunTasks();
  EXPECT_EQ(Try(*hosted), "");
}

TEST_F(ResidencyTest, GiveBackKeepsWeightsThatCannotComeBack) {
  Start(0, 10);
  const EntryPtr small = *Add(1, 10, Kind::kEphemeral);
  const EntryPtr large = *Add(2, 30, Kind::kEphemeral);
  EXPECT_EQ(residency_->stats().idle_bytes, 10);
  EXPECT_EQ(residency_->GiveBack(100), 10);
  EXPECT_TRUE(large->resident());
  host_copies_->set_failing(true);
  const EntryPtr unsaved = *Add(3, 5, Kind::kEphemeral);
  EXPECT_EQ(residency_->GiveBack(100), 0);
  EXPECT_TRUE(large->resident());
  EXPECT_TRUE(unsaved->resident());
  EXPECT_EQ(residency_->stats().bytes, 35);
  host_copies_->set_failing(false);
}

}  // namespace
}  // namespace dorad::adapter
