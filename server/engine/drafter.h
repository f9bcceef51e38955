// Guesses the next tokens of a sample. The engine verifies guesses as rows beside the sample's next
// one and takes them while they are equal to its own draws: a guess changes the time, and nothing
// else. Owned by the request; confined to the engine thread after its construction.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "server/engine/types.h"

namespace dorad::engine {

// What a guess costs, in the time that its sequence takes of a step.
struct DraftPrice {
  double row = 0;    // StepCost's share, with a row for each running sequence
  double place = 0;  // after a right token the sequence has none in the step that begins ahead
};

// How many tokens the next guess of a source has: as many as are likely enough to pay for their
// rows. While guesses do not pay, they are compared with what comes, which costs no row.
class DraftPace {
 public:
  // most: tokens of a guess. trusts: guesses are taken for right until they are wrong; otherwise
  // the first one is only compared.
  DraftPace(int64_t most, bool trusts);

  // Tokens to guess now; 0: guesses do not pay.
  int64_t Next(const DraftPrice& price) const;
  // What a guess of so many tokens gains in the mean, in tokens: those that it saves, less its
  // price.
  double Gain(const DraftPrice& price, double tokens) const;
  // `right` of the guessed tokens were taken; all_right: they were all.
  void Verified(int64_t right, bool all_right);

  // Where Next is 0: tokens of a guess to compare; 0: one is being compared.
  int64_t NextToCompare() const;
  void Compare(absl::Span<const TokenId> guess);
  // The sample's new tokens.
  void Came(absl::Span<const TokenId> tokens);

 private:
  double RightShare() const { return right_ / (right_ + wrong_); }

  const int64_t most_;
  int64_t longest_ = 16;
  // Of the last guesses, which weigh more than earlier ones.
  double right_ = 8, wrong_ = 0.5;
  std::vector<TokenId> compared_;
  size_t equal_ = 0;  // tokens of that, so far
};

// The tokens of an answer that the caller expects. It is followed while the sample's tokens are
// equal, and again from where its tokens are those that the sample ends with.
class ExpectedAnswer {
 public:
  explicit ExpectedAnswer(std::vector<TokenId> tokens) : tokens_(std::move(tokens)) {}

  bool empty() const { return tokens_.empty(); }
  // At most `most` tokens after the generated ones, which have only grown since the last call;
  // empty: the place in the answer is lost or at its end.
  absl::Span<const TokenId> Next(absl::Span<const TokenId> generated, int64_t most);

 private:
  void Follow(absl::Span<const TokenId> generated);

  std::vector<TokenId> tokens_;
  size_t followed_ = 0;  // generated tokens
  int64_t place_ = 0;    // in tokens_, of the next token
  bool lost_ = false;
};

}  // namespace dorad::engine
