#include "server/engine/draft_trial.h"

#include <algorithm>
#include <bit>

namespace dorad::engine {
namespace {

constexpr int64_t kCompared = 8;  // steps of each kind, at least
constexpr int64_t kLeastTokens = 64;
constexpr int64_t kMostRest = 256;
constexpr int64_t kMostTrust = 512;
// Guesses that gain less are as good as none.
constexpr double kLeastGain = 1.01;
// Fewer steps show a loss as large as this, in so many tokens.
constexpr double kClearLoss = 0.95;
constexpr int64_t kClearTokens = 128;

}  // namespace

void DraftTrial::Pace::Add(int64_t sequences, int64_t new_tokens, double seconds) {
  constexpr double kKept = 0.95;
  ++steps;
  tokens += new_tokens;
  weighted_tokens = kKept * weighted_tokens + static_cast<double>(new_tokens);
  weighted_seconds = kKept * weighted_seconds + static_cast<double>(sequences) * seconds;
}

void DraftTrial::Observe(int64_t sequences, int64_t tokens, bool guessed, absl::Duration time) {
  if (sequences <= 0 || time <= absl::ZeroDuration()) return;
  Level* const level = &levels_[std::bit_width(static_cast<uint64_t>(sequences)) - 1];
  const bool same = level == level_;
  level_ = level;
  if (!same) return;  // the time is that of both
  (guessed ? level->with : level->without).Add(sequences, tokens, absl::ToDoubleSeconds(time));
  if (level->rest_left > 0) {
    if (--level->rest_left == 0) level->with = {};
  } else if (guessed) {
    Decide(level);
  }
}

void DraftTrial::Decide(Level* level) {
  const Pace& with = level->with;
  if (level->without.steps < kCompared) {
    level->rest_left = kCompared;
    return;
  }
  const double gain = with.PerSecond() / level->without.PerSecond();
  const bool is_known = with.steps >= kCompared && with.tokens >= kLeastTokens;
  if ((is_known && gain < kLeastGain) || (gain < kClearLoss && with.tokens >= kClearTokens)) {
    level->rest_left = level->next_rest;
    level->next_rest = std::min(4 * level->next_rest, kMostRest);
    level->trust = Level().trust;
  } else if (is_known && with.steps >= level->trust) {
    level->next_rest = Level().next_rest;
    level->trust = std::min(2 * level->trust, kMostTrust);
    *level = {{}, {}, 0, level->next_rest, level->trust};
  }
}

}  // namespace dorad::engine
