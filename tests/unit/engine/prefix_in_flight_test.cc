// Requests with the same tokens share the prefix while one of them computes it.

#include "tests/unit/support/scheduler_fixture.h"

namespace dorad::engine {
namespace {

using PrefixInFlightTest = SchedulerTest;

constexpr TokenId kSame = 5;

TEST_F(PrefixInFlightTest, ARepeatedPromptIsComputedOnce) {
  Make(64, 24);
  Sequence* first = Add(40, 0, nullptr, kSame);
  Sequence* second = Add(40, 0, nullptr, kSame);
  int64_t rows = 0;
  for (int step = 0; step < 2; ++step) {
    const auto chunks = Step();
    ASSERT_EQ(chunks.size(), 1u);
    EXPECT_EQ(chunks[0].sequence, first);
    rows += Rows(chunks);
  }
  EXPECT_EQ(rows, 40);
  const auto chunks = Step();
  ASSERT_EQ(chunks.size(), 2u);
  EXPECT_EQ(chunks[1].sequence, second);
  EXPECT_EQ(chunks[1].position, 39);
  EXPECT_EQ(chunks[1].count, 1);
  EXPECT_EQ(chunks[1].copy_from, first->pages[2]);
  EXPECT_EQ(second->cached_tokens, 39);
  EXPECT_EQ(second->pages[1], first->pages[1]);
  EXPECT_NE(second->pages[2], first->pages[2]);
}

TEST_F(PrefixInFlightTest, StepsInFlightCount) {
  Make(64, 64);
  Sequence* first = Add(40, 0, nullptr, kSame);
  Sequence* second = Add(40, 0, nullptr, kSame);
  const auto one = scheduler_->Schedule();
  ASSERT_EQ(one.size(), 1u);
  const auto two = scheduler_->Schedule();  // while the first one's prompt is computed
  ASSERT_EQ(two.size(), 2u);
  EXPECT_EQ(two[1].sequence, second);
  EXPECT_EQ(two[1].copy_from, first->pages[2]);
  Finish(one);
  Finish(two);
}

TEST_F(PrefixInFlightTest, OthersPassTheOneThatWaits) {
  Make(64, 24);
  Add(40, 0, nullptr, kSame);
  Add(40, 0, nullptr, kSame);
  Sequence* other = Add(4);
  Step();
  const auto chunks = Step();
  ASSERT_EQ(chunks.size(), 2u);
  EXPECT_EQ(chunks[1].sequence, other);
}

TEST_F(PrefixInFlightTest, ACommonBeginningIsComputedOnce) {
  Make(64, 64);
  Add(48, 0, nullptr, kSame);
  Sequence* second = Add(48, 0, nullptr, kSame);
  std::fill(second->tokens.begin() + 37, second->tokens.end(), 3);
  const auto one = scheduler_->Schedule();
  ASSERT_EQ(one.size(), 1u);
  const auto two = scheduler_->Schedule();
  ASSERT_EQ(two.size(), 2u);
  EXPECT_EQ(two[1].position, 37) << "also the tokens of a page that differs later";
  EXPECT_EQ(two[1].count, 11);
  Finish(one);
  Finish(two);
}

TEST_F(PrefixInFlightTest, ALaterRequestCopiesTheLastPageOfARunningOne) {
  for (const int64_t prompt : {7, 16, 17, 32, 45}) {
    Make(64, 64);
    const auto start = static_cast<TokenId>(prompt * 100);
    Sequence* first = Add(prompt, 0, nullptr, start);
    for (int step = 0; step < 20; ++step) Step();
    Sequence* second = Add(prompt, 0, nullptr, start);
    Step();
    EXPECT_EQ(second->cached_tokens, prompt - 1);
    for (Sequence* s : {first, second}) scheduler_->Remove(s);
  }
}

TEST_F(PrefixInFlightTest, TheNextOneComputesWhatTheFirstLeaves) {
  Make(64, 24);
  Sequence* first = Add(60, 0, nullptr, kSame);
  Sequence* second = Add(60, 0, nullptr, kSame);
  Sequence* third = Add(60, 0, nullptr, kSame);
  Step();
  scheduler_->Remove(first);
  auto chunks = Step();
  ASSERT_EQ(chunks.size(), 1u);
  EXPECT_EQ(chunks[0].sequence, second);
  EXPECT_EQ(chunks[0].position, 16) << "the whole page stays";
  Step();
  Step();
  EXPECT_EQ(third->cached_tokens, 59);
}

TEST_F(PrefixInFlightTest, NoneWaitsForAFrozenOne) {
  Make(64, 24);
  Sequence* first = Add(60, 0, nullptr, kSame);
  Sequence* second = Add(60, 0, nullptr, kSame);
  Step();
  scheduler_->SetFrozen(first, true);
  const auto chunks = Step();
  ASSERT_EQ(chunks.size(), 1u);
  EXPECT_EQ(chunks[0].sequence, second);
  EXPECT_EQ(chunks[0].position, 24) << "all that the frozen one has";
}

TEST_F(PrefixInFlightTest, AnUrgentOneDoesNotWaitForOthers) {
  Make(64, 32);
  Sequence* slow = Add(60, /*priority=*/3, nullptr, kSame);
  Step();
  Sequence* urgent = Add(60, /*priority=*/0, nullptr, kSame);
  const auto chunks = Step();
  ASSERT_EQ(chunks.size(), 2u);
  EXPECT_EQ(chunks[0].sequence, slow);
  EXPECT_EQ(chunks[1].sequence, urgent);
  EXPECT_EQ(chunks[1].position, 32) << "all that the slow one has";
}

TEST_F(PrefixInFlightTest, OtherSaltsShareNothing) {
  Make(64, 128);
  Add(40, 0, nullptr, kSame, "a");
  Add(40, 0, nullptr, kSame, "b");
  EXPECT_EQ(Rows(Step()), 80);
}

TEST_F(PrefixInFlightTest, ScoredRowsAreComputedAndOthersShareThem) {
  Make(64, 128);
  Sequence* scored = Add(40, 0, nullptr, kSame);
  scored->to_score = 39;
  Sequence* first = Add(40, 0, nullptr, kSame);
  Sequence* again = Add(40, 0, nullptr, kSame);
  again->to_score = 39;
  Step();
  EXPECT_EQ(scored->computed, 39);
  EXPECT_EQ(again->computed, 39) << "its own rows are wanted";
  EXPECT_EQ(first->computed, 0);
  Step();
  EXPECT_EQ(first->cached_tokens, 39);
}

TEST_F(PrefixInFlightTest, ACopiedPageIsHeldUntilTheCopyHasLanded) {
  Make(6, 64);
  Sequence* first = Add(40, 0, nullptr, kSame);
  Sequence* second = Add(40, 0, nullptr, kSame);
  Step();
  const int32_t copied = first->pages[2];
  const auto chunks = scheduler_->Schedule();
  ASSERT_EQ(chunks.size(), 2u);
  EXPECT_EQ(chunks[1].copy_from, copied);
  scheduler_->Remove(first);
  EXPECT_EQ(pages_->used(), 4) << "two shared pages, the copy and its source";
  Land(chunks);
  EXPECT_EQ(pages_->used(), 3);
  EXPECT_EQ(second->pages.size(), 3u);
}

TEST_F(PrefixInFlightTest, APreemptedCopyGivesItsSourceBack) {
  Make(8, 64);
  Sequence* first = Add(40, 0, nullptr, kSame);
  Step();
  Add(40, 0, nullptr, kSame);
  Land(scheduler_->Schedule());
  scheduler_->PreemptAll();
  EXPECT_EQ(pages_->used(), 0);
  EXPECT_EQ(first->state, Sequence::State::kWaiting);
  Step();
  Step();
  pages_->CheckIntegrity();
}

}  // namespace
}  // namespace dorad::engine
