#include "server/engine/step_batch.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace dorad::engine {

StepBatch::StepBatch(absl::Span<const StepSequence> sequences) : order(sequences.size()) {
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::less<>()(sequences[a].adapter, sequences[b].adapter);
  });
  for (const size_t index : order) {
    const StepSequence& s = sequences[index];
    const auto count = static_cast<int64_t>(s.tokens.size());
    row_begin.push_back(rows);
    AppendRows(s.adapter, rows, count, &adapters);
    if (s.sample != nullptr) {
      samples.push_back({rows + count - 1, index, count - 1});
    } else if (s.score != nullptr) {
      for (int64_t r = 0; r < count; ++r) scores.push_back({rows + r, index, r});
    }
    rows += count;
  }
}

void AppendRows(const adapter::LoadedAdapter* adapter, int64_t begin, int64_t count,
                std::vector<StepBatch::AdapterRows>* to) {
  if (!to->empty() && to->back().adapter == adapter) {
    to->back().end = begin + count;
  } else {
    to->push_back({adapter, begin, begin + count});
  }
}

}  // namespace dorad::engine
