// Guesses the next tokens of a sample. The engine verifies guesses as rows beside the sample's next
// one and takes them while they are equal to its own draws: a guess changes the time, and nothing
// else. Owned by the request; confined to the engine thread after its construction.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "server/engine/types.h"

namespace dorad::engine {

// How many tokens the next guess has: as many as are likely enough to pay for their rows, and none
// for a while when guesses are wrong.
class DraftPace {
 public:
  explicit DraftPace(int64_t most) : most_(most) {}

  // Tokens to guess now, after `tokens` new ones. row_share: StepCost's, with a row for each
  // running sequence.
  int64_t Next(int64_t tokens, double row_share);
  // `right` of the guessed tokens were taken; all_right: they were all.
  void Verified(int64_t right, bool all_right);

 private:
  void Rest();

  const int64_t most_;
  int64_t longest_ = 16;
  // Of the last guesses, which weigh more than earlier ones.
  double right_ = 8, wrong_ = 0.5;
  double gain_ = 4;        // right tokens of a guess
  int64_t rest_ = 0;       // tokens to come before the next guess
  int64_t last_rest_ = 0;  // 0: guesses pay
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
