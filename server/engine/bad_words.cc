#include "server/engine/bad_words.h"

#include <algorithm>

namespace dorad::engine {

bool EndsWith(absl::Span<const TokenId> tokens, absl::Span<const TokenId> end) {
  return end.size() <= tokens.size() && std::equal(end.rbegin(), end.rend(), tokens.rbegin());
}

void AppendBans(absl::Span<const std::vector<TokenId>> bad_words,
                absl::Span<const TokenId> generated, std::optional<size_t> after_unknown,
                std::vector<TokenId>* banned, std::vector<ConditionalBan>* conditional) {
  for (const std::vector<TokenId>& word : bad_words) {
    const absl::Span<const TokenId> before = absl::MakeConstSpan(word).first(word.size() - 1);
    if (before.empty()) {
      banned->push_back(word.back());
    } else if (after_unknown.value_or(before.size()) >= before.size()) {
      if (EndsWith(generated, before)) banned->push_back(word.back());
    } else {
      const absl::Span<const TokenId> after = before.last(*after_unknown);
      const size_t unknown = before.size() - *after_unknown - 1;
      const absl::Span<const TokenId> known = generated.first(generated.size() - *after_unknown);
      if (EndsWith(generated, after) && EndsWith(known, before.first(unknown))) {
        conditional->push_back({before[unknown], word.back()});
      }
    }
  }
}

}  // namespace dorad::engine
