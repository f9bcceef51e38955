// Requests and tokens by adapter, in a bounded number of series: the busiest adapters have series
// of their own, the others share "other".
//
// A name takes a free slot when it is announced, or with its first request. Once a minute, at a
// scrape, a name without a slot takes the slot of a holder that had less than half of its tokens in
// that minute. The old holder's series ends with that scrape; its later counts are in "other". The
// new holder's series begins there, at 0; its earlier counts stay in "other". So no series ever
// falls while it lasts, and the sum over all of them is complete for every scraper. An adapter with
// the name "other" is counted there.
//
// Owned by Metrics. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "prometheus/metric_family.h"
#include "server/platform/metrics/metrics.h"

namespace dorad::internal {

class TopAdapters {
 public:
  explicit TopAdapters(int slots, std::function<absl::Time()> now = absl::Now);

  // name "": the base, which has its own series beside the slots ("(base)").
  void Count(const std::string& name, const Metrics::AdapterUse& use);
  // The name may be counted from now on.
  void Announce(const std::string& name);

  // The series for a scrape. When the period is over, reassigns the slots: then also those of the
  // new holders.
  std::vector<prometheus::MetricFamily> Collect();

 private:
  struct Holder {
    Metrics::AdapterUse use;  // since it took the slot
    int64_t recent = 0;       // tokens since the last reassignment
  };
  // Limit on names without a slot that are counted in one period; others wait for the next.
  static constexpr size_t kMaxWatched = 1024;

  // Returns the new holders.
  std::vector<std::string> Deal(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const size_t slots_;
  const std::function<absl::Time()> now_;
  absl::Mutex mu_;
  Metrics::AdapterUse base_ ABSL_GUARDED_BY(mu_);
  Metrics::AdapterUse other_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, Holder> holders_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, int64_t> watched_ ABSL_GUARDED_BY(mu_);  // recent tokens
  absl::Time dealt_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::internal
