#include "server/engine/ngram_index.h"

#include <algorithm>

#include "absl/hash/hash.h"
#include "absl/types/span.h"

namespace dorad::engine {
namespace {

absl::Span<const TokenId> Before(const std::vector<TokenId>& text, int64_t end) {
  return absl::MakeConstSpan(text).subspan(end - NgramIndex::kTokens, NgramIndex::kTokens);
}

}  // namespace

void NgramIndex::Add(size_t text) {
  const std::vector<TokenId>& tokens = *texts_[text];
  // What nothing follows yet comes with the next token.
  int64_t& end = added_[text];
  for (end = std::max(end, kTokens); end < static_cast<int64_t>(tokens.size()); ++end) {
    places_[absl::HashOf(Before(tokens, end))] = {static_cast<int32_t>(text),
                                                  static_cast<int32_t>(end)};
  }
}

std::vector<TokenId> NgramIndex::Next(size_t text, int64_t most) const {
  const auto size = static_cast<int64_t>(texts_[text]->size());
  if (size < kTokens) return {};
  const absl::Span<const TokenId> last = Before(*texts_[text], size);
  const auto found = places_.find(absl::HashOf(last));
  if (found == places_.end()) return {};
  const std::vector<TokenId>& from = *texts_[found->second.text];
  if (Before(from, found->second.end) != last) return {};
  const auto begin = from.begin() + found->second.end;
  const auto end = begin + std::min<int64_t>(most, from.end() - begin);
  return {begin, std::find_if(begin, end, [](TokenId token) { return token < 0; })};
}

}  // namespace dorad::engine
