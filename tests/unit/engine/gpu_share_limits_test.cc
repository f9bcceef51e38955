#include "server/engine/gpu_share_limits.h"

#include "tests/unit/support/engine_fixture.h"

namespace dorad::engine {
namespace {

constexpr std::chrono::seconds kSecond(1);

TEST(GpuShareLimitsTest, TheSmallestShareCounts) {
  GpuShareLimits yields;
  EXPECT_EQ(yields.share(), 1);
  const Instant now = SteadyNow();
  ASSERT_TRUE(yields.Set("a", 0.5, now + 10 * kSecond).ok());
  ASSERT_TRUE(yields.Set("b", 0.2, now + 5 * kSecond).ok());
  EXPECT_EQ(yields.share(), 0.2);
  ASSERT_TRUE(yields.Set("b", 0.8, now + 5 * kSecond).ok());
  EXPECT_EQ(yields.share(), 0.5);
  EXPECT_TRUE(yields.End("a"));
  EXPECT_FALSE(yields.End("a"));
  EXPECT_EQ(yields.share(), 0.8);
}

TEST(GpuShareLimitsTest, EachEndsAtItsOwnTimeUnlessRenewed) {
  GpuShareLimits yields;
  const Instant now = SteadyNow();
  ASSERT_TRUE(yields.Set("a", 0.5, now + kSecond).ok());
  ASSERT_TRUE(yields.Set("b", 0.2, now + 2 * kSecond).ok());
  EXPECT_EQ(yields.next_end(), now + kSecond);
  yields.EndOverdue(now);
  ASSERT_TRUE(yields.Set("a", 0.5, now + 3 * kSecond).ok());
  yields.EndOverdue(now + 2 * kSecond);
  EXPECT_EQ(yields.share(), 0.5);
  yields.EndOverdue(now + 3 * kSecond);
  EXPECT_TRUE(yields.empty());
}

TEST(GpuShareLimitsTest, NobodyCanFillTheMemoryWithThem) {
  GpuShareLimits yields;
  const Instant end = SteadyNow() + kSecond;
  for (size_t i = 0; i < GpuShareLimits::kMost; ++i) {
    ASSERT_TRUE(yields.Set("y" + std::to_string(i), 0.5, end).ok());
  }
  EXPECT_EQ(ReasonOf(yields.Set("one more", 0.5, end)), "TOO_MANY_GPU_SHARE_LIMITS");
  EXPECT_TRUE(yields.Set("y0", 0.4, end).ok());
}

class GpuShareEngineTest : public EngineTest {
 protected:
  double LimitGpuShare(const std::string& id, double share, absl::Duration time) {
    absl::StatusOr<double> result = 0;
    absl::Notification done;
    engine_->LimitGpuShare({id, share, time}, [&](absl::StatusOr<double> in_effect) {
      result = std::move(in_effect);
      done.Notify();
    });
    done.WaitForNotification();
    EXPECT_TRUE(result.ok()) << result.status();
    return result.value_or(0);
  }

  bool EndGpuShareLimit(const std::string& id) {
    bool result = false;
    absl::Notification done;
    engine_->EndGpuShareLimit(id, [&](bool ended) {
      result = ended;
      done.Notify();
    });
    done.WaitForNotification();
    return result;
  }

  // Counts the steps that had begun when another one did.
  void StartCounting(EngineOptions options) {
    Start(std::move(options), 64);
    runner_->on_begin = [this](absl::Span<const StepSequence>) {
      deepest_ = std::max(deepest_, ++in_flight_);
      return absl::OkStatus();
    };
    runner_->on_step = [this] {
      --in_flight_;
      return absl::OkStatus();
    };
  }

  int in_flight_ = 0, deepest_ = 0;
};

TEST_F(GpuShareEngineTest, GivesTheSameTokensWithOneStepInFlight) {
  EngineOptions options = DefaultOptions();
  options.gpu_share = 0.5;
  StartCounting(options);
  EXPECT_EQ(engine_->stats().gpu_share, 0.5);
  std::vector<SampleText> expected;
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (int i = 0; i < 8; ++i) {
    GenerateInput input = Input(Prompt(20 + i), 60, i % 2 == 0 ? nullptr : MakeAdapter("a", 1));
    expected.push_back(Expected(input, 0, 512));
    streams.push_back(Submit(std::move(input)));
  }
  for (size_t i = 0; i < streams.size(); ++i) {
    const Outcome outcome = Wait(*streams[i]);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.samples.at(0).tokens, expected[i].tokens);
    EXPECT_EQ(outcome.samples.at(0).logprobs, expected[i].logprobs);
  }
  ExpectEverythingBack();
  EXPECT_EQ(deepest_, 1);
}

TEST_F(GpuShareEngineTest, WithoutAShareTwoStepsAreInFlight) {
  StartCounting(DefaultOptions());
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(20), 60))).status.ok());
  ExpectEverythingBack();
  EXPECT_EQ(deepest_, 2);
}

TEST_F(GpuShareEngineTest, TheConfiguredShareIsTheMost) {
  EngineOptions options = DefaultOptions();
  options.gpu_share = 0.5;
  Start(options, 64);
  EXPECT_EQ(LimitGpuShare("a", 0.25, absl::Minutes(1)), 0.25);
  EXPECT_EQ(LimitGpuShare("b", 0.75, absl::Minutes(1)), 0.25);
  EXPECT_EQ(engine_->stats().gpu_share, 0.25);
  EXPECT_TRUE(EndGpuShareLimit("a"));
  EXPECT_EQ(engine_->stats().gpu_share, 0.5);
  EXPECT_TRUE(EndGpuShareLimit("b"));
  EXPECT_FALSE(EndGpuShareLimit("b"));
}

// One long step under a small share: the wait after it would outlast the patience of Wait().
class LongWaitTest : public GpuShareEngineTest {
 protected:
  LongWaitTest() {
    Start(DefaultOptions(), 64);
    runner_->on_step = [first = true]() mutable {
      if (std::exchange(first, false)) absl::SleepFor(absl::Milliseconds(700));
      return absl::OkStatus();
    };
  }

  void AwaitFirstStep() {
    const absl::Time limit = absl::Now() + absl::Seconds(60);
    while (engine_->stats().steps < 1 && absl::Now() < limit) {
      absl::SleepFor(absl::Milliseconds(1));
    }
  }
};

TEST_F(LongWaitTest, EndsWithTheYield) {
  LimitGpuShare("a", 0.01, absl::Hours(1));
  GenerateInput input = Input(Prompt(5), 4);
  const SampleText expected = Expected(input, 0, 512);
  auto stream = Submit(std::move(input));
  AwaitFirstStep();
  EXPECT_TRUE(EndGpuShareLimit("a"));
  const Outcome outcome = Wait(*stream);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.samples.at(0).tokens, expected.tokens);
}

TEST_F(LongWaitTest, EndsWhenNobodyRenewsTheYield) {
  LimitGpuShare("a", 0.01, absl::Seconds(1));
  const Outcome outcome = Wait(*Submit(Input(Prompt(5), 4)));
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(engine_->stats().gpu_share, 1);
  EXPECT_FALSE(EndGpuShareLimit("a"));
}

TEST_F(LongWaitTest, RequestsCanEndMeanwhile) {
  LimitGpuShare("a", 0.01, absl::Hours(1));
  auto cancelled = Submit(Input(Prompt(5), 100, MakeAdapter("a", 1)));
  GenerateInput late = Input(Prompt(6), 100);
  late.deadline = absl::Now() + absl::Seconds(1);
  auto overdue = Submit(std::move(late));
  AwaitFirstStep();
  Cancel(cancelled);
  EXPECT_EQ(ReasonOf(Wait(*cancelled).status), "CLIENT_CANCELLED");
  EXPECT_EQ(ReasonOf(Wait(*overdue).status), "DEADLINE_EXCEEDED");
  ExpectEverythingBack();
}

TEST_F(GpuShareEngineTest, SleepsAndWakesWhileItYields) {
  Start(DefaultOptions(), 64);
  LimitGpuShare("a", 0.5, absl::Hours(1));
  GenerateInput input = Input(Prompt(5), 200);
  const SampleText expected = Expected(input, 0, 512);
  auto stream = Submit(std::move(input));
  absl::Notification slept, woken;
  engine_->Sleep({.kv = true}, [&](absl::StatusOr<int64_t> freed) {
    EXPECT_TRUE(freed.ok()) << freed.status();
    slept.Notify();
  });
  slept.WaitForNotification();
  engine_->Wake(/*kv=*/true, /*go_on=*/true, [&](absl::Status status) {
    EXPECT_TRUE(status.ok()) << status;
    woken.Notify();
  });
  woken.WaitForNotification();
  const Outcome outcome = Wait(*stream);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.samples.at(0).tokens, expected.tokens);
}

TEST_F(GpuShareEngineTest, TheConfiguredShareCanChangeWhileItRuns) {
  Start(DefaultOptions(), 64);
  EXPECT_EQ(LimitGpuShare("a", 0.5, absl::Minutes(1)), 0.5);
  engine_->SetGpuShare(0.25);
  EXPECT_EQ(LimitGpuShare("b", 0.75, absl::Minutes(1)), 0.25) << "the smallest counts";
  engine_->SetGpuShare(1);
  EXPECT_EQ(LimitGpuShare("b", 0.75, absl::Minutes(1)), 0.5);
}

TEST_F(GpuShareEngineTest, WhenNobodyIsLetInAnyMoreSharesDoNotCount) {
  EngineOptions options = DefaultOptions();
  options.gpu_share = 0.5;
  Start(options, 64);
  EXPECT_EQ(LimitGpuShare("a", 0.25, absl::Seconds(600)), 0.25);
  engine_->StopAdmission();
  EXPECT_EQ(LimitGpuShare("b", 0.01, absl::Seconds(600)), 1);
  EXPECT_TRUE(EndGpuShareLimit("a"));
  EXPECT_EQ(engine_->stats().gpu_share, 1);
}

}  // namespace
}  // namespace dorad::engine
