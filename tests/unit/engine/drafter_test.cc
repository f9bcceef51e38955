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
  DraftPace pace(100);
  int64_t length = pace.Next(1, 0.1);
  for (int i = 0; i < 6; ++i) {
    pace.Verified(length, true);
    const int64_t next = pace.Next(length + 1, 0.1);
    EXPECT_GE(next, std::min<int64_t>(100, 2 * length));
    length = next;
  }
  EXPECT_EQ(length, 100);
  pace.Verified(3, false);
  EXPECT_LE(pace.Next(4, 0.1), 10);
}

TEST(DraftPaceTest, RestsLongerAndLongerWhileGuessesAreWrong) {
  DraftPace pace(100);
  int64_t verified = 0;
  for (int token = 0; token < 2000; ++token) {
    const int64_t length = pace.Next(1, 0.1);
    if (length == 0) continue;
    verified += length;
    pace.Verified(0, false);
  }
  EXPECT_GT(verified, 0);
  EXPECT_LT(verified, 2000 / 8) << "rows that a sample wastes";
  for (int i = 0; i < 2; ++i) pace.Verified(8, true);
  EXPECT_GT(pace.Next(1, 0.1), 0) << "good guesses end the rests";
}

TEST(DraftPaceTest, AGuessIsAsLongAsItsLastTokenPaysForItsRow) {
  const std::pair<double, int64_t> cases[] = {{0.1, 3}, {1.0 / 3, 1}, {0.9, 0}};
  for (const auto& [row_share, length] : cases) {
    DraftPace pace(100);
    for (int i = 0; i < 30; ++i) pace.Verified(1, false);  // half of the tokens are right
    EXPECT_EQ(pace.Next(1, row_share), length) << row_share;
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
  NgramIndex index({&text});
  index.Add(0);
  EXPECT_THAT(index.Next(0, 4), ElementsAre()) << "nothing is like its end";
  text.insert(text.end(), {1, 2, 3});
  index.Add(0);
  EXPECT_THAT(index.Next(0, 4), ElementsAre(7, 8, 1, 2));
}

TEST(NgramIndexTest, ReadsSiblingsTextsAndNoImages) {
  std::vector<TokenId> first = {1, 2, 3, 4, 5, -7, -7, 6};
  std::vector<TokenId> second = {9, 9, 1, 2, 3};
  NgramIndex index({&first, &second});
  index.Add(0);
  index.Add(1);
  EXPECT_THAT(index.Next(1, 8), ElementsAre(4, 5));
}

}  // namespace
}  // namespace dorad::engine
