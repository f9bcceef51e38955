
#include "tests/unit/adapter/residency_fixture.h"

namespace dorad::adapter {
namespace {

TEST_F(ResidencyTest, KeepsEverythingWithoutALimit) {
  Start(0);
  std::vector<EntryPtr> entries;
  for (int i = 0; i < 50; ++i) entries.push_back(*Add(i, int64_t{1} << 40));
  for (const EntryPtr& entry : entries) EXPECT_EQ(Try(*entry), "");
  EXPECT_EQ(residency_->stats().resident, 50);
}

TEST_F(ResidencyTest, TheLeastRecentlyUsedMakesRoomAndComesBackWhenWanted) {
  Start(20);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10);
  EXPECT_EQ(Try(*a), "");
  const EntryPtr c = *Add(3, 10);
  EXPECT_TRUE(a->resident());
  EXPECT_FALSE(b->resident());
  EXPECT_EQ(alive_, 2);
  EXPECT_EQ(Try(*b), "away");
  EXPECT_EQ(Try(*b), "away") << "asking twice brings it once";
  EXPECT_EQ(tasks_.size(), 1u);
  RunTasks();
  EXPECT_FALSE(a->resident()) << "used before c came";
  const auto use = Use(*b);
  ASSERT_TRUE(use.ok() && use->has_value());
  EXPECT_EQ(NumberOf(*b), 2);
  EXPECT_EQ(residency_->stats().bytes, 20);
  EXPECT_EQ(residency_->stats().reloads_from_store, 1);
  EXPECT_EQ(residency_->stats().evictions, 2);
}

TEST_F(ResidencyTest, WeightsInUseStay) {
  Start(20);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10);
  std::optional<WeightsPin> use_a = TakeUse(*a), use_b = TakeUse(*b);
  const EntryPtr c = *Add(3, 10);
  EXPECT_FALSE(c->resident()) << "it is away at once";
  EXPECT_EQ(Try(*c), "away");
  RunTasks();
  EXPECT_FALSE(c->resident());
  use_a.reset();
  RunTasks();
  EXPECT_TRUE(c->resident());
  EXPECT_FALSE(a->resident());
  EXPECT_TRUE(b->resident());
}

TEST_F(ResidencyTest, WeightsThatCannotComeBackAreNotEvicted) {
  Start(20);
  const EntryPtr a = *Add(1, 10, Kind::kEphemeral);
  const EntryPtr b = *Add(2, 10, Kind::kPinned);
  const auto c = Add(3, 10, Kind::kEphemeral);
  EXPECT_EQ(c.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(c.status()), "OUT_OF_MEMORY");
  const EntryPtr d = *Add(4, 10);
  EXPECT_EQ(Try(*d), "OUT_OF_MEMORY") << "there will never be room for it";
  EXPECT_FALSE(MakesRoom());
}

TEST_F(ResidencyTest, WeightsAreLoadedInTheOrderOfTheRequests) {
  Start(10);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10), c = *Add(3, 10);
  std::optional<WeightsPin> use = TakeUse(*c);
  EXPECT_EQ(Try(*b), "away");
  EXPECT_EQ(Try(*a), "away");
  use.reset();
  RunTasks();
  EXPECT_TRUE(b->resident());
  EXPECT_EQ(Try(*a), "away");
  EXPECT_TRUE(b->resident()) << "it stays for the one who wanted it";
  EXPECT_EQ(Try(*b), "");
  RunTasks();
  EXPECT_TRUE(a->resident());
}

TEST_F(ResidencyTest, LoadedWeightsThatNobodyUsesMakeRoom) {
  Start(10);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10);
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  EXPECT_EQ(Try(*b), "away");
  EXPECT_TRUE(tasks_.empty());
  now_ += absl::Seconds(2);
  EXPECT_EQ(Try(*b), "away");
  RunTasks();
  EXPECT_TRUE(b->resident());
}

TEST_F(ResidencyTest, PatienceCountsFromTheEndOfTheLoad) {
  Start(10);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10);
  EXPECT_EQ(Try(*a), "away");
  now_ += absl::Seconds(3);  // a slow disk
  RunTasks();
  EXPECT_EQ(Try(*b), "away");
  EXPECT_TRUE(tasks_.empty());
  EXPECT_EQ(Try(*a), "") << "whoever wanted it had no chance to come before";
}

TEST_F(ResidencyTest, AFailedLoadIsReportedOnceAndTriedAgain) {
  Start(10);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10);
  failing_ = true;
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  EXPECT_EQ(Use(*a).status().code(), absl::StatusCode::kDataLoss);
  failing_ = false;
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  EXPECT_EQ(Try(*a), "");
}

TEST_F(ResidencyTest, AnExceptionOfALoadIsReportedToTheCaller) {
  Start(10);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10);
  throwing_ = true;
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  EXPECT_EQ(Try(*a), "INTERNAL_ERROR");
  throwing_ = false;
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  EXPECT_EQ(Try(*a), "");
}

TEST_F(ResidencyTest, StarvingWeightsGetTheRoomOfTheLongestResident) {
  Start(20);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10), c = *Add(3, 10);  // a is away
  std::optional<WeightsPin> use_b = TakeUse(*b), use_c = TakeUse(*c);
  EXPECT_EQ(Try(*a), "away");
  now_ += absl::Seconds(1);
  EXPECT_EQ(Try(*a), "away");
  EXPECT_EQ(Try(*b), "") << "nobody starves yet";
  now_ += absl::Seconds(1);
  EXPECT_EQ(Try(*a), "away");
  EXPECT_EQ(Try(*b), "away") << "no new users";
  EXPECT_EQ(Try(*c), "") << "one that goes is enough";
  use_b.reset();
  RunTasks();
  EXPECT_TRUE(a->resident());
  EXPECT_FALSE(b->resident());
  EXPECT_EQ(Try(*a), "");
  RunTasks();  // b is wanted, too
  EXPECT_TRUE(b->resident());
  EXPECT_FALSE(a->resident());
}

TEST_F(ResidencyTest, DrainingEndsWhenNothingStarves) {
  Start(10);
  const EntryPtr a = *Add(1, 10);
  EntryPtr b = *Add(2, 10);
  std::optional<WeightsPin> use = TakeUse(*b);
  EXPECT_EQ(Try(*a), "away");
  EntryPtr c = *Add(3, 10);
  now_ += absl::Seconds(3);
  EXPECT_EQ(Try(*c), "away");
  EXPECT_EQ(Try(*b), "away");
  c.reset();
  // a starves still.
  EXPECT_EQ(Try(*b), "away");
  use.reset();
  RunTasks();
  EXPECT_TRUE(b->resident() || a->resident());
}

TEST_F(ResidencyTest, AnEntryDestroyedDuringItsLoadFreesItsRoom) {
  Start(10);
  EntryPtr a = *Add(1, 10);
  const EntryPtr b = *Add(2, 10);
  EXPECT_EQ(Try(*a), "away");
  a.reset();
  RunTasks();
  EXPECT_EQ(residency_->stats().bytes, 0);
  EXPECT_EQ(Try(*b), "away");
  RunTasks();
  EXPECT_TRUE(b->resident());
}

TEST_F(ResidencyTest, EntriesMayOutliveTheResidency) {
  Start(10);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10);
  std::optional<WeightsPin> use = TakeUse(*b);
  EXPECT_EQ(Try(*a), "away");
  residency_.reset();
  use.reset();
  EXPECT_TRUE(tasks_.empty()) << "nothing is reloaded any more";
}

TEST_F(ResidencyTest, WeightsOfOneBatchAreLoadedTogether) {
  Start(20);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10), c = *Add(3, 10), d = *Add(4, 10);
  Residency::Entry* const pair[] = {a.get(), b.get()};
  const auto try_pair = [&] {
    const auto uses = Residency::PinAll(pair);
    return uses.ok() && uses->has_value();
  };
  bool came = false;
  for (int i = 0; i < 10 && !came; ++i) {
    came = try_pair();
    (void)Try(*c);  // somebody else asks all the time
    RunTasks();
  }
  EXPECT_TRUE(came);
}

TEST_F(ResidencyTest, WeightsThatNeverFitTogetherAreRefused) {
  Start(15);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10);
  Residency::Entry* const pair[] = {a.get(), b.get()};
  EXPECT_EQ(ReasonOf(Residency::PinAll(pair).status()), "OUT_OF_MEMORY");
  EXPECT_EQ(Try(*a), "away") << "each of them alone comes";
  RunTasks();
  EXPECT_EQ(Try(*a), "");
}

TEST_F(ResidencyTest, AWantThatCannotBeMetHoldsUpNoOther) {
  Start(10);
  const EntryPtr x = *Add(1, 5), w = *Add(2, 6), y = *Add(3, 4);
  std::optional<WeightsPin> use = TakeUse(*y);
  EXPECT_EQ(Try(*x), "away");
  RunTasks();
  std::optional<WeightsPin> other = TakeUse(*x);
  EXPECT_EQ(Try(*w), "away");
  use.reset();
  const EntryPtr p = *Add(4, 5, Kind::kPinned);
  now_ += absl::Seconds(5);
  EXPECT_EQ(Try(*w), "OUT_OF_MEMORY");
  EXPECT_EQ(Try(*x), "") << "it drains for nobody";
  other.reset();
  EXPECT_EQ(Try(*y), "away");
  RunTasks();
  EXPECT_EQ(Try(*y), "");
}

// Random uses of more versions than fit: limits hold, the right weights are used, and everyone who
// asks often enough gets his.
TEST_F(ResidencyTest, RandomUseKeepsTheLimitAndStarvesNobody) {
  for (uint32_t seed = 1; seed <= 30; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % n); };
    const int64_t limit = 40 + below(60);
    // Half of the runs have host memory: for some of what is away, or for all of it.
    Start(limit, seed % 2 == 0 ? 0 : (seed % 4 == 1 ? 60 + below(200) : 440));
    std::vector<EntryPtr> entries;
    for (int i = 0; i < 12; ++i) {
      const Kind kind = seed % 4 == 3 && below(2) == 0 ? Kind::kEphemeral : Kind::kStored;
      entries.push_back(*Add(i, 5 + below(30), kind));
    }
    std::vector<std::pair<int, WeightsPin>> uses;
    std::map<int, int> waits;
    for (int round = 0; round < 3000; ++round) {
      now_ += absl::Milliseconds(50);
      // Some names are asked for far more often than others.
      const int i = below(3) == 0 ? below(12) : below(4);
      auto use = Use(*entries[i]);
      ASSERT_TRUE(use.ok()) << use.status();
      if (use->has_value()) {
        EXPECT_EQ(NumberOf(*entries[i]), i);
        uses.emplace_back(i, std::move((**use)[0]));
        waits[i] = 0;
      } else {
        ASSERT_LT(++waits[i], 600) << i << " starves";
      }
      if (!uses.empty() && below(3) > 0) {
        std::swap(uses[below(static_cast<int>(uses.size()))], uses.back());
        uses.pop_back();
      }
      if (below(4) == 0) RunTasks();
      ASSERT_LE(residency_->stats().bytes, limit);
      if (uses.size() > 20) uses.clear();
    }
    uses.clear();
    RunTasks();
    entries.clear();
    RunTasks();  // some were on their way
    EXPECT_EQ(residency_->stats().bytes, 0);
    ASSERT_EQ(alive_, 0);
  }
}

}  // namespace
}  // namespace dorad::adapter
