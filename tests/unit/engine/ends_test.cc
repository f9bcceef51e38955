// How requests end before their last token: cancels, deadlines, aborts, shutdown.

#include "server/engine/engine.h"
#include "tests/unit/support/engine_fixture.h"

namespace dorad::engine {
namespace {

TEST_F(EngineTest, CancelReturnsEverythingAndOthersGoOn) {
  Start(DefaultOptions(), 64);
  GenerateInput keep = Input(Prompt(10), 200);
  const SampleText expected = Expected(keep, 0, 512);
  // Steps wait for the cancel, which is not to come after the last one.
  absl::Notification asked;
  runner_->on_step = [&] {
    asked.WaitForNotification();
    return absl::OkStatus();
  };
  auto cancelled = Submit(Input(Prompt(12), 480, MakeAdapter("a", 1)));
  auto kept = Submit(std::move(keep));
  Cancel(cancelled);
  asked.Notify();
  EXPECT_EQ(Wait(*cancelled).status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(Wait(*kept).samples.at(0).tokens, expected.tokens);
  ExpectEverythingBack();
}

// A client's cancel may come late.
TEST_F(EngineTest, ACancelIsNoCancelOfTheNextRequestWithTheSameId) {
  Start(DefaultOptions(), 64);
  GenerateInput first = Input(Prompt(4), 2);
  GenerateInput second = Input(Prompt(5), 100);
  second.request_id = first.request_id;
  auto ended = Submit(std::move(first));
  Wait(*ended);
  auto next = Submit(std::move(second));
  Cancel(ended);
  EXPECT_EQ(Wait(*next).samples.at(0).tokens.size(), 100u);
  ExpectEverythingBack();
}

TEST_F(EngineTest, AScoreCanBeCancelled) {
  Start(DefaultOptions(), 64);
  absl::Notification go_on, ended;
  runner_->on_step = [&] {
    go_on.WaitForNotification();
    return absl::OkStatus();
  };
  ScoreInput input;
  input.request_id = "score";
  input.sequences = {Prompt(300)};
  input.leases.push_back(leases_.Take(MakeAdapter("a", 1)));
  absl::Status status;
  auto ticket = std::make_shared<ScoreTicket>([&](const absl::StatusOr<ScoreResult>& result) {
    status = result.status();
    ended.Notify();
  });
  const absl::StatusOr<RequestHandle> handle = engine_->Submit(std::move(input), ticket);
  ASSERT_TRUE(handle.ok());
  engine_->Cancel(*handle);
  go_on.Notify();
  ended.WaitForNotification();
  EXPECT_EQ(ReasonOf(status), "CLIENT_CANCELLED");
  ExpectEverythingBack();
}

TEST_F(EngineTest, AbortReturnsThePartialTokens) {
  Start(DefaultOptions(), 64);
  absl::Notification running;
  std::atomic<int> steps{0};
  runner_->on_step = [&] {
    if (++steps == 5) running.Notify();
    absl::SleepFor(absl::Milliseconds(1));
    return absl::OkStatus();
  };
  GenerateInput input = Input(Prompt(4), 500, MakeAdapter("a", 1));
  const SampleText expected = Expected(input, 0, 512);
  auto stream = Submit(std::move(input));
  running.WaitForNotification();
  absl::Notification done;
  int aborted = 0;
  AbortTarget target;
  target.adapter = {"a", 1};
  engine_->Abort(target, "told to", [&](int count) {
    aborted = count;
    done.Notify();
  });
  done.WaitForNotification();
  EXPECT_EQ(aborted, 1);
  const Outcome outcome = Wait(*stream);
  ASSERT_TRUE(outcome.status.ok());
  const SampleText& sample = outcome.samples.at(0);
  EXPECT_EQ(sample.finish.reason, FinishReason::kAborted);
  EXPECT_EQ(sample.finish.detail, "told to");
  ASSERT_FALSE(sample.tokens.empty());
  EXPECT_TRUE(std::equal(sample.tokens.begin(), sample.tokens.end(), expected.tokens.begin()));
  ExpectEverythingBack();
}

TEST_F(EngineTest, ADeadlineEndsQueuedAndRunningRequests) {
  EngineOptions options = DefaultOptions();
  options.max_running_sequences = 1;
  Start(options, 64);
  runner_->on_step = [] {
    absl::SleepFor(absl::Milliseconds(2));
    return absl::OkStatus();
  };
  GenerateInput running = Input(Prompt(4), 500);
  running.deadline = absl::Now() + absl::Milliseconds(100);
  GenerateInput queued = Input(Prompt(4, 9), 500);
  queued.deadline = absl::Now() + absl::Milliseconds(50);
  auto first = Submit(std::move(running));
  auto second = Submit(std::move(queued));
  EXPECT_EQ(Wait(*second).status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(Wait(*first).status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(metrics_.Render(), HasSubstr("dorad_request_queue_seconds_count 2\n"))
      << "who never had a turn has waited, too";
  ExpectEverythingBack();
}

// Its lease is older than the retirement, whose abort it has missed.
TEST_F(EngineTest, ARequestThatEntersWithARevokedVersionIsAborted) {
  Start(DefaultOptions(), 64);
  const auto adapter = MakeAdapter("a", 1);
  GenerateInput input = Input(Prompt(4), 50, adapter);
  adapter->Revoke();
  const Outcome outcome = Wait(*Submit(std::move(input)));
  EXPECT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.samples.at(0).finish.reason, FinishReason::kAborted);
  EXPECT_THAT(outcome.samples.at(0).finish.detail, HasSubstr("a@1"));
  EXPECT_TRUE(outcome.samples.at(0).tokens.empty());
  EXPECT_EQ(Wait(*Submit(Input(Prompt(4), 5, MakeAdapter("a", 2)))).samples.at(0).tokens.size(),
            5u);
  ExpectEverythingBack();
}

TEST_F(EngineTest, ShutdownEndsEveryRequestOnce) {
  Start(DefaultOptions(), 64);
  runner_->on_step = [] {
    absl::SleepFor(absl::Milliseconds(1));
    return absl::OkStatus();
  };
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (int i = 0; i < 20; ++i) streams.push_back(Submit(Input(Prompt(4, i), 500)));
  engine_.reset();
  for (auto& stream : streams) {
    EXPECT_EQ(ReasonOf(Wait(*stream).status), "SHUTTING_DOWN");
  }
  EXPECT_EQ(leases_.held(), 0);
}

// Ends requests by all means at once, one in each step, on the engine's thread.
class StormTest : public EngineTest {
 protected:
  static constexpr int kRequests = 256;

  void Begin(int max_steps_in_flight) {
    EngineOptions options = DefaultOptions();
    options.max_step_tokens = 2 * kRequests;
    options.max_running_sequences = kRequests;
    Start(options, 8 * kRequests, max_steps_in_flight);
    engine_->Pause({PauseMode::kKeep, {}}, [](auto) {});  // so that all run together
    const auto adapter = MakeAdapter("a", 1);
    for (int i = 0; i < kRequests; ++i) {
      GenerateInput input = Input(Prompt(4, i), 100, i % 2 == 0 ? adapter : nullptr);
      if (i % 16 == 15) input.deadline = absl::Now() + absl::Milliseconds(10 + i);
      expected_.push_back(Expected(input, 0, 512));
      ids_.push_back(input.request_id);
      streams_.push_back(Submit(std::move(input)));
    }
    runner_->on_step = [this, step = 0]() mutable {
      const int victim = 2 * step++;
      if (victim >= kRequests) return absl::OkStatus();
      if (step % 2 == 0) {
        Cancel(streams_[victim]);
      } else {
        engine_->Abort({.request_ids = {ids_[victim]}}, "injected", [](int) {});
      }
      return absl::OkStatus();
    };
    engine_->Resume({}, [] {});
  }

  void ExpectOnlyEndsThatWereAskedFor() {
    int ended_early = 0;
    for (int i = 0; i < kRequests; ++i) {
      const Outcome outcome = Wait(*streams_[i]);
      const std::vector<TokenId> tokens =
          outcome.samples.count(0) > 0 ? outcome.samples.at(0).tokens : std::vector<TokenId>();
      const std::vector<TokenId>& all = expected_[i].tokens;
      ASSERT_LE(tokens.size(), all.size());
      EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), all.begin())) << i;
      const bool had_an_end = i % 2 == 0 || i % 16 == 15;
      EXPECT_TRUE(had_an_end || tokens.size() == all.size()) << i;
      ended_early += tokens.size() < all.size() ? 1 : 0;
    }
    EXPECT_GT(ended_early, 50) << "the test meant to end requests";
    ExpectEverythingBack();
  }

  std::vector<SampleText> expected_;
  std::vector<std::string> ids_;
  std::vector<std::shared_ptr<TokenStream>> streams_;
};

TEST_F(StormTest, EndsDoNotLetTheRunnerRunEmpty) {
  Begin(/*max_steps_in_flight=*/2);
  ExpectOnlyEndsThatWereAskedFor();
  EXPECT_EQ(runner_->begun_alone, 1) << "only the first step of all";
}

TEST_F(StormTest, EndsWithOneStepAtATime) {
  Begin(/*max_steps_in_flight=*/1);
  ExpectOnlyEndsThatWereAskedFor();
}

// A sequence that stops has one row in the step behind, which still reads the adapter.
TEST_F(EngineTest, ALeaseOutlastsTheRowsThatAreComputedInVain) {
  Start(DefaultOptions(), 64);
  GenerateInput input = Input(Prompt(4), 100, MakeAdapter("a", 1));
  const std::vector<TokenId> free_run = Expected(input, 0, 512).tokens;
  input.stop.stop_token_ids = {free_run[3]};
  std::atomic<int> finished{0};
  runner_->on_step = [&] {
    ++finished;
    EXPECT_EQ(leases_.held(), 1);
    return absl::OkStatus();
  };
  const Outcome outcome = Wait(*Submit(std::move(input)));
  EXPECT_EQ(outcome.samples.at(0).finish.reason, FinishReason::kStop);
  EXPECT_EQ(finished, static_cast<int>(outcome.samples.at(0).tokens.size()) + 1);
  ExpectEverythingBack();
}

// The step that is in flight still reads the adapter.
TEST_F(EngineTest, ALeaseOutlastsTheRowsOfACancelledRequest) {
  Start(DefaultOptions(), 64);
  std::shared_ptr<TokenStream> stream;
  std::atomic<int> with_adapter{0};
  std::deque<int> rows_in_flight;
  runner_->on_begin = [&](absl::Span<const StepSequence> sequences) {
    rows_in_flight.push_back(static_cast<int>(
        std::count_if(sequences.begin(), sequences.end(),
                      [](const StepSequence& s) { return s.adapter != nullptr; })));
    return absl::OkStatus();
  };
  runner_->on_step = [&] {
    const int rows = rows_in_flight.front();
    rows_in_flight.pop_front();
    EXPECT_TRUE(rows == 0 || leases_.held() == 1);
    EXPECT_TRUE(rows == 0 || !stream->Ended().has_value());
    if (rows > 0 && ++with_adapter == 5) {
      Cancel(stream);
    }
    return absl::OkStatus();
  };
  engine_->Pause({PauseMode::kKeep, {}}, [](auto) {});
  auto other = Submit(Input(Prompt(6), 100));
  stream = Submit(Input(Prompt(4), 400, MakeAdapter("a", 1)));
  engine_->Resume({}, [] {});
  EXPECT_EQ(Wait(*stream).status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(with_adapter, 6) << "one row was in flight";
  EXPECT_EQ(Wait(*other).samples.at(0).tokens.size(), 100u);
  ExpectEverythingBack();
}

TEST_F(EngineTest, AnAbortIsAnsweredWhenItsRequestsHaveEnded) {
  Start(DefaultOptions(), 64);
  engine_->Pause({PauseMode::kKeep, {}}, [](auto) {});
  auto stream = Submit(Input(Prompt(4), 400, MakeAdapter("a", 1)));
  auto other = Submit(Input(Prompt(6), 100));
  absl::Notification done;
  runner_->on_step = [&, step = 0]() mutable {
    if (++step != 5) return absl::OkStatus();
    engine_->Abort({.adapter = {"a", 0}}, "injected", [&](int aborted) {
      EXPECT_EQ(aborted, 1);
      EXPECT_EQ(leases_.held(), 0);
      EXPECT_EQ(engine_->stats().requests, 1);
      done.Notify();
    });
    return absl::OkStatus();
  };
  engine_->Resume({}, [] {});
  done.WaitForNotification();
  EXPECT_EQ(Wait(*stream).samples.at(0).finish.reason, FinishReason::kAborted);
  EXPECT_EQ(Wait(*other).samples.at(0).tokens.size(), 100u);
  ExpectEverythingBack();
}

}  // namespace
}  // namespace dorad::engine
