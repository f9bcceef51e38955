#include "server/engine/kv_needs.h"

#include <algorithm>

namespace dorad::engine {

int64_t KvNeeds::PagesFor(int64_t tokens) const {
  int64_t pages = kMostStates * state_pages;
  for (const int64_t window : windows) {
    // A window's pages stay until the rows that wrote them have landed: those of the step in
    // flight, beside those of the next one.
    const int64_t most = BlocksOf(std::max(window, step_tokens) + step_tokens) + 1;
    pages += window > 0 ? std::min(BlocksOf(tokens), most) : BlocksOf(tokens);
  }
  return pages;
}

int64_t KvNeeds::TokensIn(int64_t pages) const {
  // Blocks: `low` fit, `high` do not, or are more than any sequence has.
  int64_t low = 0, high = int64_t{1} << 40;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (PagesFor(middle * kKvPageTokens) <= pages ? low : high) = middle;
  }
  return low * kKvPageTokens;
}

KvNeeds NeedsOf(const ModelRunner& runner, int64_t step_tokens) {
  return {runner.windows(), runner.state_pages(), step_tokens};
}

}  // namespace dorad::engine
