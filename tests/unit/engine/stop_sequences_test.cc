// Stop sequences: where they end a sample, and where they do not.

#include "tests/unit/support/engine_fixture.h"

namespace dorad::engine {
namespace {

using Ids = std::vector<TokenId>;

class StopSequencesTest : public EngineTest {
 protected:
  static constexpr int64_t kTokens = 24;

  StopSequencesTest() { free_run_ = Expected(Plain(), 0, 512).tokens; }

  GenerateInput Plain() { return Input(Prompt(4), kTokens); }

  GenerateInput With(std::vector<Ids> sequences) {
    GenerateInput input = Plain();
    input.stop.stop_sequences = std::move(sequences);
    return input;
  }

  // Tokens [begin, end) of the run without stop sequences.
  Ids Part(int64_t begin, int64_t end) const {
    return Ids(free_run_.begin() + begin, free_run_.begin() + end);
  }

  SampleText Run(GenerateInput input) { return Wait(*Submit(std::move(input))).samples.at(0); }

  void ExpectStopped(const SampleText& sample, int64_t tokens, int32_t sequence) const {
    EXPECT_EQ(sample.tokens, Part(0, tokens));
    EXPECT_EQ(sample.logprobs.size(), static_cast<size_t>(tokens));
    EXPECT_EQ(sample.finish.reason, FinishReason::kStop);
    EXPECT_EQ(sample.finish.stop_sequence, sequence);
    EXPECT_EQ(sample.finish.stop_token_id, -1);
    EXPECT_EQ(sample.finish.usage.generated_tokens, static_cast<uint32_t>(tokens));
  }

  void ExpectNotStopped(const SampleText& sample) const {
    EXPECT_EQ(sample.tokens, free_run_);
    EXPECT_EQ(sample.finish.reason, FinishReason::kLength);
    EXPECT_EQ(sample.finish.stop_sequence, -1);
  }

  Ids free_run_;
};

TEST_F(StopSequencesTest, ASequenceEndsTheSampleAndItsTokensStay) {
  for (const int in_flight : {1, 2}) {
    Start(DefaultOptions(), 64, in_flight);
    ExpectStopped(Run(With({{1, 2, 3}, Part(4, 7)})), 7, 1);
    ExpectEverythingBack();
  }
}

TEST_F(StopSequencesTest, TheFirstOfSeveralThatMatchAtOnceIsNamed) {
  Start(DefaultOptions(), 64);
  ExpectStopped(Run(With({Part(0, 9), Part(5, 9), Part(8, 9)})), 9, 0);
  ExpectStopped(Run(With({Part(8, 9), Part(5, 9)})), 9, 0);
}

TEST_F(StopSequencesTest, TheSequenceThatIsCompleteFirstEndsTheSample) {
  Start(DefaultOptions(), 64);
  // The second one lies within the first one.
  ExpectStopped(Run(With({Part(3, 9), Part(4, 6)})), 6, 1);
}

TEST_F(StopSequencesTest, ABrokenBeginDoesNotHideALaterMatch) {
  Start(DefaultOptions(), 64);
  Ids nearly = Part(3, 6);
  nearly.back() = (nearly.back() + 1) % kFakeVocab;
  ExpectStopped(Run(With({nearly, Part(4, 8)})), 8, 1);
}

TEST_F(StopSequencesTest, TokensOfThePromptCompleteNoSequence) {
  Start(DefaultOptions(), 64);
  Ids across = Prompt(4);
  across.push_back(free_run_[0]);
  ExpectNotStopped(Run(With({across, Prompt(4)})));
}

TEST_F(StopSequencesTest, ASequenceLongerThanTheAnswerEndsNothing) {
  Start(DefaultOptions(), 64);
  Ids longer = free_run_;
  longer.push_back(5);
  ExpectNotStopped(Run(With({longer})));
}

TEST_F(StopSequencesTest, TheLastPossibleTokenMayCompleteASequence) {
  Start(DefaultOptions(), 64);
  ExpectStopped(Run(With({free_run_})), kTokens, 0);
}

TEST_F(StopSequencesTest, NoneOfTheFirstMinTokensCompletesASequence) {
  Start(DefaultOptions(), 64);
  for (const int64_t min_tokens : {6, 7, 8}) {
    GenerateInput input = With({Part(5, 7)});
    input.stop.min_tokens = min_tokens;
    const SampleText sample = Run(std::move(input));
    if (min_tokens < 7) {
      ExpectStopped(sample, 7, 0);
    } else {
      ExpectNotStopped(sample);
    }
  }
  // It may begin among them.
  GenerateInput input = With({Part(2, 9)});
  input.stop.min_tokens = 8;
  ExpectStopped(Run(std::move(input)), 9, 0);
}

TEST_F(StopSequencesTest, ASequenceOfOneTokenEndsWhereAStopTokenWould) {
  Start(DefaultOptions(), 64);
  for (const int64_t min_tokens : {0, 4, 5}) {
    GenerateInput as_sequence = With({Part(5, 6)});
    as_sequence.stop.min_tokens = min_tokens;
    GenerateInput as_token = Plain();
    as_token.stop.stop_token_ids = Part(5, 6);
    as_token.stop.min_tokens = min_tokens;
    EXPECT_EQ(Run(std::move(as_sequence)).tokens, Run(std::move(as_token)).tokens);
  }
}

TEST_F(StopSequencesTest, AStopTokenPrecedesASequenceThatEndsWithIt) {
  Start(DefaultOptions(), 64);
  GenerateInput input = With({Part(5, 7)});
  input.stop.stop_token_ids = Part(6, 7);
  const SampleText sample = Run(std::move(input));
  EXPECT_EQ(sample.tokens, Part(0, 7));
  EXPECT_EQ(sample.finish.stop_token_id, free_run_[6]);
  EXPECT_EQ(sample.finish.stop_sequence, -1);
}

TEST_F(StopSequencesTest, SamplesEndAtTheirOwnMatches) {
  Start(DefaultOptions(), 256);
  GenerateInput input = Plain();
  input.n = 4;
  input.sampling.temperature = 1;
  input.sampling.seed = 3;
  std::vector<Ids> runs;
  for (uint32_t i = 0; i < 4; ++i) runs.push_back(Expected(input, i, 512).tokens);
  // One sequence for each of the samples 1 to 3.
  for (int i = 1; i < 4; ++i) {
    input.stop.stop_sequences.emplace_back(runs[i].begin() + i, runs[i].begin() + 2 * i + 1);
  }
  const Outcome outcome = Wait(*Submit(std::move(input)));
  EXPECT_EQ(outcome.samples.at(0).tokens, runs[0]);
  for (int i = 1; i < 4; ++i) {
    EXPECT_EQ(outcome.samples.at(i).tokens, Ids(runs[i].begin(), runs[i].begin() + 2 * i + 1));
    EXPECT_EQ(outcome.samples.at(i).finish.stop_sequence, i - 1);
  }
  ExpectEverythingBack();
}

TEST_F(StopSequencesTest, PreemptedSamplesEndAtTheSameToken) {
  Start(DefaultOptions(), 8);
  std::vector<std::shared_ptr<TokenStream>> streams;
  std::vector<Ids> expected;
  for (int i = 0; i < 6; ++i) {
    GenerateInput input = Input(Prompt(10 + i, 50 * i), 60);
    const Ids run = Expected(input, 0, 8 * kKvPageTokens).tokens;
    expected.emplace_back(run.begin(), run.begin() + 50 + i);
    input.stop.stop_sequences = {{run.begin() + 45, run.begin() + 50 + i}};
    streams.push_back(Submit(std::move(input)));
  }
  uint32_t preemptions = 0;
  for (int i = 0; i < 6; ++i) {
    const SampleText sample = Wait(*streams[i]).samples.at(0);
    EXPECT_EQ(sample.tokens, expected[i]) << i;
    EXPECT_EQ(sample.finish.stop_sequence, 0);
    preemptions += sample.finish.usage.preemptions;
  }
  EXPECT_GT(preemptions, 0u) << "the test meant to force preemption";
  ExpectEverythingBack();
}

}  // namespace
}  // namespace dorad::engine
