#include "server/engine/step_cost.h"

#include <algorithm>

namespace dorad::engine {

void StepCost::Observe(int64_t rows, absl::Duration time) {
  constexpr double kKept = 0.98;
  const auto x = static_cast<double>(rows);
  const double y = absl::ToDoubleSeconds(time);
  weight_ = kKept * weight_ + 1;
  rows_ = kKept * rows_ + x;
  time_ = kKept * time_ + y;
  rows_rows_ = kKept * rows_rows_ + x * x;
  rows_time_ = kKept * rows_time_ + x * y;
  const double mean = rows_ / weight_;
  const double variance = rows_rows_ / weight_ - mean * mean;
  // Steps of nearly as many rows tell nothing.
  if (weight_ < 8 || variance < 0.1 * mean * mean) return;
  const double row = (rows_time_ / weight_ - mean * time_ / weight_) / variance;
  const double fixed = time_ / weight_ - row * mean;
  // No less: times are noisy where steps are short.
  free_rows_ = row > 0 ? std::clamp(fixed / row, 16.0, 4096.0) : 4096.0;
}

double StepCost::RowShare(int64_t rows) const {
  const auto count = static_cast<double>(std::max<int64_t>(rows, 1));
  return count / (free_rows_ + count);
}

DraftPrice StepCost::PriceOfDraft(int64_t sequences) const {
  // Alone, a sequence only makes the next step wait for this one's end.
  constexpr double kLeastPlace = 0.1;
  const auto count = static_cast<double>(std::max<int64_t>(sequences, 1));
  return {RowShare(sequences), std::max(1 - 1 / count, kLeastPlace)};
}

}  // namespace dorad::engine
