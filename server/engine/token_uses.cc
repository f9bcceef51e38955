#include "server/engine/token_uses.h"

namespace dorad::engine {

TokenUse& TokenUses::Of(TokenId token) {
  const auto [place, is_new] = places_.try_emplace(token, uses_.size());
  if (is_new) uses_.push_back({token, 0});
  return uses_[place->second];
}

void TokenUses::AddPrompt(absl::Span<const TokenId> prompt) {
  for (const TokenId token : prompt) Of(token).count |= TokenUse::kInPrompt;
}

void TokenUses::AddGenerated(TokenId token) { Of(token).count += TokenUse::kGenerated; }

}  // namespace dorad::engine
