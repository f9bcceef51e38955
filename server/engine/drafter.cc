#include "server/engine/drafter.h"

#include <algorithm>

namespace dorad::engine {
namespace {

constexpr int64_t kLeastLength = 4;
// A guess costs the sample its place in the step that would begin ahead: one right token on average
// pays for that.
constexpr double kLeastGain = 1;
constexpr int64_t kLongestRest = 128;

// Equal tokens by which a place in the answer is found again, and where they are looked for.
constexpr int64_t kEqualTokens = 3;
constexpr int64_t kLookBack = 128;
constexpr int64_t kLookAhead = 512;

}  // namespace

int64_t DraftPace::Next(int64_t tokens) {
  rest_ = std::max<int64_t>(0, rest_ - tokens);
  return rest_ > 0 ? 0 : length_;
}

void DraftPace::Verified(int64_t right) {
  length_ = std::min(kLeastLength + 2 * right, most_);
  gain_ += (static_cast<double>(right) - gain_) / 4;
  last_rest_ = gain_ < kLeastGain ? std::min(kLeastLength + 2 * last_rest_, kLongestRest) : 0;
  rest_ = last_rest_;
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
