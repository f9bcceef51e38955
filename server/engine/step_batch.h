// The rows of a step in computing order: each adapter has one range of rows, in which sequences
// with the same first pages are neighbours, so that attention reads these once. Torch-free. Plain
// values; thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "server/engine/model_runner.h"

namespace dorad::engine {

// A row that needs logits.
struct WantedRow {
  int64_t row = 0;      // in the batch
  size_t sequence = 0;  // index in the caller's order
  int64_t want = 0;     // of the sequence's samples, or the row of its score
};

struct StepBatch {
  explicit StepBatch(absl::Span<const StepSequence> sequences);

  struct AdapterRows {
    const adapter::LoadedAdapter* adapter = nullptr;  // nullptr: base
    int64_t begin = 0;
    int64_t end = 0;
  };

  int64_t rows = 0;
  std::vector<size_t> order;       // caller's index of the i-th sequence in the batch
  std::vector<int64_t> row_begin;  // of the i-th sequence
  std::vector<AdapterRows> adapters;
  std::vector<WantedRow> samples;  // in the order of their sequences
  std::vector<WantedRow> scores;
};

// Appends rows [begin, begin + count) of `adapter` to the last range, or begins one. Ascending.
void AppendRows(const adapter::LoadedAdapter* adapter, int64_t begin, int64_t count,
                std::vector<StepBatch::AdapterRows>* to);

}  // namespace dorad::engine
