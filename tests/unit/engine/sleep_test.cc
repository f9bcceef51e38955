// Sleep and Wake of the engine: what runs goes on afterwards as if nothing had been.

#include "tests/unit/support/engine_fixture.h"

namespace dorad::engine {
namespace {

class SleepTest : public EngineTest {
 protected:
  absl::StatusOr<int64_t> Sleep(Engine::SleepOptions options) {
    absl::StatusOr<int64_t> result = 0;
    absl::Notification done;
    engine_->Sleep(options, [&](absl::StatusOr<int64_t> freed) {
      result = std::move(freed);
      done.Notify();
    });
    done.WaitForNotification();
    return result;
  }

  absl::Status Wake(bool kv, bool go_on) {
    absl::Status result;
    absl::Notification done;
    engine_->Wake(kv, go_on, [&](absl::Status status) {
      result = std::move(status);
      done.Notify();
    });
    done.WaitForNotification();
    return result;
  }

  // Steps that take so long that a sleep comes before the end of what runs.
  void StartSlowly(int64_t pages = 64) {
    Start(DefaultOptions(), pages);
    runner_->on_step = [] {
      absl::SleepFor(absl::Microseconds(200));
      return absl::OkStatus();
    };
  }
};

TEST_F(SleepTest, RunningRequestsGoOnWithTheSameTokens) {
  for (const bool keep_kv : {false, true}) {
    SCOPED_TRACE(keep_kv);
    StartSlowly();
    GenerateInput input = Input(Prompt(20), 300, MakeAdapter("a", 1));
    const SampleText expected = Expected(input, 0, 512);
    auto stream = Submit(std::move(input));
    while (!stream->Take()) {
    }
    ASSERT_TRUE(Sleep({.kv = true, .keep_kv = keep_kv}).ok());
    const uint64_t steps = engine_->stats().steps;
    EXPECT_EQ(engine_->stats().kv_pages_used > 0, keep_kv);
    EXPECT_EQ(engine_->stats().requests, 1);
    EXPECT_EQ(engine_->stats().waiting_sequences, keep_kv ? 0 : 1);
    absl::SleepFor(absl::Milliseconds(5));
    EXPECT_EQ(engine_->stats().steps, steps);
    ASSERT_TRUE(Wake(/*kv=*/true, /*go_on=*/true).ok());
    const Outcome outcome = Wait(*stream);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    const SampleText& got = outcome.samples.at(0);
    // What was taken before the sleep is not among it.
    ASSERT_LE(got.tokens.size(), expected.tokens.size());
    EXPECT_TRUE(std::equal(got.tokens.rbegin(), got.tokens.rend(), expected.tokens.rbegin()));
    EXPECT_EQ(got.finish.usage.preemptions, keep_kv ? 0u : 1u);
  }
}

TEST_F(SleepTest, PrefixesAreForgottenUnlessTheCacheIsKept) {
  for (const bool keep_kv : {false, true}) {
    Start(DefaultOptions(), 64);
    (void)Wait(*Submit(Input(Prompt(64), 2)));
    ASSERT_TRUE(Sleep({.kv = true, .keep_kv = keep_kv}).ok());
    ASSERT_TRUE(Wake(/*kv=*/true, /*go_on=*/true).ok());
    GenerateInput again = Input(Prompt(64), 2);
    const SampleText expected = Expected(again, 0, 512);
    const Outcome outcome = Wait(*Submit(std::move(again)));
    EXPECT_EQ(outcome.samples.at(0).tokens, expected.tokens);
    EXPECT_EQ(outcome.samples.at(0).finish.usage.cached_prompt_tokens > 0, keep_kv);
  }
}

TEST_F(SleepTest, NewRequestsWaitOrAreRefused) {
  Start(DefaultOptions(), 64);
  ASSERT_TRUE(Sleep({}).ok());
  auto waiting = Submit(Input(Prompt(5), 4));
  absl::SleepFor(absl::Milliseconds(5));
  EXPECT_FALSE(waiting->Ended().has_value());
  ASSERT_TRUE(Sleep({.refuse = true}).ok());
  auto refused = std::make_shared<TokenStream>(/*final_only=*/false);
  const absl::Status status = engine_->Submit(Input(Prompt(5), 4), refused).status();
  EXPECT_EQ(ReasonOf(status), "SERVER_SLEEPING");
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  ASSERT_TRUE(Wake(/*kv=*/false, /*go_on=*/true).ok());
  EXPECT_TRUE(Wait(*waiting).status.ok());
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(5), 4))).status.ok());
}

TEST_F(SleepTest, NothingElseWakesIt) {
  StartSlowly();
  auto stream = Submit(Input(Prompt(5), 200));
  ASSERT_TRUE(Sleep({.kv = true}).ok());
  absl::Notification resumed;
  engine_->Resume({}, [&] { resumed.Notify(); });
  resumed.WaitForNotification();
  ASSERT_TRUE(Wake(/*kv=*/true, /*go_on=*/false).ok());
  const uint64_t steps = engine_->stats().steps;
  absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(engine_->stats().steps, steps);
  ASSERT_TRUE(Wake(/*kv=*/false, /*go_on=*/true).ok());
  EXPECT_TRUE(Wait(*stream).status.ok());
}

TEST_F(SleepTest, RequestsCanEndWhileItSleeps) {
  StartSlowly();
  auto aborted = Submit(Input(Prompt(5), 400, MakeAdapter("a", 1)));
  auto cancelled = Submit(Input(Prompt(6), 400));
  ASSERT_TRUE(Sleep({.kv = true, .keep_kv = true}).ok());
  absl::Notification done;
  engine_->Abort({.adapter = {"a", 0}}, "injected", [&](int) { done.Notify(); });
  done.WaitForNotification();
  EXPECT_EQ(Wait(*aborted).samples.at(0).finish.reason, FinishReason::kAborted);
  Cancel(cancelled);
  EXPECT_EQ(ReasonOf(Wait(*cancelled).status), "CLIENT_CANCELLED");
  EXPECT_EQ(leases_.held(), 0);
  EXPECT_EQ(engine_->stats().kv_pages_used, 0);
  ASSERT_TRUE(Wake(/*kv=*/true, /*go_on=*/true).ok());
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(5), 4))).status.ok());
}

TEST_F(SleepTest, WithoutMemoryItSleepsOn) {
  StartSlowly();
  GenerateInput input = Input(Prompt(5), 100);
  const SampleText expected = Expected(input, 0, 512);
  auto stream = Submit(std::move(input));
  ASSERT_TRUE(Sleep({.kv = true}).ok());
  runner_->fail_restore = true;
  EXPECT_EQ(Wake(/*kv=*/true, /*go_on=*/false).code(), absl::StatusCode::kResourceExhausted);
  runner_->fail_restore = false;
  ASSERT_TRUE(Wake(/*kv=*/true, /*go_on=*/true).ok());
  EXPECT_TRUE(Wait(*stream).status.ok());
}

TEST_F(SleepTest, AFailureToReleaseLosesNothing) {
  StartSlowly();
  auto stream = Submit(Input(Prompt(5), 100));
  runner_->fail_release = true;
  EXPECT_FALSE(Sleep({.kv = true}).ok());
  runner_->fail_release = false;
  ASSERT_TRUE(Wake(/*kv=*/false, /*go_on=*/true).ok());
  EXPECT_TRUE(Wait(*stream).status.ok());
}

TEST_F(SleepTest, RandomSleepsChangeNoResult) {
  for (uint32_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % n); };
    Start(DefaultOptions(), 40);
    std::vector<std::pair<SampleText, std::shared_ptr<TokenStream>>> streams;
    for (int round = 0; round < 40; ++round) {
      GenerateInput input = Input(Prompt(3 + below(60)), 1 + below(40));
      SampleText expected = Expected(input, 0, 512);
      streams.emplace_back(std::move(expected), Submit(std::move(input)));
      if (below(3) > 0) continue;
      ASSERT_TRUE(Sleep({.kv = below(3) > 0, .keep_kv = below(2) == 0}).ok());
      const bool twice = below(2) == 0;
      ASSERT_TRUE(!twice || Sleep({.kv = true, .keep_kv = below(2) == 0}).ok());
      ASSERT_TRUE(Wake(/*kv=*/true, /*go_on=*/true).ok());
    }
    for (auto& [expected, stream] : streams) {
      const Outcome outcome = Wait(*stream);
      ASSERT_TRUE(outcome.status.ok()) << outcome.status;
      EXPECT_EQ(outcome.samples.at(0).tokens, expected.tokens);
      EXPECT_EQ(outcome.samples.at(0).logprobs, expected.logprobs);
    }
  }
}

TEST_F(SleepTest, ADeadlineThatComesInASleepSaysSo) {
  Start(DefaultOptions(), 64);
  ASSERT_TRUE(Sleep({.kv = true}).ok());
  GenerateInput input = Input(Prompt(5), 3);
  input.deadline = absl::Now() + absl::Milliseconds(100);
  const absl::Status status = Wait(*Submit(std::move(input))).status;
  EXPECT_EQ(ReasonOf(status), "DEADLINE_EXCEEDED");
  EXPECT_EQ(MetadataOf(status)["waited_for"], "sleep");
  EXPECT_THAT(std::string(status.message()), HasSubstr("Wake ends the sleep"));
  ASSERT_TRUE(Wake(/*kv=*/true, /*go_on=*/true).ok());
}

}  // namespace
}  // namespace dorad::engine
