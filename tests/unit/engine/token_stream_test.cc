#include "server/engine/token_stream.h"

#include "tests/unit/support/test.h"

namespace dorad::engine {
namespace {

SampleDelta Delta(int32_t sample, TokenId token, uint32_t position, bool finish = false) {
  SampleDelta delta;
  delta.sample_index = sample;
  delta.token_ids = {token};
  delta.spans = {{"a", 1, "digest", position, position + 1}};
  if (finish) delta.finish.reason = FinishReason::kStop;
  return delta;
}

TEST(TokenStream, MergesWhatASlowReaderHasNotTaken) {
  TokenStream stream(/*final_only=*/false);
  stream.Push(Delta(0, 10, 0));
  stream.Push(Delta(1, 20, 0));
  stream.Push(Delta(0, 11, 1));
  std::optional<SampleDelta> delta = stream.Take();
  ASSERT_TRUE(delta);
  EXPECT_EQ(delta->token_ids, (std::vector<TokenId>{10, 11}));
  ASSERT_EQ(delta->spans.size(), 1u);
  EXPECT_EQ(delta->spans[0].end, 2u);
  delta = stream.Take();
  ASSERT_TRUE(delta);
  EXPECT_EQ(delta->sample_index, 1);
  EXPECT_FALSE(stream.Take());
}

TEST(TokenStream, KeepsSpansOfDifferentVersionsApart) {
  TokenStream stream(/*final_only=*/false);
  stream.Push(Delta(0, 10, 0));
  SampleDelta later = Delta(0, 11, 1);
  later.spans[0].version = 2;
  stream.Push(later);
  const std::optional<SampleDelta> delta = stream.Take();
  ASSERT_TRUE(delta);
  EXPECT_EQ(delta->spans.size(), 2u);
}

TEST(TokenStream, FinalOnlyHoldsBackUntilTheSampleHasFinished) {
  TokenStream stream(/*final_only=*/true);
  int wakes = 0;
  stream.SetWaker([&] { ++wakes; });
  stream.Push(Delta(0, 10, 0));
  EXPECT_FALSE(stream.Take());
  EXPECT_EQ(wakes, 0);
  stream.Push(Delta(0, 11, 1, /*finish=*/true));
  EXPECT_EQ(wakes, 1);
  const std::optional<SampleDelta> delta = stream.Take();
  ASSERT_TRUE(delta);
  EXPECT_EQ(delta->token_ids.size(), 2u);
  EXPECT_TRUE(delta->finished());
}

TEST(TokenStream, EndsOnlyAfterEverythingIsTaken) {
  TokenStream stream(/*final_only=*/false);
  stream.Push(Delta(0, 10, 0, /*finish=*/true));
  stream.Close(absl::OkStatus());
  EXPECT_FALSE(stream.Ended());
  ASSERT_TRUE(stream.Take());
  ASSERT_TRUE(stream.Ended());
  EXPECT_TRUE(stream.Ended()->ok());
}

TEST(TokenStream, AFailedFinalOnlyStreamEndsDespiteHeldBackTokens) {
  TokenStream stream(/*final_only=*/true);
  stream.Push(Delta(0, 10, 0));
  stream.Close(absl::CancelledError("gone"));
  ASSERT_TRUE(stream.Ended());
  EXPECT_EQ(stream.Ended()->code(), absl::StatusCode::kCancelled);
}

TEST(TokenStream, DoesNotWakeAfterTheWakerIsRemoved) {
  TokenStream stream(/*final_only=*/false);
  int wakes = 0;
  stream.SetWaker([&] { ++wakes; });
  stream.SetWaker(nullptr);
  stream.Push(Delta(0, 10, 0));
  stream.Close(absl::OkStatus());
  EXPECT_EQ(wakes, 0);
}

}  // namespace
}  // namespace dorad::engine
