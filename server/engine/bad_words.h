// Token sequences that a sample must not contain, as bans of single tokens. Pure and therefore
// thread-safe.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "server/engine/model_runner.h"

namespace dorad::engine {

// Whether the last tokens are `end`.
bool EndsWith(absl::Span<const TokenId> tokens, absl::Span<const TokenId> end);

// Appends the bans for the token after `generated`. after_unknown: so many of these come after a
// token that is not known yet and not among them; nullopt: all are known.
void AppendBans(absl::Span<const std::vector<TokenId>> bad_words,
                absl::Span<const TokenId> generated, std::optional<size_t> after_unknown,
                std::vector<TokenId>* banned, std::vector<ConditionalBan>* conditional);

}  // namespace dorad::engine
