// The process_* metrics every Prometheus client exports, read from /proc. Thread-safe.
#pragma once

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "prometheus/registry.h"

namespace dorad::internal {

class ProcessMetrics {
 public:
  explicit ProcessMetrics(prometheus::Registry* registry);

  // Reads new values. After a failure a metric keeps its last value.
  void Refresh();

 private:
  absl::Mutex mu_;
  prometheus::Counter& cpu_seconds_ ABSL_GUARDED_BY(mu_);
  prometheus::Gauge& resident_bytes_;
  prometheus::Gauge& virtual_bytes_;
  prometheus::Gauge& open_fds_;
  prometheus::Gauge& max_fds_;
  prometheus::Gauge& threads_;
};

}  // namespace dorad::internal
