// Drafts change the number of steps, and nothing that a client sees.
#include "server/engine/engine.h"
#include "tests/unit/support/engine_fixture.h"

namespace dorad::engine {
namespace {

class DraftsTest : public EngineTest {
 protected:
  // The steps of a request that runs alone, whose sample 0 is as expected.
  uint64_t StepsOf(GenerateInput input) {
    const SampleText expected = Expected(input, 0, engine_->limits().context_length);
    const uint64_t before = engine_->stats().steps;
    const Outcome outcome = Wait(*Submit(std::move(input)));
    EXPECT_TRUE(outcome.status.ok());
    const SampleText& sample = outcome.samples.at(0);
    EXPECT_EQ(sample.tokens, expected.tokens);
    EXPECT_EQ(sample.logprobs, expected.logprobs);
    drafts_ = sample.finish.usage.drafts;
    ExpectEverythingBack();
    return engine_->stats().steps - before;
  }

  GenerateInput Drafted(int64_t tokens, absl::Span<const int> wrong_places) {
    GenerateInput input = Input(Prompt(20), tokens);
    std::vector<TokenId> answer = Expected(input, 0, engine_->limits().context_length).tokens;
    for (const int place : wrong_places) answer[place] = (answer[place] + 1) % kFakeVocab;
    input.drafts = {answer};
    return input;
  }

  Usage::Drafts drafts_;
};

TEST_F(DraftsTest, ARightAnswerTakesFewSteps) {
  for (const int in_flight : {1, 2}) {
    Start(DefaultOptions(), 64, in_flight);
    EXPECT_LT(StepsOf(Drafted(200, {})), 12);
    // The first token and each token after a draft's are the sample's own.
    EXPECT_GT(drafts_.accepted, 185u);
    EXPECT_EQ(drafts_.tokens, drafts_.accepted);
  }
}

TEST_F(DraftsTest, AnAnswerWithWrongTokensIsFoundAgain) {
  Start(DefaultOptions(), 64);
  EXPECT_LT(StepsOf(Drafted(200, {50, 51, 120})), 40);
  EXPECT_GT(drafts_.accepted, 150u);
  EXPECT_GT(drafts_.tokens, drafts_.accepted);
}

TEST_F(DraftsTest, AWrongAnswerCostsFewRows) {
  Start(DefaultOptions(), 64);
  GenerateInput input = Input(Prompt(20), 200);
  input.drafts = {std::vector<TokenId>(200, 5)};
  StepsOf(std::move(input));
  EXPECT_EQ(drafts_.accepted, 0u);
  EXPECT_LT(drafts_.tokens, 40u);
}

TEST_F(DraftsTest, TextsThatRepeatThemselvesTakeFewSteps) {
  Start(DefaultOptions(), 64);
  runner_->cycle = 9;
  const uint64_t before = engine_->stats().steps;
  GenerateInput input = Input({0, 1, 2}, 120);
  input.n = 2;
  input.ngram_drafts = true;
  const Outcome outcome = Wait(*Submit(std::move(input)));
  for (int i = 0; i < 2; ++i) {
    const SampleText& sample = outcome.samples.at(i);
    ASSERT_EQ(sample.tokens.size(), 120u);
    for (size_t t = 0; t < 120; ++t) EXPECT_EQ(sample.tokens[t], static_cast<TokenId>((t + 3) % 9));
    EXPECT_GT(sample.finish.usage.drafts.accepted, 60u);
  }
  ExpectEverythingBack();
  EXPECT_LT(engine_->stats().steps - before, 60);
  EXPECT_THAT(metrics_.Render(), HasSubstr("dorad_draft_tokens_total{source=\"answer\"} 0\n"));
}

TEST_F(DraftsTest, AnAnswerNeedsNoMoreThanTheContext) {
  EngineOptions options = DefaultOptions();
  options.context_length = 64;
  Start(options, 64);
  GenerateInput input = Input(Prompt(20), 400);
  input.drafts = {Expected(input, 0, 64).tokens};
  EXPECT_LT(StepsOf(std::move(input)), 8);
}

TEST_F(DraftsTest, StopRulesHoldWithinADraft) {
  Start(DefaultOptions(), 64);
  GenerateInput input = Drafted(100, {});
  const std::vector<TokenId> answer = input.drafts[0];
  input.stop.stop_sequences = {{answer[39], answer[40]}};
  const Outcome outcome = Wait(*Submit(std::move(input)));
  const SampleText& sample = outcome.samples.at(0);
  EXPECT_EQ(sample.tokens.size(), 41u);
  EXPECT_EQ(sample.logprobs.size(), 41u);
  EXPECT_EQ(sample.finish.reason, FinishReason::kStop);
  EXPECT_EQ(sample.finish.stop_sequence, 0);
  EXPECT_EQ(sample.finish.usage.generated_tokens, 41u);
  ExpectEverythingBack();
}

TEST_F(DraftsTest, LogitsThatAreNotFiniteEndTheSampleWhereTheyWouldWithout) {
  Start(DefaultOptions(), 64);
  GenerateInput input = Drafted(100, {});
  const std::vector<TokenId> answer = input.drafts[0];
  runner_->poison = answer[30];
  const Outcome outcome = Wait(*Submit(std::move(input)));
  const SampleText& sample = outcome.samples.at(0);
  EXPECT_EQ(sample.finish.reason, FinishReason::kNonFinite);
  EXPECT_EQ(sample.tokens, std::vector<TokenId>(answer.begin(), answer.begin() + 31));
}

TEST_F(DraftsTest, BadWordsReachTheRowsOfADraft) {
  Start(DefaultOptions(), 64);
  GenerateInput input = Drafted(60, {});
  GenerateInput plain = Input(input.prompt, 60);
  const std::vector<TokenId> answer = input.drafts[0];
  input.logits.bad_words = plain.logits.bad_words = {{answer[20], answer[21]}, {answer[40]}};
  const SampleText expected = Wait(*Submit(std::move(plain))).samples.at(0);
  EXPECT_EQ(expected.tokens[20], answer[20]);
  EXPECT_EQ(expected.tokens[21], (answer[21] + 1) % kFakeVocab);
  const SampleText sample = Wait(*Submit(std::move(input))).samples.at(0);
  EXPECT_EQ(sample.tokens, expected.tokens);
  EXPECT_EQ(sample.logprobs, expected.logprobs);
  EXPECT_GT(sample.finish.usage.drafts.accepted, 0u);
}

TEST_F(DraftsTest, OthersGoOnBesideDrafts) {
  EngineOptions options = DefaultOptions();
  options.max_step_tokens = 256;
  Start(options, 400);
  std::vector<std::shared_ptr<TokenStream>> streams;
  std::vector<SampleText> expected;
  for (int i = 0; i < 12; ++i) {
    GenerateInput input = Input(Prompt(20 + i), 120);
    expected.push_back(Expected(input, 0, 512));
    if (i % 4 != 0) input.drafts = {expected.back().tokens};
    streams.push_back(Submit(std::move(input)));
  }
  for (size_t i = 0; i < streams.size(); ++i) {
    EXPECT_EQ(Wait(*streams[i]).samples.at(0).tokens, expected[i].tokens) << i;
  }
  ExpectEverythingBack();
}

// 16 sequences with right answers of 200 tokens and 64 rows a step: they take turns.
TEST_F(DraftsTest, LongDraftsTakeTurnsWhereRowsAreFew) {
  Start(DefaultOptions(), 400);
  std::vector<int64_t> rows, sequences;
  runner_->on_begin = [&](absl::Span<const StepSequence> step) {
    rows.push_back(0);
    for (const StepSequence& s : step) rows.back() += static_cast<int64_t>(s.tokens.size());
    sequences.push_back(static_cast<int64_t>(step.size()));
    return absl::OkStatus();
  };
  std::vector<std::shared_ptr<TokenStream>> streams;
  std::vector<SampleText> expected;
  for (int i = 0; i < 16; ++i) {
    GenerateInput input = Input(Prompt(4 + i), 200);
    expected.push_back(Expected(input, 0, 512));
    input.drafts = {expected.back().tokens};
    streams.push_back(Submit(std::move(input)));
  }
  for (size_t i = 0; i < streams.size(); ++i) {
    EXPECT_EQ(Wait(*streams[i]).samples.at(0).tokens, expected[i].tokens) << i;
  }
  ExpectEverythingBack();
  EXPECT_LE(*std::max_element(rows.begin(), rows.end()), 64);
  EXPECT_LT(rows.size(), 160u) << "of 3,200 tokens, 16 of them at a time without drafts";
  EXPECT_LT(*std::min_element(sequences.begin() + rows.size() / 2, sequences.end()), 8);
}

TEST_F(DraftsTest, ARecurrenceTakesNone) {
  Start(DefaultOptions(), 200, 2, 0, /*state_pages=*/2);
  EXPECT_GE(StepsOf(Drafted(50, {})), 50);
  EXPECT_EQ(drafts_.tokens, 0u);
}

}  // namespace
}  // namespace dorad::engine
