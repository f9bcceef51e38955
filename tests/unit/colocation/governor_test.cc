#include "server/colocation/governor.h"

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

constexpr Governor::Marks kMarks{.high = 900, .low = 700};

Governor::Snapshot Used(int64_t bytes) { return {.total = 1000, .free = 1000 - bytes}; }

TEST(Governor, NothingGoesUpToTheHighMark) {
  Governor::Snapshot snapshot = Used(900);
  snapshot.pooled = snapshot.idle_adapters = snapshot.idle_kv = 100;
  EXPECT_TRUE(Governor(kMarks).Decide(snapshot).empty());
}

TEST(Governor, AboveItGoesWhatBringsUseDownToTheLowMark) {
  Governor::Snapshot snapshot = Used(901);
  snapshot.idle_adapters = snapshot.idle_kv = 500;
  const Governor::Plan plan = Governor(kMarks).Decide(snapshot);
  EXPECT_EQ(plan.adapters, 201);
  EXPECT_TRUE(plan.trim) << "what adapters free ends in the pool";
  EXPECT_EQ(plan.kv, 0);
}

TEST(Governor, WhatIsPooledGoesFirstThenAdaptersThenKv) {
  Governor::Snapshot snapshot = Used(950);
  snapshot.pooled = 100;
  snapshot.idle_adapters = 60;
  snapshot.idle_kv = 500;
  const Governor::Plan plan = Governor(kMarks).Decide(snapshot);
  EXPECT_TRUE(plan.trim);
  EXPECT_EQ(plan.adapters, 60);
  EXPECT_EQ(plan.kv, 90);
}

TEST(Governor, WithoutAnythingIdleNothingGoes) {
  EXPECT_TRUE(Governor(kMarks).Decide(Used(1000)).empty());
}

TEST(Governor, ThePoolGoesWhenTheKvCacheIsShort) {
  Governor::Snapshot snapshot = Used(500);
  snapshot.pooled = 100;
  EXPECT_TRUE(Governor(kMarks).Decide(snapshot).empty());
  snapshot.kv_wanted = true;
  EXPECT_TRUE(Governor(kMarks).Decide(snapshot).trim);
}

TEST(TrimmablePool, WhatATrimLeftIsNotTriedAgain) {
  TrimmablePool pool;
  EXPECT_EQ(pool.Trimmable(100), 100);
  pool.NoteTrimmed(70);
  EXPECT_EQ(pool.Trimmable(70), 0);
  EXPECT_EQ(pool.Trimmable(90), 20) << "freed since";
}

TEST(TrimmablePool, WhatWasUsedAgainAndFreedMayBeTrimmed) {
  TrimmablePool pool;
  pool.NoteTrimmed(70);
  EXPECT_EQ(pool.Trimmable(30), 0);
  EXPECT_EQ(pool.Trimmable(70), 40);
}

TEST(TrimmablePool, AdaptersAndKvGoWhenTrimsDoNotHelp) {
  TrimmablePool pool;
  pool.NoteTrimmed(100);
  Governor::Snapshot snapshot = Used(950);
  snapshot.pooled = pool.Trimmable(100);
  EXPECT_TRUE(Governor(kMarks).Decide(snapshot).empty()) << "there is nothing more to give";
  snapshot.idle_adapters = 60;
  snapshot.idle_kv = 500;
  const Governor::Plan plan = Governor(kMarks).Decide(snapshot);
  EXPECT_EQ(plan.adapters, 60);
  EXPECT_EQ(plan.kv, 190);
}

TEST(Governor, RandomPlansGiveEnoughAndNoMoreThanIsIdle) {
  std::mt19937 random(3);
  const auto below = [&random](int64_t end) { return static_cast<int64_t>(random() % end); };
  for (int i = 0; i < 100000; ++i) {
    const int64_t high = 1 + below(1000);
    const int64_t low = below(high + 1);
    const Governor governor({.high = high, .low = low});
    Governor::Snapshot snapshot{.total = 1000, .free = below(1001)};
    snapshot.pooled = below(200);
    snapshot.idle_adapters = below(400);
    snapshot.idle_kv = below(400);
    const Governor::Plan plan = governor.Decide(snapshot);
    const int64_t used = snapshot.total - snapshot.free;
    EXPECT_LE(plan.adapters, snapshot.idle_adapters);
    EXPECT_LE(plan.kv, snapshot.idle_kv);
    EXPECT_TRUE(plan.kv == 0 || plan.adapters == snapshot.idle_adapters);
    EXPECT_TRUE(plan.empty() || used > high);
    const int64_t goes = (plan.trim ? snapshot.pooled : 0) + plan.adapters + plan.kv;
    const bool all = goes == snapshot.pooled + snapshot.idle_adapters + snapshot.idle_kv;
    EXPECT_TRUE(all || used <= high || used - goes <= low);
  }
}

}  // namespace
}  // namespace dorad
