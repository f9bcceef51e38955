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
  const auto one = Step();
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(one[0].sequence, first);
  const auto two = Step();
  ASSERT_EQ(two.size(), 2u);
  EXPECT_EQ(Rows(one) + Rows(two), 40);
  EXPECT_EQ(two[1].sequence, second);
  EXPECT_EQ(two[1].row_of, first) << "its token comes from the first one's last row";
  EXPECT_EQ(second->cached_tokens, 40);
  EXPECT_EQ(second->pages[1], first->pages[1]);
  EXPECT_NE(second->pages[2], first->pages[2]);
  const int32_t last = first->pages[2];
  const auto three = Step();
  ASSERT_EQ(three.size(), 2u);
  EXPECT_EQ(three[1].position, 40);
  EXPECT_EQ(three[1].copy_from, std::vector{last})
      << "the prompt's end, before the next token's row";
}

TEST_F(PrefixInFlightTest, StepsInFlightCount) {
  Make(64, 64);
  Sequence* first = Add(40, 0, nullptr, kSame);
  const auto one = scheduler_->Schedule();
  Sequence* second = Add(40, 0, nullptr, kSame);
  const auto two = scheduler_->Schedule();  // while the first one's prompt is computed
  ASSERT_EQ(two.size(), 2u);
  EXPECT_EQ(two[1].sequence, second);
  EXPECT_EQ(two[1].copy_from, std::vector{first->pages[2]});
  Finish(one);
  Finish(two);
}

TEST_F(PrefixInFlightTest, APageThatIsNotCopiedYetIsNobodysSource) {
  Make(64, 64);
  Sequence* first = Add(21, 0, nullptr, kSame);
  Sequence* second = Add(21, 0, nullptr, kSame);
  Sequence* third = Add(21, 0, nullptr, kSame);
  const auto one = scheduler_->Schedule();
  ASSERT_EQ(one.size(), 3u);
  const int32_t source = first->pages[1];
  first->most_tokens = third->most_tokens = 22;  // they end with their first token
  Land(one);
  Sequence* late = Add(21, 0, nullptr, kSame);
  const auto two = scheduler_->Schedule();
  ASSERT_EQ(two.size(), 2u);
  EXPECT_EQ(two[0].sequence, second);
  EXPECT_EQ(two[0].copy_from, std::vector{source});
  EXPECT_EQ(two[1].sequence, late);
  EXPECT_EQ(two[1].copy_from, std::vector{source}) << "the second one's page is being written";
  Land(two);
}

TEST_F(PrefixInFlightTest, NothingOfThisStepIsCopiedInThisStep) {
  Make(64, 64);
  Sequence* first = Add(21, 0, nullptr, kSame);
  Sequence* second = Add(21, 0, nullptr, kSame);
  Sequence* sibling = Add(21, 0, second, kSame);
  const auto one = scheduler_->Schedule();
  ASSERT_EQ(one.size(), 2u);
  EXPECT_EQ(one[1].row_of, first);
  EXPECT_EQ(sibling->state, Sequence::State::kWaiting) << "its leader has nothing yet";
  Finish(one);
  const auto two = scheduler_->Schedule();
  ASSERT_EQ(two.size(), 3u);
  EXPECT_EQ(two[2].sequence, sibling);
  EXPECT_EQ(two[2].copy_from, std::vector{first->pages[1]});
  Finish(two);
}

TEST_F(PrefixInFlightTest, ACopyThatDidNotHappenLeavesNoPage) {
  Make(64, 64);
  Sequence* first = Add(21, 0, nullptr, kSame);
  Sequence* second = Add(21, 0, nullptr, kSame);
  first->most_tokens = 22;
  Land(scheduler_->Schedule());
  const auto chunks = scheduler_->Schedule();
  ASSERT_EQ(chunks.size(), 1u);
  ASSERT_FALSE(chunks[0].copy_from.empty());
  // The step does not begin: its sequences end.
  scheduler_->Landed(chunks[0]);
  scheduler_->Remove(second);
  Sequence* third = Add(21, 0, nullptr, kSame);
  const auto again = scheduler_->Schedule();
  ASSERT_EQ(again.size(), 1u);
  EXPECT_EQ(again[0].copy_from, chunks[0].copy_from) << "the page of the one that computed it";
  EXPECT_EQ(third->cached_tokens, 20);
  Land(again);
}

TEST_F(PrefixInFlightTest, OthersPassTheOneThatWaits) {
  Make(64, 24);
  Sequence* first = Add(40, 0, nullptr, kSame);
  Sequence* second = Add(41, 0, nullptr, kSame);
  Sequence* other = Add(4);
  Step();
  auto chunks = Step();
  ASSERT_EQ(chunks.size(), 2u);
  EXPECT_EQ(chunks[0].sequence, first);
  EXPECT_EQ(chunks[1].sequence, other);
  chunks = Step();
  EXPECT_EQ(second->cached_tokens, 32) << "the longer prompt's beginning";
}

TEST_F(PrefixInFlightTest, APreemptedOneTakesThoseWithItsRowAlong) {
  Make(10, 64);
  Sequence* first = Add(100, /*priority=*/3, nullptr, kSame);
  Step();
  Sequence* second = Add(100, /*priority=*/0, nullptr, kSame);
  tenant_ = "other";  // has had nothing: the first one, which has most pages, must go
  Sequence* other = Add(40, /*priority=*/3);
  const auto chunks = scheduler_->Schedule();
  ASSERT_EQ(chunks.size(), 1u);
  EXPECT_EQ(chunks[0].sequence, other);
  EXPECT_EQ(first->preemptions, 1u);
  EXPECT_EQ(second->preemptions, 1u);
  EXPECT_EQ(second->state, Sequence::State::kWaiting);
  Finish(chunks);
  pages_->CheckIntegrity();
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
  EXPECT_EQ(chunks[0].position, 24) << "what has been computed stays";
  Step();
  Step();
  EXPECT_EQ(third->cached_tokens, 60);
}

TEST_F(PrefixInFlightTest, AnEndedOneLeavesAlsoItsUnfinishedPage) {
  Make(64, 64);
  Sequence* first = Add(21, 0, nullptr, kSame);
  first->most_tokens = 24;
  for (int step = 0; step < 3; ++step) Land(scheduler_->Schedule());
  ASSERT_EQ(first->state, Sequence::State::kEnded);
  Sequence* second = Add(21, 0, nullptr, kSame);
  Sequence* longer = Add(30, 0, nullptr, kSame);
  std::fill(longer->tokens.begin() + 18, longer->tokens.end(), 3);
  Step();
  EXPECT_EQ(second->cached_tokens, 20);
  EXPECT_EQ(longer->cached_tokens, 18);
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
  pages_ = std::make_unique<KvPages>(64);
  bool away = false;
  const auto may_run = [&away](const Sequence* s) { return s->priority < 3 || !away; };
  scheduler_ = std::make_unique<Scheduler>(Scheduler::Options{32, 64, may_run}, pages_.get());
  Sequence* slow = Add(60, /*priority=*/3, nullptr, kSame);
  Step();
  away = true;
  Sequence* urgent = Add(60, /*priority=*/2, nullptr, kSame);
  const auto chunks = Step();
  ASSERT_EQ(chunks.size(), 1u);
  EXPECT_EQ(chunks[0].sequence, urgent);
  EXPECT_EQ(chunks[0].position, 32) << "all that the slow one has";
  EXPECT_EQ(slow->computed, 32);
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
  EXPECT_EQ(chunks[1].copy_from, std::vector{copied});
  scheduler_->Remove(first);
  EXPECT_EQ(pages_->used(), 4) << "two shared pages, the copy and its source";
  Land(chunks);
  EXPECT_EQ(pages_->used(), 3);
  EXPECT_EQ(second->pages.size(), 3u);
}

TEST_F(PrefixInFlightTest, ASourceThatLeavesNoPageForItsCopyIsNotCopied) {
  Make(3, 64);
  for (int i = 0; i < 2; ++i) {
    Sequence* s = Add(47, 0, nullptr, kSame);
    s->most_tokens = 48;
    Land(scheduler_->Schedule());
    EXPECT_EQ(s->state, Sequence::State::kEnded);
    EXPECT_EQ(s->cached_tokens, i == 0 ? 0 : 32);
  }
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
