#include "tests/unit/adapter/residency_fixture.h"

namespace dorad::adapter {
namespace {

TEST_F(ResidencyTest, EvictedWeightsComeBackFromTheirHostCopy) {
  Start(20, 20);
  const EntryPtr a = *Add(1, 10, Kind::kEphemeral), b = *Add(2, 10);
  EXPECT_EQ(Try(*b), "");
  EXPECT_FALSE(a->in_host_memory()) << "it is resident";
  const EntryPtr c = *Add(3, 10);
  EXPECT_FALSE(a->resident());
  EXPECT_TRUE(a->in_host_memory());
  EXPECT_EQ(alive_, 2) << "its memory is free";
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  const auto use = Use(*a);
  ASSERT_TRUE(use.ok() && use->has_value());
  EXPECT_EQ(NumberOf(*a), 1);
  EXPECT_EQ(residency_->stats().reloads_from_host, 1);
  EXPECT_EQ(residency_->stats().reloads_from_store, 0);
  EXPECT_EQ(residency_->stats().host_bytes, 20) << "a's, which it keeps, and b's";
}

TEST_F(ResidencyTest, AHostCopyIsMadeOnce) {
  Start(10, 30);
  const EntryPtr a = *Add(1, 10, Kind::kEphemeral), b = *Add(2, 10, Kind::kEphemeral);
  for (int i = 0; i < 6; ++i) {
    const EntryPtr& wanted = i % 2 == 0 ? a : b;
    EXPECT_EQ(Try(*wanted), "away");
    RunTasks();
    EXPECT_EQ(Try(*wanted), "");
  }
  EXPECT_EQ(host_copies_->saved(), 2);
  EXPECT_EQ(residency_->stats().reloads_from_host, 6);
}

TEST_F(ResidencyTest, TheRoomOfHostCopiesGoesToVersionsThatNeedItMost) {
  Start(10, 20);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10), c = *Add(3, 10);
  EXPECT_TRUE(a->in_host_memory() && b->in_host_memory());
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  EXPECT_EQ(Try(*a), "");
  EXPECT_EQ(residency_->stats().reloads_from_host, 1) << "c took b's room, not that of what comes";
  EXPECT_TRUE(a->in_host_memory() && c->in_host_memory());
  EXPECT_EQ(Try(*b), "away");
  RunTasks();
  EXPECT_EQ(Try(*b), "");
  EXPECT_EQ(residency_->stats().reloads_from_store, 1);
  EXPECT_EQ(Try(*c), "away");
  RunTasks();  // b leaves; c comes from its host copy
  EXPECT_EQ(Try(*c), "");
  EXPECT_FALSE(a->in_host_memory()) << "the store has it, and c's copy was in use";
  EXPECT_TRUE(b->in_host_memory() && c->in_host_memory());
  const EntryPtr e = *Add(4, 10, Kind::kEphemeral);
  EXPECT_TRUE(b->in_host_memory() && c->in_host_memory()) << "c still has its copy";
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  EXPECT_EQ(Try(*a), "");
  EXPECT_TRUE(e->in_host_memory()) << "nothing else brings it back";
  EXPECT_FALSE(b->in_host_memory()) << "less recently used than c";
}

TEST_F(ResidencyTest, TheOnlyCopyIsNeverDropped) {
  Start(10, 10);
  const EntryPtr a = *Add(1, 10, Kind::kEphemeral), b = *Add(2, 10);
  EXPECT_TRUE(a->in_host_memory());
  const EntryPtr c = *Add(3, 10);
  EXPECT_TRUE(a->in_host_memory());
  EXPECT_FALSE(b->resident() || b->in_host_memory()) << "the store has it";
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  EXPECT_EQ(Try(*a), "");
}

TEST_F(ResidencyTest, TwoVersionsWithoutAStoreChangePlacesThroughAThirdCopy) {
  Start(10, 20);
  const EntryPtr a = *Add(1, 10, Kind::kEphemeral), b = *Add(2, 10, Kind::kEphemeral);
  EXPECT_EQ(ReasonOf(Add(3, 10, Kind::kEphemeral).status()), "OUT_OF_MEMORY")
      << "two away and one resident could not change places";
  const EntryPtr c = *Add(4, 10), d = *Add(5, 10);
  for (int i = 0; i < 3; ++i) {
    for (const EntryPtr* wanted : {&a, &b, &c, &d}) {
      EXPECT_EQ(Try(**wanted), "away");
      RunTasks();
      EXPECT_EQ(Try(**wanted), "");
    }
  }
}

TEST_F(ResidencyTest, AWaitForRoomThatCannotBeMadeEndsInAnError) {
  // Two of six bytes have copies of ten: one of them fits, where ten bytes of weights would.
  Start(12, 10);
  const EntryPtr a = *Add(1, 6, Kind::kEphemeral);
  EntryPtr b = *Add(2, 6, Kind::kEphemeral);
  std::optional<WeightsPin> use = TakeUse(*b);
  const EntryPtr c = *Add(3, 8);
  EXPECT_EQ(Try(*c), "away");
  RunTasks();
  EXPECT_EQ(Try(*c), "away") << "used weights may be evicted once idle";
  use.reset();
  EXPECT_EQ(Try(*c), "OUT_OF_MEMORY");
  b.reset();
  EXPECT_EQ(Try(*c), "away");
  RunTasks();
  EXPECT_EQ(Try(*c), "");
  EXPECT_TRUE(a->in_host_memory());
}

TEST_F(ResidencyTest, WeightsThatAreSavedAndRestoredHoldNoOtherRoom) {
  Start(20, 40);
  EntryPtr a = *Add(1, 10, Kind::kEphemeral), b = *Add(2, 10, Kind::kEphemeral);
  EntryPtr c = *Add(3, 10, Kind::kEphemeral), d = *Add(4, 10);
  EXPECT_EQ(residency_->stats().host_copies, 2);
  EXPECT_EQ(Try(*a), "away");
  a.reset();  // while it comes
  RunTasks();
  b.reset();
  c.reset();
  d.reset();
  EXPECT_EQ(residency_->stats().bytes, 0);
  EXPECT_EQ(residency_->stats().host_bytes, 0);
  EXPECT_EQ(host_copies_->bytes(), 0);
}

TEST_F(ResidencyTest, ARestoreWithoutMemoryEvictsOthers) {
  Start(0, 30);
  const EntryPtr a = *Add(1, 10, Kind::kEphemeral), b = *Add(2, 10, Kind::kEphemeral);
  EXPECT_TRUE(MakesRoom());
  EXPECT_FALSE(a->resident());
  host_copies_->set_shortage(1);
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  EXPECT_EQ(Try(*a), "");
  EXPECT_FALSE(b->resident()) << "the device was full in spite of the books";
  host_copies_->set_shortage(5);
  const WeightsPin use = TakeUse(*a);
  EXPECT_EQ(Try(*b), "away");
  RunTasks();
  EXPECT_EQ(Try(*b), "OUT_OF_MEMORY") << "a is in use";
  host_copies_->set_shortage(0);
  EXPECT_EQ(Try(*b), "away");
  RunTasks();
  EXPECT_EQ(Try(*b), "");
}

TEST_F(ResidencyTest, WeightsThatCannotBeSavedStay) {
  Start(20, 20);
  const EntryPtr a = *Add(1, 10, Kind::kEphemeral), b = *Add(2, 10);
  EXPECT_EQ(Try(*b), "");
  host_copies_->set_failing(true);
  const EntryPtr c = *Add(3, 10);
  EXPECT_TRUE(a->resident()) << "beyond the limit rather than lost";
  EXPECT_EQ(Try(*a), "");
  EXPECT_EQ(residency_->stats().host_bytes, 0);
  host_copies_->set_failing(false);
  const EntryPtr d = *Add(4, 10);
  EXPECT_LE(residency_->stats().bytes, 20);
}

TEST_F(ResidencyTest, AnExceptionOfACopyIsAFailedCopy) {
  Start(0, 20);
  const EntryPtr a = *Add(1, 10, Kind::kEphemeral);
  host_copies_->set_throwing(true);
  EXPECT_FALSE(MakesRoom());
  EXPECT_EQ(Try(*a), "") << "it could not be saved";
  host_copies_->set_throwing(false);
  EXPECT_TRUE(MakesRoom());
  host_copies_->set_throwing(true);
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  EXPECT_EQ(Try(*a), "INTERNAL_ERROR");
  host_copies_->set_throwing(false);
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  EXPECT_EQ(Try(*a), "");
}

TEST_F(ResidencyTest, WeightsThatCannotBeSavedMakeNoRoom) {
  Start(0, 30);
  const EntryPtr a = *Add(1, 10, Kind::kEphemeral);
  host_copies_->set_failing(true);
  EXPECT_FALSE(MakesRoom());
  EXPECT_EQ(Try(*a), "");
}

}  // namespace
}  // namespace dorad::adapter
