#include "server/engine/bad_words.h"

#include <algorithm>

namespace dorad::engine {

bool EndsWith(absl::Span<const TokenId> tokens, absl::Span<const TokenId> end) {
  return end.size() <= tokens.size() && std::equal(end.rbegin(), end.rend(), tokens.rbegin());
}

void AppendBans(absl::Span<const std::vector<TokenId>> bad_words,
                absl::Span<const TokenId> generated, bool newest_unknown,
                std::vector<TokenId>* banned, std::vector<ConditionalBan>* conditional) {
  for (const std::vector<TokenId>& word : bad_words) {
    const absl::Span<const TokenId> before = absl::MakeConstSpan(word).first(word.size() - 1);
    if (before.empty()) {
      banned->push_back(word.back());
    } else if (newest_unknown) {
      if (EndsWith(generated, before.first(before.size() - 1))) {
        conditional->push_back({before.back(), word.back()});
      }
    } else if (EndsWith(generated, before)) {
      banned->push_back(word.back());
    }
  }
}

}  // namespace dorad::engine
