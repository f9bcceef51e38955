// Memory of the KV cache that others have for a time: what runs does not notice.

#include "tests/unit/support/engine_fixture.h"

namespace dorad::engine {
namespace {

constexpr int64_t kChunkPages = 8;

class BallooningTest : public EngineTest {
 protected:
  // Sequences of full length need 32 pages.
  void StartInChunks(int64_t pages, int64_t min_pages = 0) {
    EngineOptions options = DefaultOptions();
    options.kv_min_pages = min_pages;
    options.kv_shrink_hold = absl::ZeroDuration();
    Start(options, pages, /*max_steps_in_flight=*/2, kChunkPages);
  }

  int64_t Shrink(int64_t chunks) {
    int64_t released = 0;
    absl::Notification done;
    engine_->ShrinkKv(chunks * FakeModelRunner::kChunkBytes, [&](int64_t bytes) {
      released = bytes;
      done.Notify();
    });
    done.WaitForNotification();
    EXPECT_EQ(released % FakeModelRunner::kChunkBytes, 0);
    return released / FakeModelRunner::kChunkBytes;
  }

  void SleepKv(bool keep) {
    absl::Notification done;
    engine_->Sleep({.kv = true, .keep_kv = keep}, [&](auto) { done.Notify(); });
    done.WaitForNotification();
  }
  void Wake() {
    absl::Notification done;
    engine_->Wake(/*kv=*/true, /*go_on=*/true, [&](auto) { done.Notify(); });
    done.WaitForNotification();
  }
};

TEST_F(BallooningTest, UnusedChunksGoDownToWhatTheLongestSequenceNeeds) {
  StartInChunks(63);
  EXPECT_EQ(engine_->stats().kv_shrinkable_bytes, 3 * FakeModelRunner::kChunkBytes);
  EXPECT_EQ(Shrink(1), 1);
  EXPECT_EQ(Shrink(100), 2);
  EXPECT_EQ(Shrink(1), 0);
  EXPECT_EQ(runner_->chunks_released, 3);
  const EngineStats stats = engine_->stats();
  EXPECT_EQ(stats.kv_pages_total, 63);
  EXPECT_EQ(stats.kv_pages_released, 24);
  EXPECT_EQ(stats.kv_shrinkable_bytes, 0);
  EXPECT_EQ(stats.kv_pages_used, 0);
}

TEST_F(BallooningTest, AnOperatorsMinimumStays) {
  StartInChunks(63, /*min_pages=*/50);
  EXPECT_EQ(Shrink(100), 1);
}

TEST_F(BallooningTest, WithoutChunksNothingIsReleased) {
  Start(DefaultOptions(), 63);
  EXPECT_EQ(Shrink(1), 0);
}

TEST_F(BallooningTest, ALongRequestRunsInWhatIsLeft) {
  StartInChunks(63);
  runner_->fail_map = true;
  EXPECT_EQ(Shrink(100), 3);
  GenerateInput input = Input(Prompt(20), 480);
  const SampleText expected = Expected(input, 0, 512);
  const Outcome outcome = Wait(*Submit(std::move(input)));
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.samples.at(0).tokens, expected.tokens);
  EXPECT_EQ(runner_->chunks_released, 3);
}

TEST_F(BallooningTest, ChunksComeBackWhenRequestsAreShortOfPages) {
  StartInChunks(127);
  EXPECT_EQ(Shrink(100), 11);
  // All of them run at a time, however slowly they are submitted.
  absl::Notification go;
  runner_->on_step = [&] {
    go.WaitForNotification();
    return absl::OkStatus();
  };
  std::vector<std::pair<SampleText, std::shared_ptr<TokenStream>>> streams;
  for (int i = 0; i < 8; ++i) {
    GenerateInput input = Input(Prompt(100, 10 * i), 100);
    SampleText expected = Expected(input, 0, 512);
    streams.emplace_back(std::move(expected), Submit(std::move(input)));
  }
  go.Notify();
  for (auto& [expected, stream] : streams) {
    EXPECT_EQ(Wait(*stream).samples.at(0).tokens, expected.tokens);
  }
  EXPECT_LT(runner_->chunks_released, 11);
}

TEST_F(BallooningTest, WhoSleepsIsNotShortOfPages) {
  StartInChunks(127);
  EXPECT_EQ(Shrink(100), 11);
  runner_->fail_map = true;
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (int i = 0; i < 8; ++i) streams.push_back(Submit(Input(Prompt(100, 10 * i), 400)));
  const absl::Time limit = absl::Now() + absl::Seconds(10);
  while (!engine_->stats().kv_short && absl::Now() < limit) absl::SleepFor(absl::Microseconds(10));
  EXPECT_TRUE(engine_->stats().kv_short);
  SleepKv(/*keep=*/true);
  EXPECT_FALSE(engine_->stats().kv_short) << "nobody takes a step that pages would help";
  Wake();
  for (const auto& stream : streams) EXPECT_TRUE(Wait(*stream).status.ok());
}

TEST_F(BallooningTest, WhileTheCacheSleepsThereIsNothingToLend) {
  StartInChunks(63);
  EXPECT_EQ(Shrink(1), 1);
  SleepKv(/*keep=*/false);
  EXPECT_EQ(engine_->stats().kv_shrinkable_bytes, 0);
  EXPECT_EQ(Shrink(1), 0);
  Wake();
  EXPECT_EQ(engine_->stats().kv_pages_released, 8);
  EXPECT_EQ(Shrink(100), 2);
}

TEST_F(BallooningTest, RandomShrinksChangeNoResult) {
  for (uint32_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % n); };
    StartInChunks(71);
    std::vector<std::pair<SampleText, std::shared_ptr<TokenStream>>> streams;
    for (int round = 0; round < 60; ++round) {
      GenerateInput input = Input(Prompt(3 + below(60), below(3)), 1 + below(60));
      SampleText expected = Expected(input, 0, 512);
      streams.emplace_back(std::move(expected), Submit(std::move(input)));
      if (below(2) == 0) Shrink(below(5));
      runner_->fail_map = below(3) == 0;
      if (below(6) > 0) continue;
      SleepKv(/*keep=*/below(2) == 0);
      Shrink(below(3));
      Wake();
    }
    runner_->fail_map = false;
    for (auto& [expected, stream] : streams) {
      const Outcome outcome = Wait(*stream);
      ASSERT_TRUE(outcome.status.ok()) << outcome.status;
      EXPECT_EQ(outcome.samples.at(0).tokens, expected.tokens);
      EXPECT_EQ(outcome.samples.at(0).logprobs, expected.logprobs);
    }
    ExpectEverythingBack();
  }
}

}  // namespace
}  // namespace dorad::engine
