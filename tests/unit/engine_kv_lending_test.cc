#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "server/base/metrics.h"
#include "server/engine/kv_lending.h"

namespace dorad::engine {
namespace {

using std::chrono::seconds;

constexpr int64_t kChunkPages = 4;

class CountedChunks final : public KvChunks {
 public:
  int64_t pages() const override { return kChunkPages; }
  int64_t lead() const override { return 0; }
  int64_t bytes() const override { return 100; }
  void Unmap(int32_t) override { ++lent; }
  absl::Status Map(int32_t) override {
    ++questions;
    if (fail) return absl::ResourceExhaustedError("as told");
    --lent;
    return absl::OkStatus();
  }

  bool fail = false;
  int lent = 0;
  int questions = 0;
};

class KvLendingTest : public ::testing::Test {
 protected:
  // The pages of all chunks hold prefixes alone.
  void FillWithPrefixes() {
    std::vector<int32_t> held;
    ASSERT_TRUE(pages_.Allocate(pages_.total(), &held));
    for (const int32_t page : held) {
      const std::vector<TokenId> tokens(kKvPageTokens, page);
      pages_.Register(PrefixRoot("", ""), tokens, page);
    }
    pages_.Release(&held);
    ASSERT_EQ(pages_.cached(), pages_.total());
  }

  Metrics metrics_{Metrics::Info()};
  KvPages pages_{5 * kChunkPages, {kChunkPages, 0}};
  CountedChunks chunks_;
  KvLending lending_{&pages_, &chunks_, /*floor=*/kChunkPages, absl::Seconds(3), &metrics_};
  const Instant start_ = SteadyNow();
};

TEST_F(KvLendingTest, WhatWasLentIsLeftAloneForAFewSeconds) {
  EXPECT_EQ(lending_.Lend(250, start_), 300);
  lending_.TakeBack(pages_.total(), start_);
  lending_.TakeBack(pages_.total(), start_ + seconds(1));
  EXPECT_EQ(chunks_.lent, 3);
  EXPECT_EQ(lending_.Lend(1, start_ + seconds(2)), 100);
  lending_.TakeBack(pages_.total(), start_ + seconds(4));
  EXPECT_EQ(chunks_.lent, 4) << "the later loan counts";
  lending_.TakeBack(pages_.total(), start_ + seconds(6));
  EXPECT_EQ(chunks_.lent, 0);
}

TEST_F(KvLendingTest, AWarmPrefixCacheIsNoShortage) {
  FillWithPrefixes();
  EXPECT_EQ(lending_.Lend(100, start_), 100);
  EXPECT_EQ(pages_.free(), 0);
  const int64_t left = pages_.cached();
  lending_.TakeBack(left, start_ + seconds(10));
  EXPECT_EQ(chunks_.lent, 1);
  lending_.TakeBack(left + 1, start_ + seconds(10));
  EXPECT_EQ(chunks_.lent, 0);
}

TEST_F(KvLendingTest, OnlySoManyChunksComeBackAsAreWanted) {
  EXPECT_EQ(lending_.Lend(400, start_), 400);
  lending_.TakeBack(2 * kChunkPages + 1, start_ + seconds(10));
  EXPECT_EQ(chunks_.lent, 2);
}

TEST_F(KvLendingTest, AfterARefusalItDoesNotAskForAWhile) {
  EXPECT_EQ(lending_.Lend(100, start_), 100);
  chunks_.fail = true;
  const Instant later = start_ + seconds(10);
  lending_.TakeBack(pages_.total(), later);
  lending_.TakeBack(pages_.total(), later + std::chrono::milliseconds(100));
  EXPECT_EQ(chunks_.questions, 1);
  chunks_.fail = false;
  lending_.TakeBack(pages_.total(), later + seconds(1));
  EXPECT_EQ(chunks_.lent, 0);
}

}  // namespace
}  // namespace dorad::engine
