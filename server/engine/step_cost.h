// What a row adds to a step's time, from the steps so far. Owned by the engine loop; confined to
// the engine thread.
#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "server/engine/drafter.h"

namespace dorad::engine {

class StepCost {
 public:
  // Of a step without prompts: a row costs less among thousands.
  void Observe(int64_t rows, absl::Duration time);

  // The share of the time of a step with so many rows that each of them adds, times the rows: 0 if
  // rows are free, 1 if a step takes no time but theirs.
  double RowShare(int64_t rows) const;
  // With so many running sequences.
  DraftPrice PriceOfDraft(int64_t sequences) const;

 private:
  // Sums over the steps, of which later ones weigh more: least squares of time = fixed + rows ×
  // row.
  double weight_ = 0, rows_ = 0, time_ = 0, rows_rows_ = 0, rows_time_ = 0;
  // Rows that take as long as what a step takes without any. A guess until rows have varied.
  double free_rows_ = 96;
};

}  // namespace dorad::engine
