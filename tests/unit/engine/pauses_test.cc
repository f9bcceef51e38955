// Pauses of one adapter; pause_all_test.cc has those of everything, pauses_wait_test.cc those that
// wait.

#include "tests/unit/engine/pauses_fixture.h"

namespace dorad::engine {
namespace {

TEST_F(PausesTest, KeepFreezesTheRequestsOfOneAdapterOnly) {
  StartSlowly();
  GenerateInput input = Input(Prompt(5), 400, MakeAdapter("a", 1));
  const SampleText expected = Expected(input, 0, 512);
  auto frozen = Submit(std::move(input));
  ASSERT_EQ(Pause(PauseMode::kKeep, a_), 1);
  const EngineStats stats = engine_->stats();
  EXPECT_FALSE(stats.paused);
  EXPECT_EQ(stats.frozen_requests, 1);
  EXPECT_THAT(stats.paused_adapters, ElementsAre(a_));
  auto late = Submit(Input(Prompt(5), 3, MakeAdapter("a", 2)));
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(5), 9, MakeAdapter("b", 1)))).status.ok());
  ExpectSilent(*late);
  Resume(a_);
  EXPECT_EQ(Wait(*late).samples.at(0).tokens.size(), 3u);
  EXPECT_EQ(Wait(*frozen).samples.at(0).tokens, expected.tokens);
  EXPECT_EQ(engine_->stats().frozen_requests, 0);
  ExpectEverythingBack();
}

TEST_F(PausesTest, NoStepRunsWhenAPauseThatKeepsIsAnswered) {
  for (const adapter::AdapterRef& scope : {adapter::AdapterRef(), a_}) {
    StartSlowly();
    std::atomic<int> begun = 0, finished = 0;
    absl::Notification running;
    runner_->on_begin = [&](auto) {
      ++begun;
      return absl::OkStatus();
    };
    runner_->on_step = [&] {
      absl::SleepFor(absl::Microseconds(200));
      if (++finished == 20) running.Notify();
      return absl::OkStatus();
    };
    auto stream = Submit(Input(Prompt(5), 400, MakeAdapter("a", 1)));
    running.WaitForNotification();  // two steps in flight by now
    ASSERT_EQ(Pause(PauseMode::kKeep, scope), 1);
    EXPECT_EQ(begun, finished);
    size_t tokens = 0;
    while (const auto delta = stream->Take()) tokens += delta->token_ids.size();
    EXPECT_EQ(tokens, static_cast<size_t>(finished)) << "every step's token has been delivered";
    Resume({});
    EXPECT_TRUE(Wait(*stream).status.ok());
    ExpectEverythingBack();
  }
}

TEST_F(PausesTest, AVersionIsPausedWithoutItsSiblings) {
  Start(DefaultOptions(), 64);
  ASSERT_EQ(Pause(PauseMode::kKeep, a1_), 0);
  auto frozen = Submit(Input(Prompt(5), 3, MakeAdapter("a", 1)));
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(5), 3, MakeAdapter("a", 2)))).status.ok());
  ExpectSilent(*frozen);
  Resume(a_);  // another pause, of which there is none
  ExpectSilent(*frozen);
  Resume({});  // every pause
  EXPECT_TRUE(Wait(*frozen).status.ok());
  ExpectEverythingBack();
}

TEST_F(PausesTest, AnEngineWithFrozenRequestsOnlyIsIdle) {
  Start(DefaultOptions(), 64);
  ASSERT_EQ(Pause(PauseMode::kKeep, a_), 0);
  auto frozen = Submit(Input(Prompt(5), 3, MakeAdapter("a", 1)));
  const uint64_t steps = engine_->stats().steps;
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_EQ(engine_->stats().steps, steps);
  Cancel(frozen);
  EXPECT_EQ(Wait(*frozen).status.code(), absl::StatusCode::kCancelled);
  Resume({});
  ExpectEverythingBack();
}

TEST_F(PausesTest, AbortEndsTheRequestsOfOneAdapterOnly) {
  StartSlowly();
  auto ended = Submit(Input(Prompt(5), 500, MakeAdapter("a", 1)));
  auto other = Submit(Input(Prompt(5), 400, MakeAdapter("b", 1)));
  EXPECT_EQ(Pause(PauseMode::kAbort, a_), 1);
  EXPECT_TRUE(Wait(*ended).status.ok());
  EXPECT_EQ(Wait(*other).samples.at(0).tokens.size(), 400u);
  auto later = Submit(Input(Prompt(5), 3, MakeAdapter("a", 1)));
  ExpectSilent(*later);
  Resume(a_);
  EXPECT_TRUE(Wait(*later).status.ok());
  ExpectEverythingBack();
}

TEST_F(PausesTest, WaitRefusesTheAdapterAndAnswersWhenItsRequestsHaveEnded) {
  StartSlowly();
  auto running = Submit(Input(Prompt(5), 400, MakeAdapter("a", 1)));
  auto other = Submit(Input(Prompt(5), 500, MakeAdapter("b", 1)));
  EXPECT_EQ(Pause(PauseMode::kWait, a_), 1);
  EXPECT_EQ(Wait(*running).samples.at(0).tokens.size(), 400u);
  auto stream = std::make_shared<TokenStream>(/*final_only=*/false);
  const absl::Status refused =
      engine_->Submit(Input(Prompt(5), 3, MakeAdapter("a", 1)), stream).status();
  EXPECT_EQ(ReasonOf(refused), "ENGINE_PAUSED");
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(5), 3))).status.ok());
  Resume(a_);
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(5), 3, MakeAdapter("a", 1)))).status.ok());
  EXPECT_TRUE(Wait(*other).status.ok());
  ExpectEverythingBack();
}

TEST_F(PausesTest, FrozenRequestsGiveTheirPagesToOthersAndLoseNoToken) {
  Start(DefaultOptions(), 24);  // 384 tokens
  std::vector<std::shared_ptr<TokenStream>> frozen;
  std::vector<std::vector<TokenId>> expected;
  absl::Notification begun;
  runner_->on_step = [&, step = 0]() mutable {
    if (++step == 10) begun.Notify();
    return absl::OkStatus();
  };
  for (int i = 0; i < 3; ++i) {
    GenerateInput input = Input(Prompt(60, 100 + i), 300, MakeAdapter("a", 1));
    expected.push_back(Expected(input, 0, 384).tokens);
    frozen.push_back(Submit(std::move(input)));
  }
  begun.WaitForNotification();
  Pause(PauseMode::kKeep, a_);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(Wait(*Submit(Input(Prompt(250, 500 + i), 60))).samples.at(0).tokens.size(), 60u);
  }
  Resume(a_);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Wait(*frozen[i]).samples.at(0).tokens, expected[i]) << i;
  ExpectEverythingBack();
}

TEST_F(PausesTest, ARunningRequestTakesThePagesOfFrozenOnesBeforeItsOwn) {
  Start(DefaultOptions(), 24, /*max_steps_in_flight=*/1);
  absl::Notification begun;
  runner_->on_step = [&, step = 0]() mutable {
    if (++step == 3) begun.Notify();
    absl::SleepFor(absl::Microseconds(500));
    return absl::OkStatus();
  };
  GenerateInput input = Input(Prompt(90), 200, MakeAdapter("a", 1));
  const SampleText expected = Expected(input, 0, 384);
  auto frozen = Submit(std::move(input));
  begun.WaitForNotification();
  Pause(PauseMode::kKeep, a_);
  // Together with the six pages of the frozen one it needs more than there are.
  const SampleText sample = Wait(*Submit(Input(Prompt(250, 500), 60))).samples.at(0);
  EXPECT_EQ(sample.tokens.size(), 60u);
  EXPECT_EQ(sample.finish.usage.preemptions, 0u);
  Resume(a_);
  EXPECT_EQ(Wait(*frozen).samples.at(0).tokens, expected.tokens);
  ExpectEverythingBack();
}

TEST_F(PausesTest, ARequestThatSwitchesToAPausedVersionFreezes) {
  Start(DefaultOptions(), 64);
  const auto first = MakeAdapter("a", 1);
  const auto second = MakeAdapter("a", 2);
  std::atomic<bool> moved = false;
  GenerateInput input = Input(Prompt(5), 300, first);
  input.in_flight = InFlightPolicy::kSwitchRecompute;
  input.follow = [&]() -> absl::StatusOr<adapter::AdapterLease> {
    return leases_.Take(moved ? second : first);
  };
  ASSERT_EQ(Pause(PauseMode::kKeep, {"a", 2}), 0);
  runner_->on_step = [&, step = 0]() mutable {
    if (++step == 5) {
      moved = true;
      engine_->NoteActivated();
    }
    return absl::OkStatus();
  };
  auto stream = Submit(std::move(input));
  const absl::Time limit = absl::Now() + absl::Seconds(20);
  while (engine_->stats().frozen_requests == 0 && absl::Now() < limit) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  ASSERT_EQ(engine_->stats().frozen_requests, 1);
  Resume({"a", 2});
  EXPECT_EQ(Wait(*stream).samples.at(0).tokens.size(), 300u);
  ExpectEverythingBack();
}

TEST_F(PausesTest, ATenantHasAShareOfPausesAndWaits) {
  StartSlowly();
  auto stream = Submit(Input(Prompt(5), 400, MakeAdapter("a", 1)));
  std::atomic<int> full = 0, answered = 0;
  const auto count = [&](const absl::StatusOr<int>& result) {
    full += ReasonOf(result.status()) == "PAUSES_FULL";
    ++answered;
  };
  // Any number may wait for the same.
  for (int i = 0; i < 2000; ++i) engine_->Pause({PauseMode::kWait, a_, "small"}, count);
  for (int i = 0; i < 2000; ++i) {
    const PauseMode mode = i % 2 == 0 ? PauseMode::kKeep : PauseMode::kWait;
    engine_->Pause({mode, {absl::StrCat("n", i), 0}, "small"}, count);
  }
  absl::Notification other;
  engine_->Pause({PauseMode::kKeep, {"b", 0}, "other"}, [&](const absl::StatusOr<int>& result) {
    EXPECT_TRUE(result.ok()) << result.status();
    other.Notify();
  });
  other.WaitForNotification();
  EXPECT_EQ(full, 2000 - (Pauses::kMostOfTenant - 1));
  Resume({});
  EXPECT_EQ(answered, 4000);
  Wait(*stream);
  ExpectEverythingBack();
}

TEST_F(PausesTest, PausesAreBoundedAndARefusedOneHasNoEffect) {
  Start(DefaultOptions(), 64);
  std::atomic<int> answered = 0;
  for (int i = 0; i < Pauses::kMost; ++i) {
    engine_->Pause({PauseMode::kKeep, {absl::StrCat("n", i), 0}},
                   [&](const absl::StatusOr<int>& r) {
                     EXPECT_TRUE(r.ok());
                     ++answered;
                   });
  }
  for (const PauseMode mode : {PauseMode::kKeep, PauseMode::kWait, PauseMode::kAbort}) {
    absl::Notification refused;
    engine_->Pause({mode, a_}, [&](const absl::StatusOr<int>& r) {
      EXPECT_EQ(ReasonOf(r.status()), "PAUSES_FULL");
      refused.Notify();
    });
    refused.WaitForNotification();
    EXPECT_TRUE(Wait(*Submit(Input(Prompt(5), 3, MakeAdapter("a", 1)))).status.ok());
  }
  EXPECT_EQ(answered, Pauses::kMost);
  EXPECT_EQ(Pause(PauseMode::kKeep, {"n7", 0}), 0) << "which is there";
  Resume({"n8", 0});
  EXPECT_EQ(Pause(PauseMode::kKeep, a_), 0);
  Resume({});
  ExpectEverythingBack();
}

// In any order of pauses and resumes, every request ends with its tokens.
TEST_F(PausesTest, RandomPausesLoseNoToken) {
  for (uint32_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % n); };
    Start(DefaultOptions(), 30 + below(20));
    const adapter::AdapterRef scopes[] = {{}, {"a", 0}, {"a", 1}, {"a", 2}, {"b", 0}};
    std::vector<std::shared_ptr<TokenStream>> streams;
    std::vector<SampleText> expected;
    std::vector<uint64_t> tickets;
    for (int i = 0; i < 60; ++i) {
      GenerateInput input = Input(Prompt(1 + below(80), 100 + below(50)), 1 + below(60),
                                  MakeAdapter(below(2) ? "a" : "b", 1 + below(2)));
      const SampleText text = Expected(input, 0, 512);
      auto stream = std::make_shared<TokenStream>(/*final_only=*/false);
      if (engine_->Submit(std::move(input), stream).ok()) {
        streams.push_back(stream);
        expected.push_back(text);
      }
      const adapter::AdapterRef& scope = scopes[below(5)];
      if (below(3) == 0) {
        const PauseMode mode = below(2) ? PauseMode::kKeep : PauseMode::kWait;
        tickets.push_back(engine_->Pause({mode, scope}, [](auto) {}));
      } else if (below(3) == 0 && !tickets.empty()) {
        engine_->CancelPause(tickets[random() % tickets.size()]);
      } else if (below(3) == 0) {
        engine_->Resume(scope, [] {});
      }
    }
    Resume({});
    for (size_t i = 0; i < streams.size(); ++i) {
      const Outcome outcome = Wait(*streams[i]);
      // A pause that refuses may have come before the request entered.
      if (ReasonOf(outcome.status) == "ENGINE_PAUSED") continue;
      EXPECT_EQ(outcome.samples.at(0).tokens, expected[i].tokens) << i;
    }
    ExpectEverythingBack();
  }
}

// Without it a client sees a bare deadline and looks for the fault in the network.
TEST_F(PausesTest, ADeadlineThatComesInAPauseNamesIt) {
  for (const adapter::AdapterRef& scope : {adapter::AdapterRef(), a_, a1_}) {
    Start(DefaultOptions(), 64);
    ASSERT_EQ(Pause(PauseMode::kKeep, scope), 0);
    GenerateInput input = Input(Prompt(5), 3, MakeAdapter("a", 1));
    input.deadline = absl::Now() + absl::Milliseconds(100);
    const absl::Status status = Wait(*Submit(std::move(input))).status;
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(ReasonOf(status), "DEADLINE_EXCEEDED");
    EXPECT_EQ(MetadataOf(status)["waited_for"], "pause");
    const std::string ref = scope.ToString();
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(ref.empty() ? "the engine has been paused for"
                                      : "adapter " + ref + " has been paused for"));
    EXPECT_THAT(std::string(status.message()),
                HasSubstr((ref.empty() ? "Resume" : "Resume of " + ref) + " ends the pause"));
    Resume({});
    ExpectEverythingBack();
  }
}

TEST_F(PausesTest, ARefusedRequestIsToldOfItsPause) {
  Start(DefaultOptions(), 64);
  ASSERT_EQ(Pause(PauseMode::kWait, a_), 0);
  const absl::Status refused = Try(MakeAdapter("a", 1));
  EXPECT_EQ(ReasonOf(refused), "ENGINE_PAUSED");
  EXPECT_EQ(MetadataOf(refused)["paused"], "a");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("adapter a has been paused for"));
  ASSERT_EQ(Pause(PauseMode::kWait, {}), 0);
  EXPECT_EQ(MetadataOf(Try(MakeAdapter("b", 1)))["paused"], "all");
}

// A caller's own clock ends his call at the deadline: the explanation must be on its way by then.
TEST(RequestTest, AStoppedRequestIsExplainedShortlyBeforeItsDeadline) {
  const Instant now = SteadyNow();
  for (const auto& [left, early] :
       std::vector<std::pair<int, int>>{{1000, 50}, {5000, 250}, {600000, 250}}) {
    Request request(GenerateInput(), std::make_shared<TokenStream>(false), now);
    request.deadline = now + std::chrono::milliseconds(left);
    EXPECT_EQ(request.deadline - request.ExplainAt(), std::chrono::milliseconds(early));
  }
  Request endless(GenerateInput(), std::make_shared<TokenStream>(false), now);
  EXPECT_EQ(endless.ExplainAt(), Instant::max());
}

}  // namespace
}  // namespace dorad::engine
