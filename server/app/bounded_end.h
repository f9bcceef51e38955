// The end of a process in which something may hang.
#pragma once

#include <atomic>
#include <memory>

#include "absl/time/time.h"

namespace dorad {

// Ends the process with `code` in some seconds, for a caller that ends it itself when it has said
// why: the log may be what hangs.
void EndSoon(int code);

// Ends the process when its orderly end takes too long, and says what that waits for. Owned by App.
// Thread-safe.
class BoundedEnd {
 public:
  // What the end waits for, one after the other.
  enum class Part { kCalls, kChanges, kStep, kLoads };

  // Waits for `part` from its own end on: stands behind the member that is the part.
  class Turn {
   public:
    Turn(BoundedEnd* end, Part part) : end_(end), part_(part) {}
    ~Turn() { end_->WaitFor(part_); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    BoundedEnd* const end_;
    const Part part_;
  };

  // The process has ended in `time`, whatever still runs. Once.
  void Begin(absl::Duration time);

 private:
  void WaitFor(Part part) { *part_ = part; }

  // Shared with the thread that ends the process, which outlives this.
  const std::shared_ptr<std::atomic<Part>> part_ =
      std::make_shared<std::atomic<Part>>(Part::kCalls);
};

}  // namespace dorad
