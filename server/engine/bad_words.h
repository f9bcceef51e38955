// Token sequences that a sample must not contain, as bans of single tokens. Pure and therefore
// thread-safe.
#pragma once

#include <vector>

#include "absl/types/span.h"
#include "server/engine/model_runner.h"

namespace dorad::engine {

// Whether the last tokens are `end`.
bool EndsWith(absl::Span<const TokenId> tokens, absl::Span<const TokenId> end);

// Appends the bans for the token after `generated`; with newest_unknown one more token, which is
// not known yet, lies between.
void AppendBans(absl::Span<const std::vector<TokenId>> bad_words,
                absl::Span<const TokenId> generated, bool newest_unknown,
                std::vector<TokenId>* banned, std::vector<ConditionalBan>* conditional);

}  // namespace dorad::engine
