#include "server/backends/cuda/batch.h"

#include "tests/unit/support/test.h"

namespace dorad::cuda {
namespace {

// Sequences of a step, each with its rows' first position and its pages, of two groups of layers.
class SharesReadsTest : public ::testing::Test {
 protected:
  void Add(int64_t position, int64_t rows, int32_t common_blocks, int32_t own_blocks) {
    std::vector<int32_t>& pages = pages_.emplace_back();
    for (int32_t i = 0; i < 2 * common_blocks; ++i) pages.push_back(i);
    for (int32_t i = 0; i < 2 * own_blocks; ++i) pages.push_back(next_++);
    engine::StepSequence sequence;
    sequence.position = position;
    sequence.tokens = absl::MakeConstSpan(tokens_).subspan(0, rows);
    sequences_.push_back(sequence);
  }
  bool Shares(int64_t least_positions) {
    for (size_t i = 0; i < pages_.size(); ++i) sequences_[i].pages = pages_[i];
    return SharesReads(engine::StepBatch(sequences_), sequences_, /*groups=*/2, least_positions);
  }

 private:
  const std::vector<engine::TokenId> tokens_ = std::vector<engine::TokenId>(40);
  int32_t next_ = 1000;
  std::vector<std::vector<int32_t>> pages_;
  std::vector<engine::StepSequence> sequences_;
};

TEST_F(SharesReadsTest, OfRowsThatHaveAnEighthOfTheirPositionsInCommon) {
  for (int i = 0; i < 4; ++i) Add(639, 1, 8, 32);  // 3 · 128 of 4 · 640
  EXPECT_TRUE(Shares(2560));
  Add(1280, 1, 0, 81);
  EXPECT_FALSE(Shares(2560));
}

TEST_F(SharesReadsTest, NotBelowTheLeastPositions) {
  for (int i = 0; i < 4; ++i) Add(639, 1, 40, 0);
  EXPECT_TRUE(Shares(2560));
  EXPECT_FALSE(Shares(2561));
}

TEST_F(SharesReadsTest, TheRowsOfADraftHaveTheirSequenceInCommon) {
  Add(1000, 3, 0, 63);
  EXPECT_TRUE(Shares(3000));
}

TEST_F(SharesReadsTest, RowsOfAPromptDoNotCount) {
  Add(1000, 40, 0, 65);
  EXPECT_FALSE(Shares(1));
}

}  // namespace
}  // namespace dorad::cuda
