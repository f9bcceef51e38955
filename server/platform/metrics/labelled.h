// A family of counters or histograms by label values, with a bound on their number.
//
// prometheus-cpp hashes all labels under a lock at each look-up and lets series grow for ever; this
// class keeps its series and counts values beyond the bound as "other". Thread-safe.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "prometheus/family.h"

namespace dorad::internal {

template <typename Metric, size_t kLabels>
class Labelled {
 public:
  using Values = std::array<std::string, kLabels>;
  static constexpr size_t kMaxSeries = 256;

  // args: arguments of the metric after its labels (bucket boundaries of a histogram).
  template <typename... Args>
  Labelled(prometheus::Family<Metric>* family, std::array<const char*, kLabels> names,
           const Args&... args)
      : names_(names), make_([family, args...](const prometheus::Labels& labels) {
          return &family->Add(labels, args...);
        }) {}

  Metric& Of(const Values& values) {
    {
      absl::ReaderMutexLock lock(&mu_);
      const auto found = series_.find(values);
      if (found != series_.end()) return *found->second;
    }
    absl::MutexLock lock(&mu_);
    if (series_.size() < kMaxSeries || series_.count(values) > 0) return Make(values);
    Values other;
    other.fill("other");
    return Make(other);
  }

 private:
  Metric& Make(const Values& values) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto [position, inserted] = series_.try_emplace(values, nullptr);
    if (inserted) {
      prometheus::Labels labels;
      for (size_t i = 0; i < kLabels; ++i) labels[names_[i]] = values[i];
      position->second = make_(labels);
    }
    return *position->second;
  }

  const std::array<const char*, kLabels> names_;
  const std::function<Metric*(const prometheus::Labels&)> make_;
  absl::Mutex mu_;
  std::map<Values, Metric*> series_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::internal
