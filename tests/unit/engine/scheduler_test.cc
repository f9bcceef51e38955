#include "server/engine/scheduler.h"

#include "tests/unit/support/scheduler_fixture.h"

namespace dorad::engine {
namespace {

TEST_F(SchedulerTest, FillsUpWithPrefillChunksBehindTheDecodes) {
  Make(64, 32);
  Sequence* decoding = Add(4);
  Step();
  Sequence* prefill = Add(100);
  const auto chunks = Step();
  ASSERT_EQ(chunks.size(), 2u);
  EXPECT_EQ(chunks[0].sequence, decoding);
  EXPECT_EQ(chunks[0].count, 1);
  EXPECT_EQ(chunks[1].sequence, prefill);
  EXPECT_EQ(chunks[1].count, 31);
}

TEST_F(SchedulerTest, NeverExceedsTheBudget) {
  Make(256, 20);
  for (int i = 0; i < 30; ++i) Add(1 + 7 * i);
  for (int i = 0; i < 50; ++i) EXPECT_LE(Rows(Step()), 20);
}

TEST_F(SchedulerTest, RunsLowPriorityValuesFirst) {
  Make(64, 16);
  Add(16, /*priority=*/5);
  Sequence* urgent = Add(16, /*priority=*/-1);
  const auto chunks = Step();
  ASSERT_EQ(chunks.size(), 1u);
  EXPECT_EQ(chunks[0].sequence, urgent);
}

TEST_F(SchedulerTest, SiblingsWaitUntilTheLeaderHasComputedThePrompt) {
  Make(64, 24);
  Sequence* leader = Add(40, 0, nullptr, 5);
  Sequence* sibling = Add(40, 0, leader, 5);
  Sequence* other = Add(4);
  auto chunks = Step();
  ASSERT_EQ(chunks.size(), 1u);
  EXPECT_EQ(chunks[0].sequence, leader);
  chunks = Step();
  ASSERT_EQ(chunks.size(), 3u);
  EXPECT_EQ(chunks[1].sequence, sibling) << "its last row is the leader's";
  EXPECT_EQ(chunks[1].row_of, leader);
  EXPECT_EQ(chunks[1].count, 0);
  EXPECT_EQ(chunks[2].sequence, other);
  EXPECT_EQ(sibling->state, Sequence::State::kRunning);
  EXPECT_EQ(sibling->cached_tokens, 40);
  EXPECT_EQ(sibling->pages[0], leader->pages[0]);
  EXPECT_NE(sibling->pages[2], leader->pages[2]);
}

TEST_F(SchedulerTest, AdmitsInOrderWhenPagesAreShort) {
  Make(4, 64);
  Add(30);
  Sequence* big = Add(50);
  Sequence* small = Add(4);
  Step();
  EXPECT_EQ(big->state, Sequence::State::kWaiting);
  EXPECT_EQ(small->state, Sequence::State::kWaiting) << "the queue is fair";
}

TEST_F(SchedulerTest, PreemptsTheLastArrivalAndRunsItAgainLater) {
  Make(3, 64);
  Sequence* first = Add(16);
  Sequence* second = Add(15);
  Step();
  EXPECT_EQ(scheduler_->running(), 2);
  // first: 16 tokens and a decode token: needs a second page; second's decode fits its page once.
  while (scheduler_->preemptions() == 0) Step();
  EXPECT_EQ(first->state, Sequence::State::kRunning);
  EXPECT_EQ(second->state, Sequence::State::kWaiting);
  EXPECT_EQ(second->preemptions, 1u);
  const int64_t tokens = static_cast<int64_t>(second->tokens.size());
  scheduler_->Remove(first);
  const auto chunks = Step();
  ASSERT_EQ(chunks.size(), 1u);
  EXPECT_EQ(chunks[0].sequence, second);
  EXPECT_GE(second->computed, tokens - 1);
}

TEST_F(SchedulerTest, ChunksOfAScoreDoNotMixDoneAndNewRows) {
  Make(16, 10);
  Sequence* score = Add(40);
  scheduler_->Remove(score);
  score->state = Sequence::State::kWaiting;
  score->to_score = 39;
  score->most_tokens = 40;
  score->scored = 17;  // as after a preemption
  scheduler_->Add(score);
  std::vector<int64_t> counts;
  while (score->computed < score->goal()) {
    const auto chunks = Step();
    ASSERT_EQ(chunks.size(), 1u);
    counts.push_back(chunks[0].count);
  }
  EXPECT_EQ(counts, (std::vector<int64_t>{10, 7, 10, 10, 2}));
}

TEST_F(SchedulerTest, LimitsRunningSequences) {
  Make(64, 64, /*max_running=*/3);
  for (int i = 0; i < 5; ++i) Add(4);
  Step();
  EXPECT_EQ(scheduler_->running(), 3);
  EXPECT_EQ(scheduler_->waiting(), 2);
}

TEST_F(SchedulerTest, DecodesFollowTokensThatHaveNotComeYet) {
  Make(64, 32);
  Sequence* a = Add(4);
  Sequence* b = Add(4);
  const auto first = scheduler_->Schedule();
  const auto second = scheduler_->Schedule();
  ASSERT_EQ(second.size(), 2u);
  EXPECT_EQ(second[0].sequence, a);
  EXPECT_EQ(second[0].position, 4);
  EXPECT_EQ(second[0].follows, 0);
  EXPECT_TRUE(second[0].samples);
  EXPECT_EQ(second[1].sequence, b);
  EXPECT_EQ(second[1].follows, 1);
  Finish(first);
  const auto third = scheduler_->Schedule();
  EXPECT_EQ(third[0].position, 5);
  EXPECT_EQ(third[0].follows, 0);
  Finish(second);
  Finish(third);
  const auto fourth = scheduler_->Schedule();
  EXPECT_EQ(fourth[0].position, 6);
  EXPECT_EQ(fourth[0].follows, -1) << "its token has come";
  Finish(fourth);
}

TEST_F(SchedulerTest, SchedulesNoRowBehindTheLastToken) {
  Make(64, 32);
  Sequence* s = Add(4);
  s->most_tokens = 6;
  const auto first = scheduler_->Schedule();
  const auto second = scheduler_->Schedule();
  ASSERT_EQ(second.size(), 1u);
  EXPECT_TRUE(second[0].samples);
  Finish(first);
  EXPECT_TRUE(scheduler_->Schedule().empty()) << "the second token is on its way and is the last";
  Finish(second);
}

TEST_F(SchedulerTest, APreemptedSequenceWaitsForWhatIsInFlight) {
  Make(3, 64);
  Sequence* first = Add(16);
  Sequence* second = Add(15);
  Finish(scheduler_->Schedule());
  const auto before = scheduler_->Schedule();
  ASSERT_EQ(before.size(), 2u);
  const auto preempting = scheduler_->Schedule();
  ASSERT_EQ(preempting.size(), 1u) << "second needs another page, and first has the two others";
  EXPECT_EQ(preempting[0].sequence, first);
  EXPECT_EQ(second->state, Sequence::State::kWaiting);
  EXPECT_EQ(second->computed, 0);
  Finish(before);
  EXPECT_EQ(second->tokens.size(), 17u) << "the token counts, though its pages are gone";
  EXPECT_TRUE(second->pages.empty());
  Finish(preempting);
  scheduler_->Remove(first);
  const auto again = scheduler_->Schedule();
  ASSERT_EQ(again.size(), 1u);
  EXPECT_EQ(again[0].sequence, second);
  EXPECT_EQ(again[0].follows, -1);
  EXPECT_EQ(again[0].end(), 17);
  Finish(again);
}

// Others may wait for the weights, and have the pages.
TEST_F(SchedulerTest, WhoWaitsForPagesHoldsNoWeights) {
  MakeWithWeights(3);
  Add(16);
  Sequence* second = Add(15);
  Sequence* third = Add(16);
  Step();
  EXPECT_TRUE(second->has_pins);
  EXPECT_FALSE(third->has_pins) << "there is no page for it";
  while (scheduler_->preemptions() == 0) Step();
  EXPECT_EQ(second->state, Sequence::State::kWaiting);
  EXPECT_FALSE(second->has_pins);
}

TEST_F(SchedulerTest, APreemptedSequenceHoldsItsWeightsWhileARowOfItIsComputed) {
  MakeWithWeights(3);
  Add(16);
  Sequence* second = Add(15);
  Step();
  const auto before = scheduler_->Schedule();
  ASSERT_EQ(before.size(), 2u);
  const auto preempting = scheduler_->Schedule();
  ASSERT_EQ(second->state, Sequence::State::kWaiting);
  EXPECT_TRUE(second->has_pins);
  Finish(before);
  EXPECT_FALSE(second->has_pins);
  Finish(preempting);
}

TEST_F(SchedulerTest, AWaitingSequenceWithAChunkInFlightIsNotAdmitted) {
  Make(8, 64);
  Sequence* s = Add(16);
  const auto before = scheduler_->Schedule();
  // As if it had been preempted for others, who are gone since.
  scheduler_->Remove(s);
  s->state = Sequence::State::kWaiting;
  s->computed = 0;
  scheduler_->Add(s);
  EXPECT_TRUE(scheduler_->Schedule().empty());
  Finish(before);
  EXPECT_EQ(scheduler_->Schedule().size(), 1u);
}

// A sequence may end while rows of it are in flight: its pages go to others at once.
TEST_F(SchedulerTest, RandomEndsWithRowsInFlightKeepThePages) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % n); };
    sequences_.clear();
    Make(8 + below(12), 4 + below(40), 1 + below(8));
    std::deque<std::vector<Chunk>> in_flight;
    for (int step = 0; step < 300; ++step) {
      if (below(3) == 0) Add(1 + below(50), below(3))->most_tokens = 60;
      if (below(3) == 0 && !sequences_.empty()) {
        scheduler_->Remove(&sequences_[below(static_cast<int>(sequences_.size()))]);
      }
      if (below(10) == 0 && !sequences_.empty()) {
        Sequence& s = sequences_[below(static_cast<int>(sequences_.size()))];
        if (s.in_flight == 0) scheduler_->SetFrozen(&s, !s.frozen);
      }
      if (in_flight.size() < 2) in_flight.push_back(scheduler_->Schedule());
      ASSERT_NO_FATAL_FAILURE(ExpectPagesOfTheirOwn());
      if (below(2) == 0 || in_flight.size() == 2) {
        Land(in_flight.front());
        in_flight.pop_front();
      }
      pages_->CheckIntegrity();
    }
    for (const std::vector<Chunk>& chunks : in_flight) Land(chunks);
    for (Sequence& s : sequences_) scheduler_->Remove(&s);
    EXPECT_EQ(pages_->used(), 0);
    EXPECT_EQ(scheduler_->running() + scheduler_->waiting() + scheduler_->frozen(), 0);
  }
}

}  // namespace
}  // namespace dorad::engine
