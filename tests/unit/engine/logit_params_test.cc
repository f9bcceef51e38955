#include <map>

#include "server/engine/bad_words.h"
#include "server/engine/token_uses.h"
#include "tests/unit/support/engine_fixture.h"

namespace dorad::engine {
namespace {

using ::testing::IsEmpty;

std::vector<std::pair<TokenId, TokenId>> Pairs(const std::vector<ConditionalBan>& bans) {
  std::vector<std::pair<TokenId, TokenId>> pairs;
  for (const ConditionalBan& ban : bans) pairs.emplace_back(ban.after, ban.token);
  return pairs;
}

TEST(BadWordsTest, TheLastTokenIsBannedAfterTheOthers) {
  const std::vector<std::vector<TokenId>> words = {{9}, {1, 2}, {5, 1, 3}, {1, 1, 4}, {2, 6}};
  std::vector<TokenId> banned;
  std::vector<ConditionalBan> conditional;
  AppendBans(words, {5, 1}, /*after_unknown=*/std::nullopt, &banned, &conditional);
  EXPECT_THAT(banned, ElementsAre(9, 2, 3));
  EXPECT_THAT(conditional, IsEmpty());
}

TEST(BadWordsTest, AnUnknownTokenMakesBansConditional) {
  const std::vector<std::vector<TokenId>> words = {{9}, {1, 2}, {5, 1, 3}, {1, 1, 4}, {7, 5, 1, 8}};
  std::vector<TokenId> banned;
  std::vector<ConditionalBan> conditional;
  AppendBans(words, {5}, /*after_unknown=*/0, &banned, &conditional);
  EXPECT_THAT(banned, ElementsAre(9));
  EXPECT_THAT(Pairs(conditional), ElementsAre(std::pair(1, 2), std::pair(1, 3)));
}

TEST(BadWordsTest, AnUnknownTokenMayLieBeforeGuessedOnes) {
  const std::vector<std::vector<TokenId>> words = {
      {9},          {4, 2},           {3, 4, 5},        {6, 4, 7},
      {5, 6, 4, 8}, {1, 5, 6, 4, 10}, {1, 5, 3, 4, 11}, {5, 3, 12}};
  std::vector<TokenId> banned;
  std::vector<ConditionalBan> conditional;
  AppendBans(words, {1, 5, 4}, /*after_unknown=*/1, &banned, &conditional);
  EXPECT_THAT(banned, ElementsAre(9, 2));
  EXPECT_THAT(Pairs(conditional), ElementsAre(std::pair(3, 5), std::pair(6, 7), std::pair(6, 8),
                                              std::pair(6, 10), std::pair(3, 11)));
}

TEST(BadWordsTest, AWordIsNotLongerThanTheText) {
  const std::vector<std::vector<TokenId>> words = {{1, 2}, {1, 1, 3}};
  std::vector<TokenId> banned;
  std::vector<ConditionalBan> conditional;
  AppendBans(words, {}, /*after_unknown=*/std::nullopt, &banned, &conditional);
  EXPECT_THAT(banned, IsEmpty());
  AppendBans(words, {}, /*after_unknown=*/0, &banned, &conditional);
  EXPECT_THAT(Pairs(conditional), ElementsAre(std::pair(1, 2)));
}

TEST(TokenUsesTest, CountsGeneratedTokensAndMarksThePrompts) {
  TokenUses uses;
  uses.AddPrompt({4, 5, 4});
  uses.AddGenerated(6);
  uses.AddGenerated(4);
  uses.AddGenerated(6);
  std::map<TokenId, uint32_t> counts;
  for (const TokenUse& use : uses.list()) EXPECT_TRUE(counts.emplace(use.id, use.count).second);
  EXPECT_THAT(counts, ElementsAre(std::pair(4, 3u), std::pair(5, 1u), std::pair(6, 4u)));
}

class LogitParamsTest : public EngineTest {
 protected:
  // What the runner was told of the tokens before a sample: by the sample's position.
  struct Told {
    std::map<TokenId, uint32_t> uses;
    bool follows = false;
  };

  void Record() {
    runner_->on_begin = [this](absl::Span<const StepSequence> sequences) {
      for (const StepSequence& s : sequences) {
        for (const SampleWant& sample : s.samples) {
          Told& told = told_[sample.position];
          told = {};
          told.follows = s.follows >= 0;
          for (const TokenUse& use : sample.uses) told.uses[use.id] = use.count;
        }
      }
      return absl::OkStatus();
    };
  }

  static std::map<TokenId, uint32_t> Counts(absl::Span<const TokenId> prompt,
                                            absl::Span<const TokenId> generated) {
    std::map<TokenId, uint32_t> counts;
    for (const TokenId token : prompt) counts[token] |= TokenUse::kInPrompt;
    for (const TokenId token : generated) counts[token] += TokenUse::kGenerated;
    return counts;
  }

  std::map<int64_t, Told> told_;
};

TEST_F(LogitParamsTest, TheRunnerKnowsTheTokensSoFar) {
  for (const float repetition : {1.0f, 1.5f}) {
    for (const int steps : {1, 2}) {
      Start(DefaultOptions(), 64, steps);
      told_.clear();
      Record();
      const std::vector<TokenId> prompt = {3, 9, 3, 200};
      GenerateInput input = Input(prompt, 20);
      input.logits.presence_penalty = 0.5f;
      input.logits.repetition_penalty = repetition;
      const Outcome outcome = Wait(*Submit(std::move(input)));
      const std::vector<TokenId>& tokens = outcome.samples.at(0).tokens;
      ASSERT_EQ(tokens.size(), 20u);
      int followed = 0;
      for (const auto& [position, told] : told_) {
        // The newest of these tokens may be open.
        const int64_t known = position - static_cast<int64_t>(prompt.size()) - told.follows;
        const absl::Span<const TokenId> generated = absl::MakeConstSpan(tokens).first(known);
        EXPECT_EQ(told.uses,
                  Counts(repetition == 1.0f ? std::vector<TokenId>() : prompt, generated));
        followed += told.follows;
      }
      EXPECT_EQ(told_.size(), 20u);
      EXPECT_EQ(followed > 0, steps == 2);
      engine_.reset();
    }
  }
}

TEST_F(LogitParamsTest, RequestsWithoutThemTellNothing) {
  Start(DefaultOptions(), 64);
  bool told = false;
  runner_->on_begin = [&](absl::Span<const StepSequence> sequences) {
    for (const StepSequence& s : sequences) {
      for (const SampleWant& sample : s.samples) {
        told = told || sample.logits != nullptr || !sample.uses.empty() || !sample.banned.empty() ||
               !sample.conditional_bans.empty();
      }
    }
    return absl::OkStatus();
  };
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(5), 9))).status.ok());
  EXPECT_FALSE(told);
}

TEST_F(LogitParamsTest, ABadWordIsNotGenerated) {
  std::vector<std::vector<TokenId>> results;
  for (const int steps : {1, 2}) {
    Start(DefaultOptions(), 64, steps);
    GenerateInput input = Input(Prompt(5), 12);
    const std::vector<TokenId> free_run = Expected(input, 0, 512).tokens;
    const std::vector<TokenId> pair = {free_run[4], free_run[5]};
    const std::vector<TokenId> triple = {free_run[0], free_run[1], free_run[2]};
    // The prompt's tokens are not a part of it.
    const std::vector<TokenId> over_the_edge = {Prompt(5).back(), free_run[0]};
    input.logits.bad_words = {pair, triple, over_the_edge};
    const Outcome outcome = Wait(*Submit(std::move(input)));
    const std::vector<TokenId>& tokens = outcome.samples.at(0).tokens;
    ASSERT_EQ(tokens.size(), 12u);
    for (const std::vector<TokenId>& word : {pair, triple}) {
      EXPECT_EQ(std::search(tokens.begin(), tokens.end(), word.begin(), word.end()), tokens.end());
    }
    EXPECT_EQ(tokens[0], free_run[0]);
    EXPECT_EQ(tokens[1], free_run[1]);
    EXPECT_NE(tokens[2], free_run[2]);
    results.push_back(tokens);
    engine_.reset();
  }
  EXPECT_EQ(results[0], results[1]);
}

}  // namespace
}  // namespace dorad::engine
