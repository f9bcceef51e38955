// The tokens of a sequence with their numbers of occurrences, for penalties. Owned by the request's
// sample; confined to the engine thread after its construction.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "server/engine/model_runner.h"

namespace dorad::engine {

class TokenUses {
 public:
  void AddPrompt(absl::Span<const TokenId> prompt);
  void AddGenerated(TokenId token);

  // Distinct tokens in order of their first use.
  absl::Span<const TokenUse> list() const { return uses_; }

 private:
  TokenUse& Of(TokenId token);

  std::vector<TokenUse> uses_;
  absl::flat_hash_map<TokenId, size_t> places_;  // in uses_
};

}  // namespace dorad::engine
