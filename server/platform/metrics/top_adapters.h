// Requests and tokens by adapter, in a bounded number of series: the busiest adapters have series
// of their own, the others share "other".
//
// A name takes a free slot when it is announced, or with its first request. Once a minute, at a
// scrape, names without a slot that had more than twice the tokens of a holder in that minute take
// its slot. The series of who gives a slot up ends with that scrape; what it counts later is in
// "other". The series of who takes one begins there, at 0, and what it had before stays in "other".
// So no series ever falls while it lasts, and sums over all of them lose nothing to whoever
// scrapes. An adapter that is itself called "other" is counted there.
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

  // name "": the base, which has series of its own beside the slots ("(base)").
  void Count(const std::string& name, const Metrics::AdapterUse& use);
  // It may be counted from now on.
  void Announce(const std::string& name);

  // The series as they are, for a scrape. When it is time, deals the slots anew: then also those of
  // the new holders.
  std::vector<prometheus::MetricFamily> Collect();

 private:
  struct Holder {
    Metrics::AdapterUse use;  // since it has the slot
    int64_t recent = 0;       // tokens since the slots were dealt last
  };
  // Names without a slot that are watched in one period; those beyond wait for the next.
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
