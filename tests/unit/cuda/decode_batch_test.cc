#include "server/backends/cuda/decode_batch.h"

#include "tests/unit/support/test.h"

namespace dorad::cuda {
namespace {

using engine::StepSequence;

class DecodeBatchTest : public ::testing::Test {
 protected:
  StepSequence Decoding() const {
    StepSequence sequence;
    sequence.tokens = absl::MakeConstSpan(tokens_).subspan(0, 1);
    sequence.samples = {&sample_, 1};
    return sequence;
  }

  const std::vector<engine::TokenId> tokens_ = {1, 2};
  const engine::SampleWant sample_{};
  const engine::ScoreWant score_{};
};

TEST_F(DecodeBatchTest, TheSizeIsTheSmallestThatHoldsTheRows) {
  for (int rows = 1; rows <= 256; ++rows) {
    const int size = DecodeBatch::SizeFor(rows);
    EXPECT_GE(size, rows);
    for (const int other : DecodeBatch::kSizes) EXPECT_TRUE(other < rows || other >= size);
  }
}

TEST_F(DecodeBatchTest, TakesStepsInWhichEverySequenceDecodesOneToken) {
  std::vector<StepSequence> sequences(256, Decoding());
  EXPECT_TRUE(DecodeBatch::Takes(sequences));
  sequences.push_back(Decoding());
  EXPECT_FALSE(DecodeBatch::Takes(sequences));
}

TEST_F(DecodeBatchTest, LeavesPrefillAndScoresToOtherBatches) {
  std::vector<StepSequence> sequences = {Decoding(), Decoding()};
  sequences[1].tokens = tokens_;
  EXPECT_FALSE(DecodeBatch::Takes(sequences));
  sequences[1] = Decoding();
  sequences[1].samples = {};
  sequences[1].score = &score_;
  EXPECT_FALSE(DecodeBatch::Takes(sequences));
}

TEST_F(DecodeBatchTest, ATokenThatIsNotThereYetIsNamedByWhereItWillBe) {
  const SampledTokens previous{nullptr, {4, 0, 7}};
  StepSequence sequence = Decoding();
  EXPECT_EQ(FedToken(sequence, previous), 1);
  for (int32_t i = 0; i < 3; ++i) {
    sequence.follows = i;
    EXPECT_EQ(FedToken(sequence, previous), -1 - previous.index[i]);
  }
}

}  // namespace
}  // namespace dorad::cuda
