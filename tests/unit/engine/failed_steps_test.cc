// Steps that fail: whose requests they fail, and that the engine goes on.

#include "server/engine/engine.h"
#include "tests/unit/support/engine_fixture.h"

namespace dorad::engine {
namespace {

TEST_F(EngineTest, AFailedStepFailsItsRequestsAndTheEngineGoesOn) {
  Start(DefaultOptions(), 64);
  std::atomic<bool> fail{true};
  runner_->on_step = [&] {
    return fail.exchange(false) ? absl::InternalError("boom") : absl::OkStatus();
  };
  EXPECT_EQ(Wait(*Submit(Input(Prompt(4), 2))).status.code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(4), 2))).status.ok());
  ExpectEverythingBack();
}

TEST_F(EngineTest, AStepThatDoesNotBeginFailsItsRequestsOnly) {
  EngineOptions options = DefaultOptions();
  options.max_running_sequences = 1;
  Start(options, 64);
  std::atomic<int> begun{0};
  runner_->on_begin = [&](auto) {
    return ++begun == 4 ? absl::InternalError("boom") : absl::OkStatus();
  };
  GenerateInput input = Input(Prompt(4), 20, MakeAdapter("a", 1));
  const SampleText expected = Expected(input, 0, 512);
  auto first = Submit(std::move(input));
  auto second = Submit(Input(Prompt(4, 9), 20));
  const Outcome outcome = Wait(*first);
  EXPECT_EQ(outcome.status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(outcome.samples.at(0).tokens,
            std::vector<TokenId>(expected.tokens.begin(), expected.tokens.begin() + 3))
      << "the steps before it count";
  EXPECT_TRUE(Wait(*second).status.ok());
  ExpectEverythingBack();
}

TEST_F(EngineTest, AFailedStepTakesTheOneBehindItAlong) {
  Start(DefaultOptions(), 64);
  std::atomic<int> finished{0};
  runner_->on_step = [&] {
    return ++finished == 3 ? absl::InternalError("boom") : absl::OkStatus();
  };
  const Outcome outcome = Wait(*Submit(Input(Prompt(4), 20)));
  EXPECT_EQ(outcome.status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(outcome.samples.at(0).tokens.size(), 2u);
  EXPECT_EQ(finished, 4) << "asked for, so that the runner is rid of it";
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(4), 20))).status.ok());
  ExpectEverythingBack();
}

TEST_F(EngineTest, NonFiniteLogitsEndThatSampleOnly) {
  Start(DefaultOptions(), 64);
  runner_->poison = 555;
  auto bad = Submit(Input({1, 555, 2}, 5));
  auto good = Submit(Input(Prompt(5), 5));
  const Outcome outcome = Wait(*bad);
  EXPECT_TRUE(outcome.status.ok());
  EXPECT_EQ(outcome.samples.at(0).finish.reason, FinishReason::kNonFinite);
  EXPECT_EQ(Wait(*good).samples.at(0).tokens.size(), 5u);
  ExpectEverythingBack();
}

}  // namespace
}  // namespace dorad::engine
