#include "server/engine/kv_balloon.h"

#include "server/platform/metrics/metrics.h"
#include "tests/unit/support/test.h"

namespace dorad::engine {
namespace {

using std::chrono::seconds;

constexpr int64_t kChunkPages = 4;

class CountedChunks final : public KvChunks {
 public:
  int64_t pages() const override { return kChunkPages; }
  int64_t lead() const override { return 0; }
  int64_t bytes() const override { return 100; }
  void Unmap(int32_t) override { ++released; }
  absl::Status Map(int32_t) override {
    ++questions;
    if (fail) return absl::ResourceExhaustedError("injected");
    --released;
    return absl::OkStatus();
  }

  bool fail = false;
  int released = 0;
  int questions = 0;
};

class KvBalloonTest : public ::testing::Test {
 protected:
  // The pages of all chunks hold prefixes alone.
  void FillWithPrefixes() {
    std::vector<int32_t> held;
    ASSERT_TRUE(pages_.Allocate(pages_.total(), &held));
    for (const int32_t page : held) {
      const std::vector<TokenId> tokens(kKvPageTokens, page);
      pages_.Register(PrefixRoot("", ""), tokens, {page});
    }
    pages_.Release(&held);
    ASSERT_EQ(pages_.cached(), pages_.total());
  }

  Metrics metrics_{Metrics::Info()};
  KvPages pages_{5 * kChunkPages, {kChunkPages, 0}};
  CountedChunks chunks_;
  KvBalloon balloon_{&pages_, &chunks_, /*floor=*/kChunkPages, absl::Seconds(3), &metrics_};
  const Instant start_ = SteadyNow();
};

TEST_F(KvBalloonTest, WhatWasLentIsLeftAloneForAFewSeconds) {
  EXPECT_EQ(balloon_.Shrink(250, start_), 300);
  balloon_.Grow(pages_.total(), start_);
  balloon_.Grow(pages_.total(), start_ + seconds(1));
  EXPECT_EQ(chunks_.released, 3);
  EXPECT_EQ(balloon_.Shrink(1, start_ + seconds(2)), 100);
  balloon_.Grow(pages_.total(), start_ + seconds(4));
  EXPECT_EQ(chunks_.released, 4) << "the later shrink counts";
  balloon_.Grow(pages_.total(), start_ + seconds(6));
  EXPECT_EQ(chunks_.released, 0);
}

TEST_F(KvBalloonTest, AWarmPrefixCacheIsNoShortage) {
  FillWithPrefixes();
  EXPECT_EQ(balloon_.Shrink(100, start_), 100);
  EXPECT_EQ(pages_.free(), 0);
  const int64_t left = pages_.cached();
  balloon_.Grow(left, start_ + seconds(10));
  EXPECT_EQ(chunks_.released, 1);
  balloon_.Grow(left + 1, start_ + seconds(10));
  EXPECT_EQ(chunks_.released, 0);
}

TEST_F(KvBalloonTest, OnlySoManyChunksComeBackAsAreWanted) {
  EXPECT_EQ(balloon_.Shrink(400, start_), 400);
  balloon_.Grow(2 * kChunkPages + 1, start_ + seconds(10));
  EXPECT_EQ(chunks_.released, 2);
}

TEST_F(KvBalloonTest, AfterARefusalItDoesNotAskForAWhile) {
  EXPECT_EQ(balloon_.Shrink(100, start_), 100);
  chunks_.fail = true;
  const Instant later = start_ + seconds(10);
  balloon_.Grow(pages_.total(), later);
  balloon_.Grow(pages_.total(), later + std::chrono::milliseconds(100));
  EXPECT_EQ(chunks_.questions, 1);
  chunks_.fail = false;
  balloon_.Grow(pages_.total(), later + seconds(1));
  EXPECT_EQ(chunks_.released, 0);
}

}  // namespace
}  // namespace dorad::engine
