// Images whose rows see each other: the scheduler computes one in one step.

#include "server/engine/images.h"
#include "tests/unit/support/scheduler_fixture.h"

namespace dorad::engine {
namespace {

constexpr int64_t kRows = 20;  // of an image

class ImageBlocksTest : public SchedulerTest {
 protected:
  void MakeFor(int64_t pages, int64_t budget, int32_t max_running = 64) {
    pages_ = std::make_unique<KvPages>(pages);
    scheduler_ = std::make_unique<Scheduler>(
        Scheduler::Options{budget, max_running, nullptr, kRows}, pages_.get());
  }

  // A prompt of `before` tokens, an image, and `after` tokens.
  Sequence* AddImage(int64_t before, int64_t after, TokenId first = -1, TokenId key = -5) {
    Sequence* const s = Add(before + kRows + after, 0, nullptr, first);
    auto image = std::make_shared<Image>();
    image->rows = 4;
    image->columns = kRows / 4;
    image->bidirectional = true;
    image->key = key;
    s->images = PromptImages::Of({{before, image}});
    s->images->Mark(&s->tokens);
    return s;
  }

  static std::vector<int64_t> Counts(const std::vector<Chunk>& chunks) {
    std::vector<int64_t> counts;
    for (const Chunk& chunk : chunks) counts.push_back(chunk.count);
    return counts;
  }
};

TEST_F(ImageBlocksTest, AChunkEndsBeforeAnImageOrTakesItWhole) {
  MakeFor(100, 32);
  AddImage(25, 30);
  EXPECT_THAT(Counts(Step()), ElementsAre(25));
  EXPECT_THAT(Counts(Step()), ElementsAre(32));
  EXPECT_THAT(Counts(Step()), ElementsAre(18));
}

TEST_F(ImageBlocksTest, AnImageOfAnotherKindIsSplit) {
  MakeFor(100, 32);
  Sequence* const s = AddImage(25, 30);
  auto image = std::make_shared<Image>(*s->images->places()[0].image);
  image->bidirectional = false;
  s->images = PromptImages::Of({{25, image}});
  EXPECT_THAT(Counts(Step()), ElementsAre(32));
}

TEST_F(ImageBlocksTest, AnImageWaitsForTheRoomOfAStep) {
  MakeFor(100, 24);
  Sequence* const text = Add(30);
  Sequence* const image = AddImage(0, 3);
  Sequence* const later = Add(5);
  EXPECT_THAT(Counts(Step()), ElementsAre(24));
  EXPECT_THAT(Counts(Step()), ElementsAre(6));  // 18 rows are left
  EXPECT_EQ(image->state, Sequence::State::kWaiting);
  EXPECT_EQ(later->state, Sequence::State::kWaiting);  // it does not pass
  EXPECT_THAT(Counts(Step()), ElementsAre(1, 23));
  EXPECT_EQ(text->generated(), 2);
  EXPECT_THAT(Counts(Step()), ElementsAre(1, 1, 5));
}

TEST_F(ImageBlocksTest, RunningSequencesLeaveRoomForAnImage) {
  MakeFor(100, kRows + 3);
  for (int i = 0; i < 6; ++i) Add(2);
  for (int i = 0; i < 5; ++i) Step();
  EXPECT_EQ(scheduler_->running(), 4);  // one of them could have an image
  scheduler_->Remove(&sequences_[0]);
  for (int i = 0; i < 2; ++i) scheduler_->Remove(&sequences_[4 + i]);
  Sequence* const image = AddImage(0, 1);
  Step();
  EXPECT_EQ(image->computed, kRows);
}

TEST_F(ImageBlocksTest, WhatIsLeftOfAnImageIsOneChunkToo) {
  MakeFor(100, 32);
  Sequence* const first = AddImage(6, 10, 1000);
  while (first->generated() == 0) Step();
  scheduler_->Remove(first);
  std::vector<int32_t> pages;  // drops all pages but the first
  ASSERT_TRUE(pages_->Allocate(99, &pages));
  pages_->Release(&pages);
  Add(31);  // leaves one row in the first step
  Sequence* const second = AddImage(6, 10, 1000);
  EXPECT_THAT(Counts(Step()), ElementsAre(31));
  EXPECT_THAT(Counts(Step()), ElementsAre(1, 20));
  EXPECT_EQ(second->cached_tokens, 16);
}

TEST_F(ImageBlocksTest, APreemptedSequenceComputesItsImageAgain) {
  MakeFor(100, 32);
  Sequence* const s = AddImage(6, 10);
  s->use_prefix_cache = false;
  Step();
  Step();
  scheduler_->PreemptAll();
  EXPECT_EQ(s->computed, 0);
  Step();
  EXPECT_GE(s->computed, 6 + kRows);
}

}  // namespace
}  // namespace dorad::engine
