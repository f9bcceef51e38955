// Bounds the time of the process's shutdown.
#pragma once

#include <atomic>
#include <memory>

#include "absl/time/time.h"

namespace dorad {

// Ends the process with `code` in some seconds. For a caller that first writes the log and then
// ends the process itself: writing the log may hang.
void EndSoon(int code);

// Ends the process when its shutdown takes too long, and logs the part it waits for. Owned by App.
// Thread-safe.
class ShutdownWatchdog {
 public:
  // The shutdown waits for these parts, one after the other.
  enum class Part { kCalls, kChanges, kStep, kLoads };

  // Its destructor marks the begin of the wait for `part`. A member of App, declared right after
  // the part's own member, so that it is destroyed right before it.
  class Phase {
   public:
    Phase(ShutdownWatchdog* watchdog, Part part) : watchdog_(watchdog), part_(part) {}
    ~Phase() { watchdog_->WaitFor(part_); }
    Phase(const Phase&) = delete;
    Phase& operator=(const Phase&) = delete;

   private:
    ShutdownWatchdog* const watchdog_;
    const Part part_;
  };

  // Starts a thread that ends the process after `time`: with 70 during the wait for a step, else
  // with 0. Call once.
  void Begin(absl::Duration time);

 private:
  void WaitFor(Part part) { *part_ = part; }

  // Shared with the thread that ends the process, which outlives this.
  const std::shared_ptr<std::atomic<Part>> part_ =
      std::make_shared<std::atomic<Part>>(Part::kCalls);
};

}  // namespace dorad
