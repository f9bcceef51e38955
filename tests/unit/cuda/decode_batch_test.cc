#include "server/backends/cuda/decode_batch.h"

#include "tests/unit/cuda/small_model.h"
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

TEST_F(DecodeBatchTest, TakesAFewGuessesOfASequence) {
  const std::vector<engine::TokenId> tokens(kMostRowsApart + 1, 5);
  const std::vector<engine::SampleWant> samples(tokens.size());
  std::vector<StepSequence> sequences(16, Decoding());
  const auto set_rows = [&](size_t sequence, size_t rows) {
    sequences[sequence].tokens = absl::MakeConstSpan(tokens).first(rows);
    sequences[sequence].samples = absl::MakeConstSpan(samples).first(rows);
  };
  set_rows(0, kMostRowsApart);
  EXPECT_TRUE(DecodeBatch::Takes(sequences));
  set_rows(1, kMostRowsApart + 1);
  EXPECT_FALSE(DecodeBatch::Takes(sequences));
  for (size_t i = 0; i < 16; ++i) set_rows(i, 16);
  EXPECT_TRUE(DecodeBatch::Takes(sequences));
  sequences.push_back(Decoding());
  EXPECT_FALSE(DecodeBatch::Takes(sequences)) << "257 rows";
}

TEST_F(DecodeBatchTest, LeavesPrefillAndScoresToOtherBatches) {
  std::vector<StepSequence> sequences = {Decoding(), Decoding()};
  sequences[1].tokens = tokens_;
  EXPECT_FALSE(DecodeBatch::Takes(sequences));
  sequences[1] = Decoding();
  sequences[1].tokens = {};
  EXPECT_FALSE(DecodeBatch::Takes(sequences)) << "it samples from another one's row";
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

// Two groups: one that sees all, one with a window of 40 positions.
TEST_F(DecodeBatchTest, ListsOfPagesBeginWhereKernelsBeginToRead) {
  model::ModelConfig config = SmallModel(2);
  config.layers[1].attention.window = 40;
  const RowKinds kinds(config);
  ASSERT_EQ(kinds.windows, (std::vector<int64_t>{0, 40}));
  std::vector<int32_t> pages;  // of 13 blocks
  for (int32_t block = 0; block < 13; ++block) {
    pages.push_back(100 + block);
    pages.push_back(block < 10 ? -1 : 200 + block);
  }
  StepSequence sequence = Decoding();
  sequence.position = 203;  // the window begins in block 10
  sequence.pages = pages;
  constexpr int64_t kStride = 7;
  std::vector<int32_t> begins(2 * kStride, -99), list(64, -99);
  int32_t next = 3;
  WritePages(sequence, kinds, list.data(), &next, begins.data() + 2, kStride, nullptr, nullptr);
  EXPECT_EQ(next, 3 + PlacesOf(sequence, kinds));
  EXPECT_LE(PlacesOf(sequence, kinds), kinds.PlacesOfRow(13));
  for (int32_t block = 0; block < 13; ++block) {
    EXPECT_EQ(list[begins[2] + block], kinds.kv.Place(100 + block + kSparePages));
  }
  const int32_t windowed = begins[2 + kStride];
  EXPECT_EQ(windowed, 3 + 13 - 8) << "a list begins at a multiple of 64 positions";
  for (int32_t block = 8; block < 13; ++block) {
    EXPECT_EQ(list[windowed + block], kinds.kv.Place(block < 10 ? 0 : 200 + block + kSparePages));
  }
  // The most that any row needs.
  for (sequence.position = 0; sequence.position < 208; ++sequence.position) {
    EXPECT_LE(PlacesOf(sequence, kinds), kinds.PlacesOfRow(13)) << sequence.position;
  }
}

}  // namespace
}  // namespace dorad::cuda
