// Whether guesses pay: the extra time of a step with guesses, and, by trial, how fast sequences
// advance with guesses and without. No price of a row tells that: a step with guesses has more
// rows, which cost little or much, and may have to wait for the end of the one before. Owned by the
// engine loop; confined to the engine thread.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "server/platform/metrics/metrics.h"

namespace dorad::engine {

class DraftTrial {
 public:
  DraftTrial() { prices_.fill(kFirstPrice); }

  static constexpr std::array kSources = {DraftSource::kAnswer, DraftSource::kNgram};
  template <typename T>
  using BySource = std::array<T, kSources.size()>;
  static constexpr size_t Index(DraftSource source) { return static_cast<size_t>(source); }

  // Of a running sequence.
  struct Progress {
    uint64_t sequence = 0;
    int64_t tokens = 0;  // so far
  };
  struct Step {
    int64_t sequences = 0;        // running
    BySource<bool> guessed = {};  // it had guesses of the source
    // Requests wait for a place, or sequences for rows of their guesses. Then the tokens of all
    // sequences count. Otherwise three of four have to gain: a batch ends with its slowest ones.
    bool others_wait = false;
    absl::Duration time;  // from the end of the step before to its end; 0: it tells nothing
  };

  // Guesses that rest are compared with what comes (DraftPace).
  bool rests(DraftSource source) const { return trials_[Index(source)].rest_left > 0; }
  // A sample has a guess for its next step, which gains so many tokens in the mean, less the price
  // of its rows. REQUIRES: guesses of the source do not rest.
  void Propose(DraftSource source, double gain);
  // After a step and its samples' proposals. Returns the sources whose proposals may be verified.
  // progress: of all running sequences. Where both sources guess, n-grams are judged for both.
  BySource<bool> Observe(const Step& step, absl::FunctionRef<std::vector<Progress>()> progress);

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
  static constexpr int64_t kFirstWindow = 4;
  struct Trial {
    Window window;
    int64_t rest_left = 0;  // steps without guesses of the source
    int64_t next_rest = kFirstRest;
    int64_t window_steps = kFirstWindow;
    // Since the last step: samples, and the tokens that they would gain.
    int64_t proposals = 0;
    double gain = 0;
  };
  struct Rule {
    // Guesses that gain less rest.
    double least_gain = 1;
    // A step's guesses have to gain more than its extra time costs, and half of the sequences have
    // to guess, unless others wait.
    bool needs_company = false;
    // A clear gain, or one of all where others wait, needs no reference.
    bool trusted = false;
  };
  static constexpr Rule RuleOf(DraftSource source) {
    // The caller has asked for its drafts: they rest if they slow the others down.
    if (source == DraftSource::kAnswer) return {.least_gain = 0.97, .trusted = true};
    return {.least_gain = 1.01, .needs_company = true};
  }

  Trial& TrialOf(DraftSource source) { return trials_[Index(source)]; }
  // Of so many running sequences: that of the step before, if they are nearly as many.
  int BucketOf(int64_t sequences) const;
  Reference& reference() { return references_[bucket_]; }
  double& price() { return prices_[bucket_]; }
  // Compares a step to those before it. guessed: it or the step before had guesses.
  void Compare(const Step& step, const BySource<bool>& guessed,
               absl::FunctionRef<std::vector<Progress>()> progress);
  // Whether the proposals since the last decision may be verified.
  bool Decide(DraftSource source, const Step& step);
  // Judges a step with guesses of the source.
  void Judge(DraftSource source, bool others_wait,
             absl::FunctionRef<std::vector<Progress>()> progress);
  // What sequences gained in the window, in tokens: ascending. And the tokens of all.
  static std::vector<int64_t> Gains(const Window& window, std::vector<Progress> now,
                                    int64_t* tokens);
  void MakeReference();

  static constexpr double kFirstPrice = 0.1;
  std::array<Reference, 64> references_;
  // The extra time of a step with n-grams and of the one after it, as a share of one without
  // guesses, by the number of sequences as in references_.
  std::array<double, 64> prices_;
  int bucket_ = 0;  // of the last step
  BySource<bool> last_guessed_ = {};
  BySource<Trial> trials_;
};

}  // namespace dorad::engine
