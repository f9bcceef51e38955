// States of a recurrence: their places in the cache and their readers. No step changes a cached
// one.

#include <map>

#include "tests/unit/support/scheduler_fixture.h"

namespace dorad::engine {
namespace {

constexpr TokenId kSame = 5;
constexpr int64_t kState = 2;  // pages

struct RecurrenceTest : SchedulerTest {
  RecurrenceTest() { MakeWithStates(64, 64, kState); }

  // A prompt with `common` tokens of the others', then `own` of its own.
  Sequence* AddBranch(int64_t common, int64_t own) {
    Sequence* const s = Add(common + own, 0, nullptr, kSame);
    scheduler_->Remove(s);
    s->state = Sequence::State::kWaiting;
    for (int64_t i = common; i < common + own; ++i) {
      s->tokens[i] = static_cast<TokenId>(sequences_.size() * 10000 + i);
    }
    scheduler_->Add(s);
    return s;
  }

  // Steps until the sequence has its first token; returns its chunks so far.
  std::vector<Chunk> Prefill(Sequence* sequence) {
    while (sequence->generated() == 0) {
      for (const Chunk& chunk : Step()) chunks_[chunk.sequence].push_back(chunk);
    }
    return chunks_[sequence];
  }

  std::map<const Sequence*, std::vector<Chunk>> chunks_;
};

TEST_F(RecurrenceTest, TheStateBeforeAPromptsLastPageIsCachedAndNotWrittenAgain) {
  Sequence* const s = Add(40);
  const std::vector<Chunk> chunks = Prefill(s);
  ASSERT_EQ(chunks.size(), 2u);
  EXPECT_EQ(chunks[0].end(), 32);
  EXPECT_TRUE(chunks[0].state_from.empty());
  EXPECT_EQ(chunks[1].state_from, chunks[0].cached_state);
  EXPECT_TRUE(chunks[1].cached_state.empty());
  EXPECT_NE(s->recurrent, chunks[0].cached_state);
  const std::vector<int32_t> own = s->recurrent;
  EXPECT_TRUE(Step()[0].state_from.empty()) << "a token writes in place";
  EXPECT_EQ(s->recurrent, own);
}

TEST_F(RecurrenceTest, APromptOfOnePageIsNotDivided) { EXPECT_EQ(Prefill(Add(16)).size(), 1u); }

TEST_F(RecurrenceTest, TheNextStepLeavesAStateThatIsYetToBeCached) {
  Sequence* const s = Add(40);
  const auto one = scheduler_->Schedule();
  const auto two = scheduler_->Schedule();  // while the first is computed
  EXPECT_EQ(two[0].state_from, one[0].cached_state);
  EXPECT_NE(s->recurrent, one[0].cached_state);
  Finish(one);
  Finish(two);
}

TEST_F(RecurrenceTest, TheSamePromptGoesOnFromTheCachedState) {
  Sequence* const first = Add(40, 0, nullptr, kSame);
  Sequence* const second = Add(40, 0, nullptr, kSame);
  Sequence* const sibling = Add(40, 0, second, kSame);
  const std::vector<Chunk> of_first = Prefill(first);
  ASSERT_EQ(of_first[0].cached_state.size(), 2u);
  const std::vector<Chunk> of_second = Prefill(second);
  const std::vector<Chunk> of_sibling = Prefill(sibling);
  for (const auto& chunks : {of_second, of_sibling}) {
    ASSERT_GE(chunks.size(), 1u);
    EXPECT_EQ(chunks[0].position, 32);
    EXPECT_EQ(chunks[0].state_from, of_first[0].cached_state);
  }
  EXPECT_EQ(second->cached_tokens, 32);
  EXPECT_NE(second->recurrent, first->recurrent);
}

TEST_F(RecurrenceTest, ALongerPromptGoesOnFromItsBeginning) {
  Prefill(Add(40, 0, nullptr, kSame));
  const std::vector<Chunk> chunks = Prefill(Add(72, 0, nullptr, kSame));
  ASSERT_EQ(chunks.size(), 2u);
  EXPECT_EQ(chunks[0].position, 32);
  EXPECT_EQ(chunks[0].end(), 64);
}

TEST_F(RecurrenceTest, TheSecondPromptCachesTheStateWhereItPartsFromTheFirst) {
  Prefill(AddBranch(32, 20));
  const std::vector<Chunk> second = Prefill(AddBranch(32, 20));
  ASSERT_EQ(second.size(), 3u);
  EXPECT_EQ(second[0].position, 0);
  EXPECT_EQ(second[0].end(), 32);
  EXPECT_EQ(second[1].end(), 48);
  const std::vector<Chunk> third = Prefill(AddBranch(32, 20));
  ASSERT_EQ(third.size(), 2u);
  EXPECT_EQ(third[0].position, 32);
  EXPECT_EQ(third[0].state_from, second[0].cached_state);
}

TEST_F(RecurrenceTest, WithoutThePrefixCacheNothingIsCached) {
  Sequence* const s = Add(40);
  s->use_prefix_cache = false;
  const std::vector<Chunk> chunks = Prefill(s);
  ASSERT_EQ(chunks.size(), 1u);
  EXPECT_TRUE(chunks[0].cached_state.empty());
}

TEST_F(RecurrenceTest, SequencesThatOutgrowThePagesAreRecomputed) {
  MakeWithStates(/*pages=*/18, /*budget=*/64, kState);
  std::vector<Sequence*> all;
  for (int i = 0; i < 3; ++i) {
    all.push_back(Add(20));
    all.back()->most_tokens = 100;
  }
  while (!std::all_of(all.begin(), all.end(),
                      [](Sequence* s) { return s->state == Sequence::State::kEnded; })) {
    const std::vector<Chunk> chunks = scheduler_->Schedule();
    ASSERT_FALSE(chunks.empty());
    Land(chunks);
    pages_->CheckIntegrity();
  }
  EXPECT_GT(scheduler_->preemptions(), 0u);
  EXPECT_EQ(pages_->used(), 0);
}

}  // namespace
}  // namespace dorad::engine
