#include "server/engine/step_batch.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace dorad::engine {

StepBatch::StepBatch(absl::Span<const StepSequence> sequences) : order(sequences.size()) {
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const StepSequence &x = sequences[a], &y = sequences[b];
    return x.adapter != y.adapter ? std::less<>()(x.adapter, y.adapter) : x.pages < y.pages;
  });
  std::vector<int64_t> last_row(sequences.size());
  for (const size_t index : order) {
    const StepSequence& s = sequences[index];
    const auto count = static_cast<int64_t>(s.tokens.size());
    row_begin.push_back(rows);
    last_row[index] = rows + count - 1;
    if (count > 0) AppendRows(s.adapter, rows, count, &adapters);
    if (s.score != nullptr) {
      for (int64_t r = 0; r < count; ++r) scores.push_back({rows + r, index, r});
    }
    rows += count;
  }
  for (const size_t index : order) {
    const StepSequence& s = sequences[index];
    const auto count = static_cast<int64_t>(s.samples.size());
    const int64_t end = last_row[s.row_of >= 0 ? static_cast<size_t>(s.row_of) : index] + 1;
    for (int64_t i = 0; i < count; ++i) samples.push_back({end - count + i, index, i});
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
