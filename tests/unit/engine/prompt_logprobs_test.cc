// Log-probabilities of a prompt's tokens: those of a Score, however the prompt was computed.

#include "server/platform/metrics/metrics.h"
#include "tests/unit/support/engine_fixture.h"

namespace dorad::engine {
namespace {

class PromptLogprobsTest : public EngineTest {
 protected:
  GenerateInput Scored(std::vector<TokenId> prompt, int64_t max_tokens,
                       std::shared_ptr<const adapter::LoadedAdapter> adapter = nullptr) {
    GenerateInput input = Input(std::move(prompt), max_tokens, std::move(adapter));
    input.logprobs.prompt = true;
    return input;
  }

  static void ExpectScores(const SampleText& sample, const std::vector<TokenId>& prompt,
                           const adapter::LoadedAdapter* adapter = nullptr) {
    EXPECT_EQ(Bits(sample.prompt_logprobs), Bits(ExpectedScores(adapter, prompt)));
  }
};

TEST_F(PromptLogprobsTest, AreThoseOfTheModelInAnyChunks) {
  const auto adapter = MakeAdapter("a", 1);
  for (const int in_flight : {1, 2}) {
    for (const int64_t budget : {1, 7, 64, 512}) {
      EngineOptions options = DefaultOptions();
      options.max_step_tokens = budget;
      Start(options, 64, in_flight);
      for (const int64_t length : {1, 2, 16, 17, 90}) {
        GenerateInput input = Scored(Prompt(length), 5, adapter);
        const SampleText expected = Expected(input, 0, 512);
        const SampleText sample = Wait(*Submit(std::move(input))).samples.at(0);
        ExpectScores(sample, Prompt(length), adapter.get());
        EXPECT_EQ(sample.tokens, expected.tokens);
        EXPECT_EQ(sample.logprobs, expected.logprobs);
      }
      ExpectEverythingBack();
    }
  }
}

TEST_F(PromptLogprobsTest, AreAbsentUnlessRequested) {
  Start(DefaultOptions(), 64);
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(30), 3))).samples.at(0).prompt_logprobs.empty());
}

TEST_F(PromptLogprobsTest, ReadNoCachedPrefixAndFillTheCache) {
  Start(DefaultOptions(), 64);
  Wait(*Submit(Input(Prompt(64), 2)));
  const SampleText scored = Wait(*Submit(Scored(Prompt(64), 2))).samples.at(0);
  ExpectScores(scored, Prompt(64));
  EXPECT_EQ(scored.finish.usage.cached_prompt_tokens, 0u);
  ExpectScores(Wait(*Submit(Scored(Prompt(80, 3), 2))).samples.at(0), Prompt(80, 3));
  const SampleText after = Wait(*Submit(Input(Prompt(80, 3), 2))).samples.at(0);
  EXPECT_EQ(after.finish.usage.cached_prompt_tokens, 79u);
}

TEST_F(PromptLogprobsTest, ComeOnceForAllSamplesAndSiblingsShareThePrompt) {
  Start(DefaultOptions(), 256);
  GenerateInput input = Scored(Prompt(100), 6);
  input.n = 4;
  input.sampling.temperature = 1;
  std::vector<SampleText> expected;
  for (uint32_t i = 0; i < 4; ++i) expected.push_back(Expected(input, i, 512));
  const Outcome outcome = Wait(*Submit(std::move(input)));
  ExpectScores(outcome.samples.at(0), Prompt(100));
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(outcome.samples.at(i).tokens, expected[i].tokens);
    EXPECT_EQ(outcome.samples.at(i).finish.usage.cached_prompt_tokens, i == 0 ? 0u : 99u);
  }
  ExpectEverythingBack();
}

TEST_F(PromptLogprobsTest, SurvivePreemptions) {
  for (const int in_flight : {1, 2}) {
    EngineOptions options = DefaultOptions();
    options.max_step_tokens = 9;
    Start(options, 8, in_flight);
    std::vector<std::shared_ptr<TokenStream>> streams;
    std::vector<std::vector<TokenId>> expected;
    for (int i = 0; i < 6; ++i) {
      GenerateInput input = Scored(Prompt(20 + 5 * i, 50 * i), 40);
      input.n = 1 + i % 2;
      expected.push_back(Expected(input, 0, 8 * kKvPageTokens).tokens);
      streams.push_back(Submit(std::move(input)));
    }
    uint32_t preemptions = 0;
    for (int i = 0; i < 6; ++i) {
      const SampleText sample = Wait(*streams[i]).samples.at(0);
      EXPECT_EQ(sample.tokens, expected[i]) << i;
      ExpectScores(sample, Prompt(20 + 5 * i, 50 * i));
      preemptions += sample.finish.usage.preemptions;
    }
    EXPECT_GT(preemptions, 0u) << "the test meant to force preemption";
    ExpectEverythingBack();
  }
}

// A prompt that loses its pages halfway keeps the results of the rows before.
TEST_F(PromptLogprobsTest, SurviveALossOfPagesInTheMiddleOfThePrompt) {
  for (const int in_flight : {1, 2}) {
    EngineOptions options = DefaultOptions();
    options.max_step_tokens = 8;
    Start(options, 64, in_flight);
    absl::Notification begun, asleep;
    runner_->on_step = [&, step = 0]() mutable {
      if (++step == 4) {
        engine_->Sleep({.kv = true}, [&](absl::StatusOr<int64_t>) { asleep.Notify(); });
      }
      return absl::OkStatus();
    };
    auto stream = Submit(Scored(Prompt(90), 5));
    asleep.WaitForNotification();
    absl::Notification awake;
    engine_->Wake(true, true, [&](absl::Status) { awake.Notify(); });
    awake.WaitForNotification();
    const SampleText sample = Wait(*stream).samples.at(0);
    ExpectScores(sample, Prompt(90));
    EXPECT_EQ(sample.finish.usage.preemptions, 1u);
    ExpectEverythingBack();
  }
}

TEST_F(PromptLogprobsTest, AreOfTheVersionOfTheFirstToken) {
  const std::map<int64_t, std::shared_ptr<const adapter::LoadedAdapter>> versions = {
      {1, MakeAdapter("a", 1)}, {2, MakeAdapter("a", 2)}};
  for (const InFlightPolicy policy :
       {InFlightPolicy::kSwitchKeepKv, InFlightPolicy::kSwitchRecompute}) {
    // In the middle of the prompt; while tokens are generated.
    for (const int step_of_switch : {5, 30}) {
      EngineOptions options = DefaultOptions();
      options.max_step_tokens = 8;
      Start(options, 64);
      std::atomic<int64_t> active = 1;
      runner_->on_step = [&, step = 0]() mutable {
        if (++step == step_of_switch) {
          active = 2;
          engine_->NoteActivated();
        }
        return absl::OkStatus();
      };
      GenerateInput input = Scored(Prompt(90), 60, versions.at(1));
      input.in_flight = policy;
      input.follow = [&]() -> absl::StatusOr<adapter::AdapterLease> {
        return leases_.Take(versions.at(active));
      };
      const SampleText sample = Wait(*Submit(std::move(input))).samples.at(0);
      ASSERT_FALSE(sample.spans.empty());
      EXPECT_EQ(sample.spans.front().version, step_of_switch == 5 ? 2 : 1);
      EXPECT_EQ(sample.spans.back().version, 2);
      ExpectScores(sample, Prompt(90), versions.at(sample.spans.front().version).get());
      ExpectEverythingBack();
    }
  }
}

TEST_F(PromptLogprobsTest, APromptWhoseLogitsAreNotFiniteEndsItsSample) {
  EngineOptions options = DefaultOptions();
  options.max_step_tokens = 4;
  Start(options, 64);
  runner_->poison = Prompt(40)[10];
  const Outcome outcome = Wait(*Submit(Scored(Prompt(40), 5)));
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  const SampleText& sample = outcome.samples.at(0);
  EXPECT_EQ(sample.finish.reason, FinishReason::kNonFinite);
  EXPECT_THAT(sample.finish.detail, HasSubstr("prompt"));
  EXPECT_TRUE(sample.tokens.empty());
  EXPECT_TRUE(sample.prompt_logprobs.empty());
  ExpectEverythingBack();
}

TEST_F(PromptLogprobsTest, CountAsPromptTokensAndNotAsScored) {
  Start(DefaultOptions(), 64);
  Wait(*Submit(Scored(Prompt(40), 3)));
  ExpectEverythingBack();
  EXPECT_THAT(metrics_.Render(), HasSubstr("dorad_scored_tokens_total 0\n"));
}

}  // namespace
}  // namespace dorad::engine
