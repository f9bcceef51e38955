// Simulated batches: what a run takes with guesses as the trial allows them, against none.
#include "server/engine/draft_trial.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

#include "tests/unit/support/test.h"

namespace dorad::engine {
namespace {

// A batch of samples of one length. Those that guess do so in each step in which they may.
struct Batch {
  int64_t sequences = 1;
  int64_t length = 400;    // of each sample
  int64_t guessing = 1;    // the first ones
  double right = 1;        // tokens that a guess gains, in the mean
  double expected = 1;     // those that its sample expects
  double slower = 1;       // a step with guesses, against one without
  int64_t from_token = 0;  // where guesses begin
  bool others_wait = false;
  DraftSource source = DraftSource::kNgram;
};

struct Server {
  DraftTrial trial;
  std::mt19937 random{1};
  std::vector<DraftTrial::Progress> running;
  uint64_t next_id = 0;
  bool may_verify = false;
  int64_t steps = 0, guessed_steps = 0;

  // A step without guesses takes 1 + 1/64 for each sequence. Returns its time.
  double Step(const Batch& batch) {
    const bool may = std::exchange(may_verify, false);
    bool guesses = false;
    const auto count = static_cast<int64_t>(running.size());
    for (int64_t i = 0; i < count; ++i) {
      DraftTrial::Progress& sample = running[i];
      sample.tokens += 1;
      const bool is_guessing =
          static_cast<int64_t>(sample.sequence % batch.sequences) < batch.guessing;
      if (!is_guessing || sample.tokens < batch.from_token) continue;
      if (may) {
        guesses = true;
        sample.tokens += std::poisson_distribution<int64_t>(batch.right)(random);
      }
      if (sample.tokens < batch.length && !trial.rests(batch.source)) {
        trial.Propose(batch.source, batch.expected);
      }
    }
    const double noise = 1 + std::normal_distribution<double>(0, 0.02)(random);
    const double time =
        (1 + static_cast<double>(count) / 64) * (guesses ? batch.slower : 1) * noise;
    std::erase_if(running, [&](const auto& sample) { return sample.tokens >= batch.length; });
    DraftTrial::Step step = {
        static_cast<int64_t>(running.size()), {}, batch.others_wait, absl::Milliseconds(time)};
    step.guessed[DraftTrial::Index(batch.source)] = guesses;
    may_verify = trial.Observe(step, [&] { return running; })[DraftTrial::Index(batch.source)];
    steps += 1;
    guessed_steps += guesses ? 1 : 0;
    return time;
  }
  // Until all samples have ended.
  double Time(const Batch& batch) {
    for (int64_t i = 0; i < batch.sequences; ++i) running.push_back({next_id++, 0});
    may_verify = false;
    double time = 0;
    while (!running.empty()) time += Step(batch);
    return time;
  }
};

// The time of a batch over that without guesses; the first one is not counted, as the paces of a
// server's steps are known.
double Relative(const Batch& batch, int seed) {
  Server server;
  server.random.seed(seed);
  Batch without = batch;
  without.guessing = 0;
  server.Time(without);
  const double time = server.Time(without);
  return server.Time(batch) / time;
}

std::vector<double> Relatives(const Batch& batch) {
  std::vector<double> all;
  for (int seed = 1; seed <= 20; ++seed) all.push_back(Relative(batch, seed));
  return all;
}
double Worst(const Batch& batch) {
  const std::vector<double> all = Relatives(batch);
  return *std::max_element(all.begin(), all.end());
}
// Of one sequence, whose few tokens vary.
double Mean(const Batch& batch) {
  const std::vector<double> all = Relatives(batch);
  return std::accumulate(all.begin(), all.end(), 0.0) / static_cast<double>(all.size());
}

TEST(DraftTrialTest, GuessesThatSlowABatchDownCostLittle) {
  EXPECT_LT(Worst({.sequences = 64, .guessing = 10, .right = 0.9, .slower = 1.33}), 1.03);
  EXPECT_LT(Worst({.sequences = 64, .guessing = 20, .right = 0, .slower = 1.1}), 1.03);
  EXPECT_LT(Worst({.sequences = 8, .guessing = 3, .right = 0.1, .slower = 1.15}), 1.03);
  EXPECT_LT(Mean({.sequences = 1, .guessing = 1, .right = 0.05, .slower = 1.12}), 1.03);
}

TEST(DraftTrialTest, GuessesThatPayAreMade) {
  EXPECT_LT(Worst({.sequences = 64, .guessing = 64, .right = 2, .slower = 1.5}), 0.6);
  EXPECT_LT(Worst({.sequences = 8, .guessing = 8, .right = 1.5, .slower = 1.2}), 0.6);
  EXPECT_LT(Worst({.sequences = 1, .guessing = 1, .right = 2, .slower = 1.15}), 0.5);
}

TEST(DraftTrialTest, TextThatBeginsToRepeatItselfIsFound) {
  const Batch batch = {.sequences = 8, .guessing = 8, .right = 4, .slower = 1.3, .from_token = 100};
  EXPECT_LT(Worst(batch), 0.6);
}

TEST(DraftTrialTest, ABatchDoesNotWaitLongerForTheSlowestOfItBecauseOthersGain) {
  const Batch batch = {.sequences = 8, .guessing = 4, .right = 2, .slower = 1.2};
  EXPECT_LT(Worst(batch), 1.03) << "half of the samples end early";
}

TEST(DraftTrialTest, AFewOfABatchGuessOnlyWhereOthersWait) {
  for (const bool others_wait : {false, true}) {
    Server server;
    Batch batch = {.sequences = 64, .guessing = 25, .right = 2, .slower = 1.2};
    batch.others_wait = others_wait;
    for (int64_t i = 0; i < batch.sequences; ++i) server.running.push_back({server.next_id++, 0});
    for (int i = 0; i < 100; ++i) server.Step(batch);  // no sample has ended
    EXPECT_EQ(server.guessed_steps > 0, others_wait);
    batch.others_wait = false;
    server.Step(batch);
    const int64_t before = server.guessed_steps;
    for (int i = 0; i < 20; ++i) server.Step(batch);
    EXPECT_EQ(server.guessed_steps, before) << "the samples of each step count for it alone";
  }
}

TEST(DraftTrialTest, TheCallersDraftsRestOnlyWhereTheySlowOthersDown) {
  for (const bool slow : {false, true}) {
    Batch batch = {.sequences = 64, .guessing = 8, .right = 2, .source = DraftSource::kAnswer};
    batch.slower = slow ? 1.3 : 1;
    EXPECT_LT(Worst(batch), 1.05);
    Server server;
    for (int64_t i = 0; i < batch.sequences; ++i) server.running.push_back({server.next_id++, 0});
    for (int i = 0; i < 100; ++i) server.Step(batch);
    EXPECT_GT(server.guessed_steps, slow ? 8 : 80);
    EXPECT_LT(server.guessed_steps, slow ? 50 : 101);
  }
}

TEST(DraftTrialTest, AClearGainOfTheCallersDraftsIsNotInterrupted) {
  Server server;
  Batch batch = {.sequences = 8, .guessing = 8, .right = 20, .slower = 1.5};
  batch.source = DraftSource::kAnswer;
  server.Time(batch);
  EXPECT_EQ(server.guessed_steps, server.steps - 1) << "all but the first one";
  // Of a crowd, each gets a few rows.
  batch = {.sequences = 64, .guessing = 64, .right = 1, .slower = 1.5, .others_wait = true};
  batch.source = DraftSource::kAnswer;
  server = {};
  server.Time(batch);
  EXPECT_EQ(server.guessed_steps, server.steps - 1);
}

TEST(DraftTrialTest, NgramsHaveToPayForAStepWithGuesses) {
  for (const bool others_wait : {false, true}) {
    Batch batch = {.sequences = 64, .length = 800, .guessing = 64, .right = 1, .slower = 1.4};
    batch.others_wait = others_wait;
    const auto guessed_steps = [&](double expected) {
      Server server;
      server.Time({.sequences = 64, .guessing = 0});
      batch.expected = expected;
      server.Time(batch);
      return server.guessed_steps;
    };
    EXPECT_EQ(guessed_steps(0.05), 0);
    EXPECT_GT(guessed_steps(0.3), 0) << "no step has had guesses yet";
    EXPECT_LT(guessed_steps(0.3), 40) << "a step takes 1.4 times as long, and is to bring 1.3";
    EXPECT_GT(guessed_steps(0.5), 300);
  }
}

TEST(DraftTrialTest, TheCallersDraftsDoNotRaiseThePriceOfNgrams) {
  Server server;
  Batch batch = {.sequences = 64, .length = 4000, .guessing = 64, .right = 20, .slower = 4};
  batch.source = DraftSource::kAnswer;
  server.Time({.sequences = 64, .guessing = 0});
  server.Time(batch);
  batch = {.sequences = 64, .guessing = 64, .right = 1, .slower = 1.2};
  const int64_t before = server.guessed_steps;
  server.Time(batch);
  EXPECT_GT(server.guessed_steps, before + 150);
}

TEST(DraftTrialTest, APriceThatWasTooHighIsForgotten) {
  Server server;
  server.Time({.sequences = 64, .guessing = 0});
  Batch batch = {.sequences = 64, .length = 400, .guessing = 64, .slower = 4};
  server.Time(batch);
  const int64_t before = server.guessed_steps;
  EXPECT_LT(before, 40);
  batch.slower = 1.05;
  for (int i = 0; i < 10; ++i) server.Time(batch);
  EXPECT_GT(server.guessed_steps, before + 1000);
}

TEST(DraftTrialTest, WhereOthersWaitTheTokensOfAllCount) {
  Server server;
  server.Time({.sequences = 8, .guessing = 0});
  Batch batch = {.sequences = 8, .guessing = 4, .right = 2, .slower = 1.2, .others_wait = true};
  server.Time(batch);
  EXPECT_GT(server.guessed_steps, 100);
}

TEST(DraftTrialTest, TokensOfStepsWithPromptsAreNotTakenForGains) {
  DraftTrial trial;
  std::vector<DraftTrial::Progress> running = {{1, 0}, {2, 0}, {3, 0}, {4, 0}};
  bool may_guess = true;
  const auto step = [&](bool guesses) {
    for (DraftTrial::Progress& sample : running) {
      sample.tokens += 1;
      if (!trial.rests(DraftSource::kNgram)) trial.Propose(DraftSource::kNgram, 1);
    }
    const absl::Duration time = absl::Milliseconds(guesses ? 1.2 : 1.0);
    const auto may = trial.Observe({4, {false, guesses}, false, time}, [&] { return running; });
    may_guess = may[DraftTrial::Index(DraftSource::kNgram)];
  };
  for (int i = 0; i < 20; ++i) step(/*guesses=*/false);
  int steps = 0;
  for (; steps < 100 && may_guess; ++steps) {
    step(/*guesses=*/true);
    if (steps != 4) continue;
    for (DraftTrial::Progress& sample : running) sample.tokens += 100;
    trial.Observe({4, {false, true}, false, absl::ZeroDuration()}, [&] { return running; });
  }
  EXPECT_LT(steps, 20) << "guesses gain nothing";
}

// The number of sequences of a full server falls by one with each end.
TEST(DraftTrialTest, LossesAreSeenWhereTheNumberOfSequencesVaries) {
  for (const DraftSource source : DraftTrial::kSources) {
    Server server;
    const Batch batch = {.sequences = 64,
                         .length = 9999,
                         .guessing = 64,
                         .right = 0,
                         .slower = 1.3,
                         .source = source};
    for (int64_t i = 0; i < batch.sequences; ++i) server.running.push_back({server.next_id++, 0});
    for (int i = 0; i < 1000; ++i) {
      server.Step(batch);
      if (i % 4 == 0) server.running.pop_back();
      if (i % 4 == 1) server.running.push_back({server.next_id++, 0});
    }
    EXPECT_LT(server.guessed_steps, 200) << static_cast<int>(source);
  }
}

// Steps under way verify their drafts while guesses rest.
TEST(DraftTrialTest, ReferencesAreMadeAlthoughGuessesComeLate) {
  DraftTrial trial;
  std::vector<DraftTrial::Progress> running = {{1, 0}, {2, 0}, {3, 0}, {4, 0}};
  int late = 0, guessed_steps = 0;
  for (int i = 0; i < 300; ++i) {
    const bool guesses = late > 0;
    for (DraftTrial::Progress& sample : running) {
      sample.tokens += guesses ? 4 : 1;
      if (!trial.rests(DraftSource::kNgram)) trial.Propose(DraftSource::kNgram, 3);
    }
    guessed_steps += guesses ? 1 : 0;
    const absl::Duration time = absl::Milliseconds(guesses ? 1.2 : 1.0);
    const auto may = trial.Observe({4, {false, guesses}, false, time}, [&] { return running; });
    late = may[DraftTrial::Index(DraftSource::kNgram)] ? 3 : late - 1;
  }
  EXPECT_GT(guessed_steps, 250);
}

TEST(DraftTrialTest, GoodDraftsOfTheCallerGoOnWhereNgramsRest) {
  DraftTrial trial;
  std::vector<DraftTrial::Progress> running;
  for (uint64_t i = 0; i < 64; ++i) running.push_back({i, 0});
  int answers = 0, ngrams = 0;
  DraftTrial::BySource<bool> may = {};
  for (int i = 0; i < 1000; ++i) {
    const auto [answer, ngram] = may;
    for (DraftTrial::Progress& sample : running) {
      const bool has_answer = sample.sequence < 8;
      sample.tokens += has_answer && answer ? 4 : 1;
      const DraftSource source = has_answer ? DraftSource::kAnswer : DraftSource::kNgram;
      if (!trial.rests(source)) trial.Propose(source, 1);
    }
    answers += answer ? 1 : 0;
    ngrams += ngram ? 1 : 0;
    const double time = (answer ? 1.02 : 1) * (ngram ? 1.3 : 1);
    may = trial.Observe({64, {answer, ngram}, false, absl::Milliseconds(time)},
                        [&] { return running; });
  }
  EXPECT_GT(answers, 900);
  EXPECT_LT(ngrams, 150);
}

TEST(DraftTrialTest, ARestEndsUnderAFlowOfPrompts) {
  Server server;
  server.Time({.sequences = 32, .guessing = 0});
  server.Time({.sequences = 32, .length = 100, .guessing = 32, .right = 0, .slower = 2});
  const auto step = [&] {
    server.trial.Observe({32, {}, false, absl::ZeroDuration()}, [&] { return server.running; });
  };
  ASSERT_TRUE(server.trial.rests(DraftSource::kNgram));
  for (int i = 0; i < 200; ++i) step();
  EXPECT_FALSE(server.trial.rests(DraftSource::kNgram));
}

TEST(DraftTrialTest, GuessesRestAndAreTriedAgain) {
  Server server;
  server.Time({.sequences = 32, .guessing = 0});
  server.Time({.sequences = 32, .length = 2000, .guessing = 32, .right = 0, .slower = 2});
  EXPECT_GT(server.guessed_steps, 8);
  EXPECT_LT(server.guessed_steps, 120);
}

}  // namespace
}  // namespace dorad::engine
