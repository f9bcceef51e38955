// Where the samples of a request go on after the last tokens of one of them: in the prompt, in
// their own text or in that of a sibling. Owned by the request; confined to the engine thread.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "server/engine/types.h"

namespace dorad::engine {

class NgramIndex {
 public:
  // Tokens that must be equal.
  static constexpr int64_t kTokens = 3;

  // texts: of all samples, borrowed; they begin with the same `prompt` tokens, which the first one
  // adds for all.
  NgramIndex(std::vector<const std::vector<TokenId>*> texts, int64_t prompt)
      : texts_(std::move(texts)), added_(texts_.size(), prompt) {
    added_.front() = 0;
  }

  // Adds the new tokens of a text, which has only grown since its last call.
  void Add(size_t text);
  // At most `most` tokens that followed the last tokens of the text at their latest other place;
  // empty: there is none. They hold no image's tokens.
  std::vector<TokenId> Next(size_t text, int64_t most) const;

 private:
  struct Place {
    int32_t text = 0;
    int32_t end = 0;  // of the tokens
  };
  const std::vector<const std::vector<TokenId>*> texts_;
  absl::flat_hash_map<uint64_t, Place> places_;  // by the tokens' hash
  std::vector<int64_t> added_;                   // of each text: the next place
};

}  // namespace dorad::engine
