#include "server/engine/draft_trial.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace dorad::engine {
namespace {

constexpr int64_t kReferenceSteps = 8;
constexpr int64_t kMostGuessedSince = 256;
constexpr int64_t kMostRest = 128;
constexpr int64_t kMostWindow = 64;
constexpr int64_t kLeastTokens = 24;  // of a window
// Guesses that gain less are as good as none.
constexpr double kLeastGain = 1.01;
// A shorter window shows a loss as large as this, in so many tokens.
constexpr double kClearLoss = 0.95;
constexpr int64_t kClearTokens = 128;

}  // namespace

bool DraftTrial::MayGuess() {
  ++would_guess_;
  return enough_would_ && rest_left_ == 0;
}

void DraftTrial::Pass() {
  would_guess_ = 0;
  window_ = {};
}

void DraftTrial::Observe(const Step& step, absl::FunctionRef<std::vector<Progress>()> progress) {
  enough_would_ = step.others_wait || 2 * would_guess_ >= step.sequences;
  would_guess_ = 0;
  if (step.sequences <= 0 || step.time <= absl::ZeroDuration()) return;
  Reference* const reference =
      &references_[std::bit_width(static_cast<uint64_t>(step.sequences)) - 1];
  if (reference != reference_) {  // the time is that of both
    reference_ = reference;
    window_ = {};
    return;
  }
  const double seconds = absl::ToDoubleSeconds(step.time);
  if (!step.guessed) {
    constexpr double kKept = 0.95;
    ++reference->steps;
    reference->weight = kKept * reference->weight + 1;
    reference->weighted_seconds = kKept * reference->weighted_seconds + seconds;
    reference->guessed_since = 0;
  }
  if (rest_left_ > 0) {
    --rest_left_;
    window_ = {};
    return;
  }
  if (!window_.begin.empty()) window_.seconds += seconds;
  if (!step.guessed) return;
  if (reference->steps < kReferenceSteps || reference->guessed_since >= kMostGuessedSince) {
    *reference = {};
    rest_left_ = kReferenceSteps + 1;  // the next step has guesses still
    return;
  }
  ++reference->guessed_since;
  if (window_.begin.empty()) {
    window_.begin = progress();
    std::sort(window_.begin.begin(), window_.begin.end(),
              [](const Progress& a, const Progress& b) { return a.sequence < b.sequence; });
    return;
  }
  ++window_.guessed;
  Decide(step.others_wait, progress());
}

std::vector<double> DraftTrial::Gains(std::vector<Progress> now, int64_t* tokens) const {
  const double steps = window_.seconds / reference_->seconds();  // without guesses
  std::vector<double> gains;
  for (const Progress& p : now) {
    const auto before = std::lower_bound(
        window_.begin.begin(), window_.begin.end(), p.sequence,
        [](const Progress& a, uint64_t sequence) { return a.sequence < sequence; });
    if (before == window_.begin.end() || before->sequence != p.sequence) continue;
    *tokens += p.tokens - before->tokens;
    gains.push_back(static_cast<double>(p.tokens - before->tokens) / steps);
  }
  std::sort(gains.begin(), gains.end());
  return gains;
}

void DraftTrial::Decide(bool others_wait, std::vector<Progress> now) {
  int64_t tokens = 0;
  const std::vector<double> gains = Gains(std::move(now), &tokens);
  if (gains.empty()) {
    window_ = {};
    return;
  }
  const double mean =
      std::accumulate(gains.begin(), gains.end(), 0.0) / static_cast<double>(gains.size());
  const bool is_whole = window_.guessed >= window_steps_ && tokens >= kLeastTokens;
  const double gain = others_wait ? mean : gains[gains.size() / 4];
  if ((is_whole && gain < kLeastGain) || (mean < kClearLoss && tokens >= kClearTokens)) {
    rest_left_ = next_rest_;
    next_rest_ = std::min(2 * next_rest_, kMostRest);
    window_steps_ = kFirstWindow;
    window_ = {};
  } else if (is_whole) {
    next_rest_ = kFirstRest;
    window_steps_ = std::min(2 * window_steps_, kMostWindow);
    window_ = {};
  }
}

}  // namespace dorad::engine
