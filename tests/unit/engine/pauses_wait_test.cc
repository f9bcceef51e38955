// Pauses that wait for running requests, and what supersedes or cancels them.
#include "tests/unit/engine/pauses_fixture.h"

namespace dorad::engine {
namespace {

TEST_F(PausesTest, APauseThatWaitsIsSupersededByItsOwnScopeAndByPauseAll) {
  for (const adapter::AdapterRef& by : {a_, adapter::AdapterRef()}) {
    StartSlowly();
    auto stream = Submit(Input(Prompt(5), 300, MakeAdapter("a", 1)));
    absl::Notification overtaken;
    absl::StatusOr<int> result;
    engine_->Pause({PauseMode::kWait, a_}, [&](absl::StatusOr<int> r) {
      result = std::move(r);
      overtaken.Notify();
    });
    Resume({"b", 0});  // none of its business
    EXPECT_FALSE(overtaken.HasBeenNotified());
    Resume(by);
    overtaken.WaitForNotification();
    EXPECT_EQ(ReasonOf(result.status()), "PAUSE_SUPERSEDED");
    Wait(*stream);
  }
}

// Who may pause some adapter cannot end a pause of everything.
TEST_F(PausesTest, PauseAllWaitsOnWhenOneAdapterIsPaused) {
  StartSlowly();
  auto stream = Submit(Input(Prompt(5), 400, MakeAdapter("a", 1)));
  absl::Notification in_effect;
  absl::StatusOr<int> result;
  engine_->Pause({PauseMode::kWait, {}}, [&](absl::StatusOr<int> r) {
    result = std::move(r);
    in_effect.Notify();
  });
  Resume(a_);
  absl::Notification refused;
  engine_->Pause({PauseMode::kKeep, a_}, [&](const absl::StatusOr<int>& r) {
    EXPECT_EQ(ReasonOf(r.status()), "PAUSE_SUPERSEDED");
    refused.Notify();
  });
  refused.WaitForNotification();
  EXPECT_EQ(engine_->stats().frozen_requests, 0);
  EXPECT_FALSE(in_effect.HasBeenNotified());
  EXPECT_EQ(Wait(*stream).samples.at(0).tokens.size(), 400u);
  in_effect.WaitForNotification();
  EXPECT_EQ(*result, 1);
  EXPECT_TRUE(engine_->stats().paused);
  Resume({});
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(5), 3))).status.ok());
  ExpectEverythingBack();
}

TEST_F(PausesTest, ACancelledPauseHasNoEffect) {
  for (const adapter::AdapterRef& scope : {adapter::AdapterRef(), a_, a1_}) {
    StartSlowly();
    auto running = Submit(Input(Prompt(5), 400, MakeAdapter("a", 1)));
    const auto waiting = BeginWait(scope);
    EXPECT_EQ(ReasonOf(Try(MakeAdapter("a", 1))), "ENGINE_PAUSED");
    EXPECT_THAT(engine_->stats().pending_pauses, ElementsAre(scope));
    engine_->CancelPause(waiting->pause_id);
    waiting->over.WaitForNotification();
    EXPECT_EQ(waiting->result.status().code(), absl::StatusCode::kCancelled);
    EXPECT_TRUE(Try(MakeAdapter("a", 1)).ok());
    EXPECT_EQ(Wait(*running).samples.at(0).tokens.size(), 400u);
    EXPECT_TRUE(Try(MakeAdapter("a", 1)).ok());
    const EngineStats stats = engine_->stats();
    EXPECT_TRUE(!stats.paused && stats.paused_adapters.empty() && stats.pending_pauses.empty());
    ExpectEverythingBack();
  }
}

TEST_F(PausesTest, OneOfTwoWaitersMayCancel) {
  StartSlowly();
  auto running = Submit(Input(Prompt(5), 400, MakeAdapter("a", 1)));
  const auto first = BeginWait(a_);
  const auto second = BeginWait(a_);
  engine_->CancelPause(first->pause_id);
  first->over.WaitForNotification();
  EXPECT_EQ(first->result.status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(ReasonOf(Try(MakeAdapter("a", 1))), "ENGINE_PAUSED");
  EXPECT_TRUE(Wait(*running).status.ok());
  second->over.WaitForNotification();
  EXPECT_EQ(second->result.value(), 1);
  EXPECT_THAT(engine_->stats().paused_adapters, ElementsAre(a_));
  engine_->CancelPause(second->pause_id);  // too late
  EXPECT_EQ(ReasonOf(Try(MakeAdapter("a", 1))), "ENGINE_PAUSED");
  Resume(a_);
  EXPECT_TRUE(Try(MakeAdapter("a", 1)).ok());
  ExpectEverythingBack();
}

TEST_F(PausesTest, RequestsThatAWaitLetRunFreezeAgainWhenItIsCancelled) {
  StartSlowly();
  auto stream = Submit(Input(Prompt(5), 400, MakeAdapter("a", 1)));
  ASSERT_EQ(Pause(PauseMode::kKeep, a_), 1);
  const auto waiting = BeginWait({});
  const absl::Time limit = absl::Now() + absl::Seconds(20);
  while (engine_->stats().frozen_requests > 0 && absl::Now() < limit) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_TRUE(engine_->stats().paused_adapters.empty()) << "none stands still meanwhile";
  engine_->CancelPause(waiting->pause_id);
  waiting->over.WaitForNotification();
  EXPECT_EQ(engine_->stats().frozen_requests, 1);
  EXPECT_THAT(engine_->stats().paused_adapters, ElementsAre(a_));
  ExpectSilent(*stream);
  Resume(a_);
  EXPECT_TRUE(Wait(*stream).status.ok());
  ExpectEverythingBack();
}

TEST_F(PausesTest, AWiderPauseSupersedesAWaitForAPart) {
  StartSlowly();
  auto stream = Submit(Input(Prompt(5), 400, MakeAdapter("a", 1)));
  const auto waiting = BeginWait(a1_);
  EXPECT_EQ(Pause(PauseMode::kKeep, a_), 1);
  waiting->over.WaitForNotification();
  EXPECT_EQ(ReasonOf(waiting->result.status()), "PAUSE_SUPERSEDED");
  EXPECT_EQ(engine_->stats().frozen_requests, 1);
  Resume(a_);
  EXPECT_EQ(Wait(*stream).samples.at(0).tokens.size(), 400u);
  ExpectEverythingBack();
}

TEST_F(PausesTest, AWaitLetsItsRequestsRunBeneathAWiderPause) {
  StartSlowly();
  auto stream = Submit(Input(Prompt(5), 400, MakeAdapter("a", 1)));
  auto sibling = Submit(Input(Prompt(5), 40, MakeAdapter("a", 2)));
  ASSERT_EQ(Pause(PauseMode::kKeep, a_), 2);
  EXPECT_EQ(Pause(PauseMode::kWait, a1_), 1);
  EXPECT_EQ(Wait(*stream).samples.at(0).tokens.size(), 400u);
  ExpectSilent(*sibling);
  EXPECT_EQ(engine_->stats().frozen_requests, 1);
  Resume({});
  EXPECT_TRUE(Wait(*sibling).status.ok());
  ExpectEverythingBack();
}

// Keeping some of what a pause waits for would have it wait for ever.
TEST_F(PausesTest, AWaitForAllVersionsKeepsNone) {
  StartSlowly();
  auto stream = Submit(Input(Prompt(5), 400, MakeAdapter("a", 1)));
  const auto waiting = BeginWait(a_);
  const auto part = BeginWait(a1_);
  EXPECT_EQ(Pause(PauseMode::kKeep, a1_), -1);
  EXPECT_TRUE(Wait(*stream).status.ok());
  for (const auto* each : {&waiting, &part}) {
    (*each)->over.WaitForNotification();
    EXPECT_EQ((*each)->result.value_or(-1), 1) << "what is refused overtakes nobody";
  }
  Resume({});
  ExpectEverythingBack();
}

}  // namespace
}  // namespace dorad::engine
