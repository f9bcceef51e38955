// Simulated batches: what a run takes with guesses as the trial allows them, against none.
#include "server/engine/draft_trial.h"

#include <functional>
#include <random>

#include "tests/unit/support/test.h"

namespace dorad::engine {
namespace {

struct Batch {
  int64_t sequences = 1;
  int64_t steps = 400;     // tokens of each sample
  double share = 1;        // of the sequences that guess in a step, if they may
  double right = 1;        // tokens that a guess gains, in the mean
  double slower = 1;       // a step with guesses, against one without
  double noise = 0.03;     // of times
  int64_t first_step = 0;  // with guesses
  int64_t last_step = INT64_MAX;
};

// The time of a run whose sequences get as many tokens as in `steps` steps without guesses, over
// the time of that.
double Relative(const Batch& batch, int seed = 1) {
  DraftTrial trial;
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  const double goal = static_cast<double>(batch.sequences * batch.steps);
  double tokens = 0, time = 0;
  bool guessed_before = false;
  for (int64_t step = 0; tokens < goal; ++step) {
    const bool may = trial.allows_guesses() && step >= batch.first_step && step < batch.last_step;
    int64_t fresh = batch.sequences;
    bool guesses = false;
    for (int64_t i = 0; may && i < batch.sequences; ++i) {
      if (std::uniform_real_distribution<double>()(random) >= batch.share) continue;
      guesses = true;
      fresh += std::poisson_distribution<int64_t>(batch.right)(random);
    }
    const double took = (guesses ? batch.slower : 1) * (1 + batch.noise * normal(random));
    trial.Observe(batch.sequences, fresh, guesses || guessed_before, absl::Milliseconds(took));
    guessed_before = guesses;
    tokens += static_cast<double>(fresh);
    time += took;
  }
  return time / static_cast<double>(batch.steps);
}

double Worst(Batch batch) {
  double worst = 0;
  for (int seed = 1; seed <= 20; ++seed) worst = std::max(worst, Relative(batch, seed));
  return worst;
}

TEST(DraftTrialTest, GuessesThatSlowABatchDownCostLittle) {
  EXPECT_LT(Worst({.sequences = 64, .share = 0.15, .right = 0.9, .slower = 1.33}), 1.02);
  EXPECT_LT(Worst({.sequences = 64, .share = 0.3, .right = 0, .slower = 1.1}), 1.02);
  EXPECT_LT(Worst({.sequences = 8, .share = 0.3, .right = 0.2, .slower = 1.15}), 1.025);
  EXPECT_LT(Worst({.sequences = 1, .share = 0.5, .right = 0.1, .slower = 1.12}), 1.03);
}

TEST(DraftTrialTest, GuessesThatPayAreMade) {
  EXPECT_LT(Worst({.sequences = 64, .share = 1, .right = 2, .slower = 1.5}), 0.6);
  EXPECT_LT(Worst({.sequences = 8, .share = 0.5, .right = 3, .slower = 1.2}), 0.6);
  EXPECT_LT(Worst({.sequences = 1, .share = 1, .right = 2, .slower = 1.15}), 0.5);
}

TEST(DraftTrialTest, TextThatBeginsToRepeatItselfIsFound) {
  EXPECT_LT(Worst({.sequences = 8, .share = 1, .right = 4, .slower = 1.3, .first_step = 100}), 0.6);
}

TEST(DraftTrialTest, GuessesRestAndAreTriedAgainEverLater) {
  DraftTrial trial;
  std::vector<int64_t> tried;
  for (int64_t step = 0; step < 1000; ++step) {
    const bool guesses = step >= 10 && trial.allows_guesses();
    if (guesses) tried.push_back(step);
    trial.Observe(32, 32, guesses, absl::Milliseconds(guesses ? 2 : 1));
  }
  ASSERT_GT(tried.size(), 8);
  EXPECT_LT(tried.size(), 40);
  EXPECT_GT(tried.back(), 400) << "they are tried again";
}

TEST(DraftTrialTest, EachNumberOfSequencesHasATrialOfItsOwn) {
  DraftTrial trial;
  const auto run = [&](int64_t sequences, double slower) {
    int64_t allowed = 0;
    for (int step = 0; step < 200; ++step) {
      const bool guesses = step >= 10 && trial.allows_guesses();
      allowed += guesses ? 1 : 0;
      trial.Observe(sequences, guesses ? 2 * sequences : sequences, guesses,
                    absl::Milliseconds(guesses ? slower : 1));
    }
    return allowed;
  };
  EXPECT_LT(run(64, 3), 40);
  EXPECT_GT(run(4, 1.2), 150);
  EXPECT_LT(run(64, 3), 40);
}

}  // namespace
}  // namespace dorad::engine
