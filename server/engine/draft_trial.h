// Whether guesses from repetitions pay, by trial: how fast sequences advance in steps with guesses
// and in steps without. No price of a row tells that: a step with guesses has more rows, which cost
// little or much, begins only when the one before has ended, and may help those samples that end
// early. Owned by the engine loop; confined to the engine thread.
#pragma once

#include <array>
#include <cstdint>

#include "absl/time/time.h"

namespace dorad::engine {

class DraftTrial {
 public:
  // Whether samples may guess now. Guesses that rest are compared with what comes (DraftPace).
  bool allows_guesses() const { return level_ == nullptr || level_->rest_left == 0; }
  // A step's end, `time` after that of the step before: so many running sequences have so many new
  // tokens. guessed: this step had guesses, or the one before, which this one then waited for.
  void Observe(int64_t sequences, int64_t tokens, bool guessed, absl::Duration time);

 private:
  // Tokens that a sequence gets in a second, of which later steps weigh more.
  struct Pace {
    void Add(int64_t sequences, int64_t new_tokens, double seconds);
    double PerSecond() const { return weighted_tokens / weighted_seconds; }

    int64_t steps = 0, tokens = 0;
    double weighted_tokens = 0, weighted_seconds = 0;  // seconds of sequences
  };
  // Of numbers of sequences with the same highest bit.
  struct Level {
    Pace with, without;
    int64_t rest_left = 0;  // steps without guesses
    int64_t next_rest = 16;
    int64_t trust = 64;  // steps with guesses that pay, until both are compared anew
  };
  static void Decide(Level* level);

  std::array<Level, 64> levels_;
  Level* level_ = nullptr;  // of the last step
};

}  // namespace dorad::engine
