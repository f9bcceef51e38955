// The engine thread's figures, published after each turn. Owned by Engine. Thread-safe.
#pragma once

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/engine/request.h"
#include "server/engine/types.h"

namespace dorad::engine {

class StatsBoard {
 public:
  // Also a heartbeat.
  void Publish(EngineStats stats) {
    absl::MutexLock lock(&mu_);
    stats_ = std::move(stats);
    published_ = SteadyNow();
  }

  // The figures of the last Publish.
  EngineStats stats() const {
    absl::MutexLock lock(&mu_);
    return stats_;
  }
  absl::Duration age() const {
    absl::MutexLock lock(&mu_);
    return Between(published_, SteadyNow());
  }

 private:
  mutable absl::Mutex mu_;
  EngineStats stats_ ABSL_GUARDED_BY(mu_);
  Instant published_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::engine
