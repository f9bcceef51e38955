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

TEST_F(DraftsTest, OneOfManyThatWouldGuessVerifiesNone) {
  for (const bool all : {false, true}) {
    Start(DefaultOptions(), 200);
    runner_->cycle = 9;
    engine_->Pause({PauseMode::kKeep, {}}, [](auto) {});  // all begin together
    std::vector<std::shared_ptr<TokenStream>> streams;
    for (int i = 0; i < 4; ++i) {
      GenerateInput input = Input({0, 1, 2}, 120);
      input.ngram_drafts = all || i == 0;
      streams.push_back(Submit(std::move(input)));
    }
    engine_->Resume({}, [] {});
    uint32_t verified = 0;
    for (const auto& stream : streams) {
      verified += Wait(*stream).samples.at(0).finish.usage.drafts.tokens;
    }
    EXPECT_EQ(verified > 0, all);
    ExpectEverythingBack();
  }
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

// Twelve samples, of which the first has a draft. Steps begin ahead.
class DraftBesideOthersTest : public EngineTest {
 protected:
  static constexpr int kSamples = 12;
  static constexpr int64_t kTokens = 100;

  void Run(GenerateInput input, absl::Span<const TokenId> draft) {
    EngineOptions options = DefaultOptions();
    options.on_generated = [this](const std::string& /*tenant*/, int64_t tokens) {
      reported_ += tokens;
    };
    Start(options, 400);
    runner_->on_begin = [this](absl::Span<const StepSequence> step) {
      ++steps_;
      for (const StepSequence& s : step) {
        rows_ += static_cast<int64_t>(s.tokens.size());
        following_drafts_ += s.follows >= 0 && s.tokens.size() > 1 ? 1 : 0;
        rows_behind_ += s.follows >= 0 && sampled_[s.follows] > 1 ? 1 : 0;
      }
      sampled_.clear();
      for (const StepSequence& s : step) sampled_.push_back(s.samples.size());
      return absl::OkStatus();
    };
    steps_ = rows_ = following_drafts_ = rows_behind_ = reported_ = 0;
    input.n = kSamples;
    if (!draft.empty()) input.drafts = {{draft.begin(), draft.end()}};
    outcome_ = Wait(*Submit(std::move(input)));
    EXPECT_TRUE(outcome_.status.ok());
    EXPECT_EQ(reported_, kSamples * kTokens);
    ExpectEverythingBack();
  }
  std::vector<TokenId> Tokens(int sample) { return outcome_.samples.at(sample).tokens; }
  GenerateInput Request(const LogitParams& logits = {}) {
    GenerateInput input = Input(Prompt(20), kTokens);
    input.sampling.temperature = 1;
    input.logits = logits;
    return input;
  }

  Outcome outcome_;
  std::vector<size_t> sampled_;  // by the last step's sequences
  int64_t steps_ = 0, rows_ = 0, following_drafts_ = 0, rows_behind_ = 0, reported_ = 0;
};

TEST_F(DraftBesideOthersTest, AWrongDraftCostsRowsAndNoStep) {
  Run(Request(), {});
  const int64_t steps = steps_;
  const int64_t rows = rows_;
  const std::vector<TokenId> tokens = Tokens(0);
  std::vector<TokenId> draft(kTokens, 5);
  draft[0] = tokens[0];
  Run(Request(), draft);
  EXPECT_EQ(Tokens(0), tokens);
  EXPECT_EQ(steps_, steps);
  EXPECT_GT(rows_, rows);
  EXPECT_GT(rows_behind_, 0);
}

TEST_F(DraftBesideOthersTest, ADraftFollowsATokenThatIsNotKnownYet) {
  for (const bool penalties : {false, true}) {
    Run(Request(), {});
    std::vector<TokenId> tokens = Tokens(0);
    // Of two and three tokens: the unknown one is the last, or lies before the last guessed one.
    LogitParams logits;
    for (int place = 4; place < 90; place += 9) {
      logits.bad_words.push_back({tokens[place], tokens[place + 1]});
      logits.bad_words.push_back({tokens[place + 4], tokens[place + 5], tokens[place + 6]});
    }
    if (penalties) logits.presence_penalty = 0.5f;
    Run(Request(logits), {});
    tokens = Tokens(0);
    const std::vector<TokenId> other = Tokens(7);
    Run(Request(logits), tokens);
    EXPECT_EQ(Tokens(0), tokens);
    EXPECT_EQ(Tokens(7), other);
    EXPECT_GT(following_drafts_, 0);
    EXPECT_GT(outcome_.samples.at(0).finish.usage.drafts.accepted, 80u);
  }
}

TEST_F(DraftsTest, ARecurrenceTakesNone) {
  Start(DefaultOptions(), 200, 2, 0, /*state_pages=*/2);
  EXPECT_GE(StepsOf(Drafted(50, {})), 50);
  EXPECT_EQ(drafts_.tokens, 0u);
}

}  // namespace
}  // namespace dorad::engine
