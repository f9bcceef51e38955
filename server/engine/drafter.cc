#include "server/engine/drafter.h"

#include <algorithm>
#include <cmath>

namespace dorad::engine {
namespace {

constexpr int64_t kLeastLength = 4;
// Guesses that were all right are no proof of the next one.
constexpr double kDoubt = 0.05;

// Equal tokens by which a place in the answer is found again, and where they are looked for.
constexpr int64_t kEqualTokens = 3;
constexpr int64_t kLookBack = 128;
constexpr int64_t kLookAhead = 512;

}  // namespace

DraftPace::DraftPace(int64_t most, bool trusts) : most_(most) {
  if (trusts) return;
  longest_ = kLeastLength;
  right_ = 0;
  // In a large batch one right guess is too little: it may be a phrase.
  wrong_ = 2;
}

double DraftPace::Gain(const DraftPrice& price, double tokens) const {
  // The k-th token is right with probability p to the k. Right, it saves its sequence's part of a
  // step; it costs a row in any case. If the first is wrong, the row that goes on behind it counts.
  const double p = RightShare();
  const double saved = p * (1 - std::pow(p, tokens)) / (1 - p);
  return saved - price.row * tokens - p * price.place;
}

int64_t DraftPace::Next(const DraftPrice& price) const {
  // Up to the token that no longer pays for its row.
  const double pays = std::log(price.row) / std::log(RightShare());
  const double length = std::min(pays, static_cast<double>(most_));
  if (Gain(price, length) < 0) return 0;
  return static_cast<int64_t>(std::min(length, static_cast<double>(longest_)));
}

void DraftPace::Verified(int64_t right, bool all_right) {
  constexpr double kKept = 0.75;
  longest_ = std::min(kLeastLength + 2 * right, most_);
  right_ = kKept * right_ + static_cast<double>(right);
  wrong_ = kKept * wrong_ + (all_right ? kDoubt : 1);
}

int64_t DraftPace::NextToCompare() const { return compared_.empty() ? longest_ : 0; }

void DraftPace::Compare(absl::Span<const TokenId> guess) {
  compared_.assign(guess.begin(), guess.end());
  equal_ = 0;
}

void DraftPace::Came(absl::Span<const TokenId> tokens) {
  for (size_t i = 0; i < tokens.size() && !compared_.empty(); ++i) {
    const bool is_equal = compared_[equal_] == tokens[i];
    equal_ += is_equal ? 1 : 0;
    if (is_equal && equal_ < compared_.size()) continue;
    Verified(static_cast<int64_t>(equal_), is_equal);
    compared_.clear();
  }
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
