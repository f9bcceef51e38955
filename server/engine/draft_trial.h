// Whether guesses from repetitions pay, by trial: how fast sequences advance with guesses and
// without. No price of a row tells that: a step with guesses has more rows, which cost little or
// much, and may have to wait for the end of the one before. Owned by the engine loop; confined to
// the engine thread.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"

namespace dorad::engine {

class DraftTrial {
 public:
  // Of a running sequence.
  struct Progress {
    uint64_t sequence = 0;
    int64_t tokens = 0;  // so far
  };
  struct Step {
    int64_t sequences = 0;  // running
    bool guessed = false;   // it had guesses, or the one before, for whose end it may have waited
    // Requests wait for a place. Then guesses pay if all sequences together gain tokens. Otherwise
    // three of four sequences have to gain: a batch ends with its slowest ones. While guesses would
    // pay for fewer than half of them, none is tried.
    bool others_wait = false;
    absl::Duration time;  // from the end of the step before to its end
  };

  // Called for each sample whose guesses would pay for their rows: whether it may guess now.
  // Guesses that rest are compared with what comes (DraftPace).
  bool MayGuess();
  // After a step and its samples' calls of MayGuess. progress: of all running sequences.
  void Observe(const Step& step, absl::FunctionRef<std::vector<Progress>()> progress);
  // After a step that tells nothing, as one with a prompt does.
  void Pass();

 private:
  // Steps without guesses, of numbers of sequences with the same highest bit.
  struct Reference {
    int64_t steps = 0;
    double weight = 0, weighted_seconds = 0;  // later steps weigh more
    int64_t guessed_since = 0;
    double seconds() const { return weighted_seconds / weight; }
  };
  // Steps under comparison, from the first end of one with guesses on.
  struct Window {
    std::vector<Progress> begin;  // by sequence; empty: it has not begun
    int64_t guessed = 0;          // steps
    double seconds = 0;
  };
  static constexpr int64_t kFirstRest = 16;
  static constexpr int64_t kFirstWindow = 8;

  // What sequences gained, each as a ratio: ascending. And the tokens of all.
  std::vector<double> Gains(std::vector<Progress> now, int64_t* tokens) const;
  void Decide(bool others_wait, std::vector<Progress> now);

  std::array<Reference, 64> references_;
  Reference* reference_ = nullptr;  // of the last step
  int64_t would_guess_ = 0;         // samples, since then
  bool enough_would_ = false;       // at the last step
  Window window_;
  int64_t rest_left_ = 0;  // steps without guesses
  int64_t next_rest_ = kFirstRest;
  int64_t window_steps_ = kFirstWindow;
};

}  // namespace dorad::engine
