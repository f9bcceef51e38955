#include "server/engine/drafter.h"

#include "server/engine/ngram_index.h"
#include "server/engine/step_cost.h"
#include "tests/unit/support/test.h"

namespace dorad::engine {
namespace {

std::vector<TokenId> Numbers(TokenId begin, TokenId end) {
  std::vector<TokenId> numbers;
  for (; begin < end; ++begin) numbers.push_back(begin);
  return numbers;
}

TEST(ExpectedAnswerTest, IsFollowedFromItsFirstToken) {
  ExpectedAnswer answer(Numbers(0, 10));
  EXPECT_THAT(answer.Next({}, 3), ElementsAre(0, 1, 2));
  EXPECT_THAT(answer.Next({0, 1, 2, 3}, 4), ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(answer.Next({0, 1, 2, 3, 4, 5, 6, 7, 8}, 4), ElementsAre(9));
  EXPECT_THAT(answer.Next({0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, 4), ElementsAre());
}

TEST(ExpectedAnswerTest, IsLostAtAnotherTokenAndFoundByThreeEqualOnes) {
  ExpectedAnswer answer(Numbers(0, 20));
  std::vector<TokenId> text = {0, 1, 99};
  EXPECT_THAT(answer.Next(text, 2), ElementsAre());
  text.insert(text.end(), {3, 4});
  EXPECT_THAT(answer.Next(text, 2), ElementsAre());
  text.push_back(5);
  EXPECT_THAT(answer.Next(text, 2), ElementsAre(6, 7)) << "one token was replaced";
  text.insert(text.end(), {50, 51, 52, 6, 7, 8});
  EXPECT_THAT(answer.Next(text, 2), ElementsAre(9, 10)) << "tokens came between";
  text.insert(text.end(), {14, 15, 16});
  EXPECT_THAT(answer.Next(text, 2), ElementsAre(17, 18)) << "tokens were left out";
}

TEST(ExpectedAnswerTest, IsFoundAtTheNearestPlace) {
  ExpectedAnswer answer({1, 2, 3, 10, 1, 2, 3, 20, 1, 2, 3, 30});
  std::vector<TokenId> text = {9, 9, 9, 9, 9, 1, 2, 3};
  EXPECT_THAT(answer.Next(text, 1), ElementsAre(20));
}

TEST(DraftPaceTest, GrowsWhileGuessesAreRight) {
  DraftPace pace(100, /*trusts=*/true);
  const DraftPrice price = {0.1, 1};
  int64_t length = pace.Next(price);
  for (int i = 0; i < 6; ++i) {
    pace.Verified(length, true);
    const int64_t next = pace.Next(price);
    EXPECT_GE(next, std::min<int64_t>(100, 2 * length));
    length = next;
  }
  EXPECT_EQ(length, 100);
  pace.Verified(3, false);
  EXPECT_LE(pace.Next(price), 10);
}

TEST(DraftPaceTest, GuessesThatAreWrongAreComparedOnly) {
  DraftPace pace(100, /*trusts=*/true);
  const DraftPrice price = {0.1, 1};
  int wrong = 0;
  for (; pace.Next(price) > 0; ++wrong) pace.Verified(0, false);
  EXPECT_LT(wrong, 6);
  for (TokenId token = 0; token < 100; ++token) {
    ASSERT_EQ(pace.Next(price), 0) << token;
    ASSERT_EQ(pace.NextToCompare(), 4);
    pace.Compare({token, token, token, token});
    pace.Came({token + 1});
  }
}

TEST(DraftPaceTest, AFirstGuessIsComparedUnlessItsSourceIsTrusted) {
  const DraftPrice price = {0.2, 1};
  EXPECT_GT(DraftPace(100, true).Next(price), 0);
  DraftPace pace(100, false);
  EXPECT_EQ(pace.Next(price), 0);
  pace.Compare({1, 2, 3, 4});
  EXPECT_EQ(pace.NextToCompare(), 0);
  pace.Came({1, 2});
  EXPECT_EQ(pace.Next(price), 0);
  pace.Came({3, 4, 5});
  EXPECT_GT(pace.Next(price), 0) << "all were right";
  EXPECT_EQ(pace.Next({0.5, 1}), 0) << "in a large batch that is too little";
}

TEST(DraftPaceTest, AGuessGainsTheTokensThatItSavesLessItsPrice) {
  DraftPace pace(100, /*trusts=*/true);
  for (int i = 0; i < 60; ++i) pace.Verified(3, false);  // three quarters are right
  EXPECT_NEAR(pace.Gain({0.1, 1}, 2), 0.75 + 0.5625 - 2 * 0.1 - 0.75, 1e-6);
}

TEST(DraftPaceTest, GuessesAreMadeAgainSoonAfterTheyAreRight) {
  DraftPace pace(100, /*trusts=*/false);
  const DraftPrice price = {0.2, 1};
  for (int i = 0; i < 100; ++i) pace.Verified(0, false);
  int tokens = 0;
  for (; pace.Next(price) == 0; ++tokens) {
    if (pace.NextToCompare() > 0) pace.Compare({7, 7, 7, 7});
    pace.Came({7});
  }
  EXPECT_LE(tokens, 12);
}

TEST(DraftPaceTest, AGuessIsAsLongAsItsLastTokenPaysForItsRow) {
  // Of guessed tokens, three quarters are right: 0.75 + 0.5625 + ... by a guess.
  const std::pair<DraftPrice, int64_t> cases[] = {
      {{0.1, 1}, 8}, {{0.1, 2.5}, 8}, {{0.1, 2.6}, 0}, {{1.0 / 3, 0.5}, 3}, {{0.8, 0.1}, 0}};
  for (const auto& [price, length] : cases) {
    DraftPace pace(100, /*trusts=*/true);
    for (int i = 0; i < 60; ++i) pace.Verified(3, false);
    EXPECT_EQ(pace.Next(price), length) << price.row << " " << price.place;
  }
}

TEST(StepCostTest, LearnsWhatARowAdds) {
  StepCost cost;
  for (int i = 0; i < 200; ++i) {
    const int64_t rows = i % 4 == 0 ? 512 : 8;
    cost.Observe(rows, absl::Microseconds(4000 + 30 * rows));
  }
  EXPECT_NEAR(cost.RowShare(8), 240.0 / 4240, 1e-3);
  EXPECT_NEAR(cost.RowShare(256), 7680.0 / 11680, 1e-3);
  // Steps of equal size change nothing.
  for (int i = 0; i < 1000; ++i) cost.Observe(8, absl::Milliseconds(9));
  EXPECT_LT(cost.RowShare(8), 0.2);
}

TEST(NgramIndexTest, GoesOnAsTheLatestOtherPlaceDid) {
  std::vector<TokenId> text = {1, 2, 3, 4, 5, 6, 1, 2, 3, 7, 8};
  NgramIndex index({&text}, 0);
  index.Add(0);
  EXPECT_THAT(index.Next(0, 4), ElementsAre()) << "nothing is like its end";
  text.insert(text.end(), {1, 2, 3});
  index.Add(0);
  EXPECT_THAT(index.Next(0, 4), ElementsAre(7, 8, 1, 2));
}

TEST(NgramIndexTest, ReadsSiblingsTextsAndNoImages) {
  std::vector<TokenId> first = {1, 2, 3, 4, 5, -7, -7, 6};
  std::vector<TokenId> second = {9, 9, 1, 2, 3};
  NgramIndex index({&first, &second}, 0);
  index.Add(0);
  index.Add(1);
  EXPECT_THAT(index.Next(1, 8), ElementsAre(4, 5));
}

TEST(NgramIndexTest, TheFirstTextAddsThePromptForAll) {
  std::vector<TokenId> first = {1, 2, 3, 4, 5, 6};
  std::vector<TokenId> second = {1, 2, 3, 4, 7, 1, 2, 3};
  NgramIndex index({&first, &second}, 4);
  index.Add(1);
  EXPECT_THAT(index.Next(1, 8), ElementsAre());
  index.Add(0);
  EXPECT_THAT(index.Next(1, 8), ElementsAre(4, 5, 6));
  second.insert(second.end(), {8, 3, 4, 7});
  index.Add(1);
  EXPECT_THAT(index.Next(1, 8), ElementsAre(1, 2, 3, 8, 3, 4, 7)) << "its own text, from its begin";
}

}  // namespace
}  // namespace dorad::engine
