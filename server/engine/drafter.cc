#include "server/engine/drafter.h"

#include <algorithm>
#include <cmath>

namespace dorad::engine {
namespace {

constexpr int64_t kLeastLength = 4;
// A guess costs the sample its place in the step that would begin ahead: one right token on average
// pays for that.
constexpr double kLeastGain = 1;
constexpr int64_t kLongestRest = 128;
// Guesses that were all right are no proof of the next one.
constexpr double kDoubt = 0.05;

// Equal tokens by which a place in the answer is found again, and where they are looked for.
constexpr int64_t kEqualTokens = 3;
constexpr int64_t kLookBack = 128;
constexpr int64_t kLookAhead = 512;

}  // namespace

int64_t DraftPace::Next(int64_t tokens, double row_share) {
  if (rest_ > 0) {
    rest_ = std::max<int64_t>(0, rest_ - tokens);
    // After a rest a short guess shows whether guesses are right now.
    return rest_ > 0 ? 0 : kLeastLength;
  }
  // The k-th token is right with probability p to the k. Right, it saves its sequence's part of a
  // step; it costs a row in any case.
  const double p = right_ / (right_ + wrong_);
  const double worth = std::log(row_share) / std::log(p);
  const auto length = static_cast<int64_t>(std::min(worth, static_cast<double>(longest_)));
  if (length == 0) Rest();
  return length;
}

void DraftPace::Verified(int64_t right, bool all_right) {
  constexpr double kKept = 0.75;
  longest_ = std::min(kLeastLength + 2 * right, most_);
  right_ = kKept * right_ + static_cast<double>(right);
  wrong_ = kKept * wrong_ + (all_right ? kDoubt : 1);
  gain_ += (static_cast<double>(right) - gain_) / 4;
  if (gain_ < kLeastGain) {
    Rest();
  } else {
    rest_ = last_rest_ = 0;
  }
}

void DraftPace::Rest() {
  rest_ = last_rest_ = std::min(kLeastLength + 2 * last_rest_, kLongestRest);
}

absl::Span<const TokenId> ExpectedAnswer::Next(absl::Span<const TokenId> generated, int64_t most) {
  Follow(generated);
  if (lost_ || place_ >= static_cast<int64_t>(tokens_.size())) return {};
  return absl::MakeConstSpan(tokens_).subspan(place_, most);
}

void ExpectedAnswer::Follow(absl::Span<const TokenId> generated) {
  for (; followed_ < generated.size(); ++followed_, ++place_) {
    const bool is_equal =
        place_ < static_cast<int64_t>(tokens_.size()) && tokens_[place_] == generated[followed_];
    lost_ = lost_ || !is_equal;
  }
  if (!lost_ || followed_ < kEqualTokens) return;
  // The nearest place in the answer, the same one first.
  const auto last = generated.last(kEqualTokens);
  const auto fits = [&](int64_t end) {
    return end >= kEqualTokens && end <= static_cast<int64_t>(tokens_.size()) &&
           std::equal(last.begin(), last.end(), tokens_.begin() + end - kEqualTokens);
  };
  for (int64_t away = 0; away <= kLookAhead; ++away) {
    const bool behind = away <= kLookBack && fits(place_ - away);
    if (!behind && !fits(place_ + away)) continue;
    place_ += behind ? -away : away;
    lost_ = false;
    return;
  }
}

}  // namespace dorad::engine
