// Pauses of everything.

#include "server/engine/engine.h"
#include "tests/unit/support/engine_fixture.h"

namespace dorad::engine {
namespace {

TEST_F(EngineTest, PauseKeepFreezesAndResumeGoesOn) {
  Start(DefaultOptions(), 64);
  runner_->on_step = [] {
    absl::SleepFor(absl::Milliseconds(1));
    return absl::OkStatus();
  };
  GenerateInput input = Input(Prompt(4), 300);
  const SampleText expected = Expected(input, 0, 512);
  auto stream = Submit(std::move(input));
  absl::Notification paused;
  engine_->Pause({PauseMode::kKeep, {}}, [&](absl::StatusOr<int> count) {
    EXPECT_EQ(count.value(), 1);
    paused.Notify();
  });
  paused.WaitForNotification();
  EXPECT_TRUE(engine_->stats().paused) << "an answer comes after its effect can be seen";
  const uint64_t steps = engine_->stats().steps;
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_EQ(engine_->stats().steps, steps);
  absl::Notification resumed;
  engine_->Resume({}, [&] { resumed.Notify(); });
  resumed.WaitForNotification();
  EXPECT_EQ(Wait(*stream).samples.at(0).tokens, expected.tokens);
}

TEST_F(EngineTest, PauseWaitRefusesNewRequestsAndAnswersWhenDrained) {
  Start(DefaultOptions(), 64);
  runner_->on_step = [] {
    absl::SleepFor(absl::Milliseconds(1));
    return absl::OkStatus();
  };
  auto stream = Submit(Input(Prompt(4), 50));
  absl::Notification paused;
  engine_->Pause({PauseMode::kWait, {}}, [&](auto) { paused.Notify(); });
  // At the door, or when it enters behind the pause.
  auto refused = std::make_shared<TokenStream>(false);
  absl::Status status = engine_->Submit(Input(Prompt(4), 2), refused).status();
  if (status.ok()) status = Wait(*refused).status;
  EXPECT_EQ(ReasonOf(status), "ENGINE_PAUSED");
  paused.WaitForNotification();
  EXPECT_EQ(Wait(*stream).samples.at(0).tokens.size(), 50u);
  absl::Notification resumed;
  engine_->Resume({}, [&] { resumed.Notify(); });
  resumed.WaitForNotification();
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(4), 2))).status.ok());
}

TEST_F(EngineTest, PauseWaitLetsFrozenRequestsFinish) {
  Start(DefaultOptions(), 64);
  runner_->on_step = [] {
    absl::SleepFor(absl::Milliseconds(1));
    return absl::OkStatus();
  };
  auto stream = Submit(Input(Prompt(4), 50));
  absl::Notification frozen;
  engine_->Pause({PauseMode::kKeep, {}}, [&](auto) { frozen.Notify(); });
  frozen.WaitForNotification();
  absl::Notification drained;
  engine_->Pause({PauseMode::kWait, {}}, [&](auto) { drained.Notify(); });
  EXPECT_TRUE(drained.WaitForNotificationWithTimeout(absl::Seconds(30)));
  EXPECT_EQ(Wait(*stream).samples.at(0).tokens.size(), 50u);
  EXPECT_TRUE(engine_->stats().paused);
}

TEST_F(EngineTest, APauseThatWaitsIsToldWhenItIsOvertaken) {
  Start(DefaultOptions(), 64);
  runner_->on_step = [] {
    absl::SleepFor(absl::Milliseconds(1));
    return absl::OkStatus();
  };
  auto stream = Submit(Input(Prompt(4), 400));
  absl::Notification overtaken;
  engine_->Pause({PauseMode::kWait, {}}, [&](absl::StatusOr<int> result) {
    EXPECT_EQ(ReasonOf(result.status()), "PAUSE_SUPERSEDED");
    overtaken.Notify();
  });
  engine_->Resume({}, [] {});
  EXPECT_TRUE(overtaken.WaitForNotificationWithTimeout(absl::Seconds(30)));
  EXPECT_EQ(Wait(*stream).samples.at(0).tokens.size(), 400u);
}

TEST_F(EngineTest, PauseAbortEndsEverything) {
  Start(DefaultOptions(), 64);
  runner_->on_step = [] {
    absl::SleepFor(absl::Milliseconds(1));
    return absl::OkStatus();
  };
  auto stream = Submit(Input(Prompt(4), 500));
  absl::Notification paused;
  engine_->Pause({PauseMode::kAbort, {}}, [&](absl::StatusOr<int> count) {
    EXPECT_EQ(count.value(), 1);
    paused.Notify();
  });
  paused.WaitForNotification();
  EXPECT_EQ(Wait(*stream).samples.at(0).finish.reason, FinishReason::kAborted);
  ExpectEverythingBack();
}

}  // namespace
}  // namespace dorad::engine
