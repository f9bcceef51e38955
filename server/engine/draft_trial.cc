#include "server/engine/draft_trial.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>
#include <utility>

namespace dorad::engine {
namespace {

constexpr int64_t kReferenceSteps = 8;
constexpr int64_t kMostGuessedSince = 256;
constexpr int64_t kMostRest = 128;
constexpr int64_t kMostWindow = 64;
constexpr int64_t kLeastTokens = 24;  // of a window
// A shorter window shows a loss as large as this, in so many tokens.
constexpr double kClearLoss = 0.95;
constexpr int64_t kClearTokens = 128;
// Tokens a step of three of four sequences: no step with guesses takes so many times as long.
constexpr int64_t kClearGain = 4;
// The weight of the last step in the price of those with guesses. A high price makes them rare:
// each step without guesses forgets a little of it.
constexpr double kLearned = 0.1;
constexpr double kForgotten = 0.0005;

}  // namespace

void DraftTrial::Propose(DraftSource source, double gain) {
  Trial& trial = TrialOf(source);
  ++trial.proposals;
  trial.gain += gain;
}

DraftTrial::BySource<bool> DraftTrial::Observe(
    const Step& step, absl::FunctionRef<std::vector<Progress>()> progress) {
  // A step may have waited for the end of the one before.
  BySource<bool> guessed;
  std::ranges::transform(step.guessed, last_guessed_, guessed.begin(), std::logical_or());
  last_guessed_ = step.guessed;
  Compare(step, guessed, progress);
  BySource<bool> may_verify;
  for (const DraftSource source : kSources) may_verify[Index(source)] = Decide(source, step);
  return may_verify;
}

bool DraftTrial::Decide(DraftSource source, const Step& step) {
  Trial& trial = TrialOf(source);
  const double gain = std::exchange(trial.gain, 0);
  const int64_t proposals = std::exchange(trial.proposals, 0);
  if (trial.rest_left > 0) return false;
  if (!RuleOf(source).needs_company) return true;
  return gain >= price() * static_cast<double>(step.sequences) &&
         (step.others_wait || 2 * proposals >= step.sequences);
}

int DraftTrial::BucketOf(int64_t sequences) const {
  // The number stays in its bucket until it has left it by more than an eighth: that of a full
  // server is a power of two, and falls by one with each end.
  const int64_t begin = int64_t{1} << bucket_;
  if (8 * sequences >= 7 * begin && 8 * sequences < 9 * 2 * begin) return bucket_;
  return std::bit_width(static_cast<uint64_t>(sequences)) - 1;
}

void DraftTrial::Compare(const Step& step, const BySource<bool>& guessed,
                         absl::FunctionRef<std::vector<Progress>()> progress) {
  for (const DraftSource source : kSources) {
    Trial& trial = TrialOf(source);
    const bool rests = trial.rest_left > 0;
    if (rests && !guessed[Index(source)]) --trial.rest_left;
    if (rests || step.time <= absl::ZeroDuration()) trial.window = {};
  }
  if (step.sequences <= 0 || step.time <= absl::ZeroDuration()) return;
  const int bucket = BucketOf(step.sequences);
  if (std::exchange(bucket_, bucket) != bucket) {  // the time is that of both
    for (Trial& trial : trials_) trial.window = {};
    return;
  }
  const double seconds = absl::ToDoubleSeconds(step.time);
  const bool has_answers = guessed[Index(DraftSource::kAnswer)];
  const bool has_ngrams = guessed[Index(DraftSource::kNgram)];
  if (has_answers || has_ngrams) {
    ++reference().guessed_since;
    if (!has_answers && reference().steps >= kReferenceSteps) {
      // The mean of steps with guesses, to which the extra time of the steps after them is added.
      if (step.guessed[Index(DraftSource::kNgram)]) price() *= 1 - kLearned;
      price() += kLearned * (seconds / reference().seconds() - 1);
    }
  } else {
    constexpr double kKept = 0.95;
    Reference& without = reference();
    ++without.steps;
    without.weight = kKept * without.weight + 1;
    without.weighted_seconds = kKept * without.weighted_seconds + seconds;
    without.guessed_since = 0;
    price() += kForgotten * (kFirstPrice - price());
  }
  for (const DraftSource source : kSources) {
    Trial& trial = TrialOf(source);
    if (trial.rest_left > 0) continue;
    const bool is_others = source == DraftSource::kAnswer ? has_ngrams : has_answers && !has_ngrams;
    if (is_others) {
      trial.window = {};
    } else {
      if (!trial.window.begin.empty()) trial.window.seconds += seconds;
      if (guessed[Index(source)]) Judge(source, step.others_wait, progress);
    }
  }
}

void DraftTrial::MakeReference() {
  if (reference().steps >= kReferenceSteps) reference() = {};
  for (Trial& trial : trials_) trial.rest_left = std::max(trial.rest_left, kReferenceSteps);
}

std::vector<int64_t> DraftTrial::Gains(const Window& window, std::vector<Progress> now,
                                       int64_t* tokens) {
  std::vector<int64_t> gains;
  for (const Progress& p : now) {
    const auto before = std::lower_bound(
        window.begin.begin(), window.begin.end(), p.sequence,
        [](const Progress& a, uint64_t sequence) { return a.sequence < sequence; });
    if (before == window.begin.end() || before->sequence != p.sequence) continue;
    gains.push_back(p.tokens - before->tokens);
  }
  *tokens = std::accumulate(gains.begin(), gains.end(), int64_t{0});
  std::sort(gains.begin(), gains.end());
  return gains;
}

void DraftTrial::Judge(DraftSource source, bool others_wait,
                       absl::FunctionRef<std::vector<Progress>()> progress) {
  Trial& trial = TrialOf(source);
  const Rule rule = RuleOf(source);
  const bool has_reference =
      reference().steps >= kReferenceSteps && reference().guessed_since <= kMostGuessedSince;
  if (!has_reference && !rule.trusted) return MakeReference();
  if (trial.window.begin.empty()) {
    trial.window.begin = progress();
    std::ranges::sort(trial.window.begin, {}, &Progress::sequence);
    return;
  }
  ++trial.window.guessed;
  int64_t tokens = 0;
  const std::vector<int64_t> gains = Gains(trial.window, progress(), &tokens);
  if (gains.empty()) {
    trial.window = {};
    return;
  }
  const auto count = static_cast<double>(gains.size());
  const double mean = static_cast<double>(tokens) / count;
  const double counted = others_wait ? mean : static_cast<double>(gains[gains.size() / 4]);
  const bool is_whole = trial.window.guessed >= trial.window_steps && tokens >= kLeastTokens;
  const bool is_clear =
      rule.trusted && counted >= static_cast<double>(kClearGain * trial.window.guessed);
  const bool may_go_on = is_clear || (others_wait && reference().guessed_since < kMostGuessedSince);
  if (!has_reference && !may_go_on) {
    if (is_whole) MakeReference();
    return;
  }
  // Without guesses.
  const double steps = has_reference ? trial.window.seconds / reference().seconds() : 0;
  if ((is_whole && counted < rule.least_gain * steps) ||
      (mean < kClearLoss * steps && tokens >= kClearTokens)) {
    trial.rest_left = trial.next_rest;
    trial.next_rest = std::min(2 * trial.next_rest, kMostRest);
    trial.window_steps = kFirstWindow;
    trial.window = {};
  } else if (is_whole) {
    trial.next_rest = kFirstRest;
    trial.window_steps = std::min(2 * trial.window_steps, kMostWindow);
    trial.window = {};
  }
}

}  // namespace dorad::engine
