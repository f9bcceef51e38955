// Bounds the time that the shutdown of the process may take.
#pragma once

#include <atomic>
#include <memory>

#include "absl/time/time.h"

namespace dorad {

// Ends the process with `code` in some seconds. For a caller that logs why and then ends the
// process itself: writing the log may hang.
void EndSoon(int code);

// Ends the process when its shutdown takes too long, and logs the part that it waits for. Owned by
// App. Thread-safe.
class ShutdownWatchdog {
 public:
  // The shutdown waits for these parts, one after the other.
  enum class Part { kCalls, kChanges, kStep, kLoads };

  // Its destructor says that the shutdown now waits for `part`. A member of App, declared right
  // after the member that is the part, so that it is destroyed right before it.
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

  // Starts a thread that ends the process after `time`, whatever still runs: with 70 when it waits
  // for a step, with 0 when it waits for anything else. To be called once.
  void Begin(absl::Duration time);

 private:
  void WaitFor(Part part) { *part_ = part; }

  // Shared with the thread that ends the process, which outlives this.
  const std::shared_ptr<std::atomic<Part>> part_ =
      std::make_shared<std::atomic<Part>>(Part::kCalls);
};

}  // namespace dorad
