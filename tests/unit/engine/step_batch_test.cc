#include "server/engine/step_batch.h"

#include "tests/unit/support/test.h"

namespace dorad::engine {
namespace {

class StepBatchTest : public ::testing::Test {
 protected:
  StepBatchTest() {
    for (int i = 0; i < 2; ++i) {
      adapters_.push_back(
          std::make_unique<adapter::LoadedAdapter>("a", i + 1, adapter::AdapterSummary()));
    }
  }

  // A sequence of `tokens` rows; adapter -1 is the base.
  StepSequence Sequence(int tokens, int adapter) {
    StepSequence sequence;
    sequence.tokens = absl::MakeConstSpan(tokens_).subspan(0, tokens);
    if (adapter >= 0) sequence.adapter = adapters_[adapter].get();
    return sequence;
  }

  std::vector<TokenId> tokens_ = std::vector<TokenId>(8);
  std::vector<std::unique_ptr<adapter::LoadedAdapter>> adapters_;
  const SampleWant sample_{};
  const ScoreWant score_{};
};

TEST_F(StepBatchTest, PutsRowsOfOneAdapterNextToEachOtherAndKeepsArrivalWithin) {
  const std::vector<StepSequence> sequences = {Sequence(2, 0), Sequence(1, -1), Sequence(3, 0),
                                               Sequence(1, -1)};
  const StepBatch batch(sequences);
  EXPECT_EQ(batch.rows, 7);
  EXPECT_THAT(batch.order, ElementsAre(1, 3, 0, 2));
  EXPECT_THAT(batch.row_begin, ElementsAre(0, 1, 2, 4));
  ASSERT_EQ(batch.adapters.size(), 2);
  EXPECT_EQ(batch.adapters[0].adapter, nullptr);
  EXPECT_EQ(batch.adapters[0].end, 2);
  EXPECT_EQ(batch.adapters[1].adapter, adapters_[0].get());
  EXPECT_EQ(batch.adapters[1].begin, 2);
  EXPECT_EQ(batch.adapters[1].end, 7);
}

TEST_F(StepBatchTest, SequencesWithTheSameFirstPagesAreNeighbours) {
  const std::vector<std::vector<int32_t>> pages = {{7, 3, 5}, {2, 9}, {7, 1}, {7, 3, 4}, {2, 9, 6}};
  std::vector<StepSequence> sequences;
  for (size_t i = 0; i < pages.size(); ++i) {
    sequences.push_back(Sequence(1, i == 2 ? 0 : -1));
    sequences.back().pages = pages[i];
  }
  EXPECT_THAT(StepBatch(sequences).order, ElementsAre(1, 4, 3, 0, 2));
}

TEST_F(StepBatchTest, EveryAdapterHasOneRange) {
  std::vector<StepSequence> sequences;
  for (int i = 0; i < 9; ++i) sequences.push_back(Sequence(1, i % 3 - 1));
  const StepBatch batch(sequences);
  ASSERT_EQ(batch.adapters.size(), 3);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(batch.adapters[i].begin, static_cast<int64_t>(3 * i));
    EXPECT_EQ(batch.adapters[i].end, static_cast<int64_t>(3 * i + 3));
  }
}

TEST_F(StepBatchTest, WantsTheLastRowOfASampleAndEveryRowOfAScore) {
  std::vector<StepSequence> sequences = {Sequence(3, -1), Sequence(2, -1), Sequence(2, -1)};
  sequences[0].samples = {&sample_, 1};
  sequences[1].score = &score_;
  const StepBatch batch(sequences);
  ASSERT_EQ(batch.samples.size(), 1);
  EXPECT_EQ(batch.samples[0].row, 2);
  EXPECT_EQ(batch.samples[0].sequence, 0);
  EXPECT_EQ(batch.samples[0].want, 0);
  ASSERT_EQ(batch.scores.size(), 2);
  EXPECT_EQ(batch.scores[0].row, 3);
  EXPECT_EQ(batch.scores[1].row, 4);
  EXPECT_EQ(batch.scores[1].sequence, 1);
  EXPECT_EQ(batch.scores[1].want, 1);
}

TEST_F(StepBatchTest, SeveralSamplesAreThoseOfTheLastRows) {
  const std::vector<SampleWant> wants(3);
  std::vector<StepSequence> sequences = {Sequence(1, -1), Sequence(5, -1)};
  sequences[1].samples = wants;
  const StepBatch batch(sequences);
  ASSERT_EQ(batch.samples.size(), 3);
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(batch.samples[i].row, 3 + i);
    EXPECT_EQ(batch.samples[i].want, i);
  }
}

TEST_F(StepBatchTest, ASequenceWithoutRowsSamplesFromAnothersLastOne) {
  std::vector<StepSequence> sequences = {Sequence(2, 1), Sequence(0, 1), Sequence(1, 0),
                                         Sequence(0, 1)};
  for (StepSequence& s : sequences) s.samples = {&sample_, 1};
  sequences[1].row_of = sequences[3].row_of = 0;
  const StepBatch batch(sequences);
  EXPECT_EQ(batch.rows, 3);
  ASSERT_EQ(batch.samples.size(), 4);
  for (const WantedRow& wanted : batch.samples) {
    const int64_t begin = adapters_[0].get() < adapters_[1].get() ? 1 : 0;  // of adapter 1's rows
    const bool is_of_other = wanted.sequence == 2;
    EXPECT_EQ(wanted.row, is_of_other ? (begin == 1 ? 0 : 2) : begin + 1);
  }
  for (const StepBatch::AdapterRows& range : batch.adapters) EXPECT_LT(range.begin, range.end);
}

TEST_F(StepBatchTest, NoSequencesAreNoRows) {
  const StepBatch batch({});
  EXPECT_EQ(batch.rows, 0);
  EXPECT_TRUE(batch.adapters.empty());
}

}  // namespace
}  // namespace dorad::engine
