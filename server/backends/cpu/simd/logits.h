// One row of logits: its softmax, its largest entries. Used by sampling and scoring, which
// therefore report equal log-probabilities for equal logits. Not thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace dorad::ops::cpu {

struct Candidate {
  float logit;
  int32_t id;
};
// Larger logits first, then smaller ids.
inline bool Before(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

class LogitRow {
 public:
  // logits / temperature (up to a constant), with banned ids at -inf. Borrows `logits` when
  // temperature is 1 and nothing is banned.
  LogitRow(absl::Span<const float> logits, float temperature, absl::Span<const int32_t> banned);

  // false: a NaN or +inf among the logits, or none above -inf.
  bool usable() const { return usable_; }
  int64_t size() const { return static_cast<int64_t>(logits_.size()); }
  float operator[](int64_t id) const { return logits_[id]; }
  float maximum() const { return maximum_; }
  int32_t ArgMax() const;

  // Of groups, see Kernels::group_max.
  absl::Span<const float> maxima() const { return maxima_; }

  // Sum of exp(logit - maximum).
  void SumExp();
  double total() const { return total_; }
  // log softmax of a logit of this row. REQUIRES: SumExp was called.
  float LogProb(float logit) const;

  // The k first candidates in order; all when k >= size().
  std::vector<Candidate> Top(int64_t k) const;
  // All with logit >= bound, in no order.
  std::vector<Candidate> AtLeast(float bound) const;

 private:
  absl::Span<const float> logits_;
  std::vector<float> own_;
  std::vector<float> maxima_;
  float maximum_ = 0.0f;
  double total_ = 0.0;
  double log_total_ = 0.0;
  bool usable_ = true;
};

}  // namespace dorad::ops::cpu
