// How many pages of the KV cache a sequence needs. Plain values and therefore thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "server/engine/model_runner.h"

namespace dorad::engine {

// Blocks of kKvPageTokens positions for so many tokens.
inline int64_t BlocksOf(int64_t tokens) { return (tokens + kKvPageTokens - 1) / kKvPageTokens; }

struct KvNeeds {
  std::vector<int64_t> windows = {0};  // ModelRunner's
  int64_t state_pages = 0;             // ModelRunner's
  int64_t step_tokens = 0;             // the most rows of a step

  int64_t groups() const { return static_cast<int64_t>(windows.size()); }
  // Blocks that a group's rows of one step see or write at most: a sequence gets no more at once.
  int64_t BlocksAtOnce(int64_t window) const { return BlocksOf(window + step_tokens) + 1; }
  // The most pages that a sequence of so many tokens holds, those of its states included.
  int64_t PagesFor(int64_t tokens) const;
  // The tokens of the longest sequence that needs no more pages.
  int64_t TokensIn(int64_t pages) const;
};

// Of a runner's sequences, with steps of at most so many rows.
KvNeeds NeedsOf(const ModelRunner& runner, int64_t step_tokens);

}  // namespace dorad::engine
