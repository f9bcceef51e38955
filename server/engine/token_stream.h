// The mailbox between the engine and the one consumer of a request. The engine never waits for a
// consumer: deltas of a sample that have not been taken are merged, so memory is bounded by the
// request's own n × max_tokens positions, and its prompt's if they are scored. Shared by both
// sides. Thread-safe.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/types.h"

namespace dorad::engine {

class TokenStream {
 public:
  // final_only: a sample's deltas wait until it has finished.
  explicit TokenStream(bool final_only) : final_only_(final_only) {}

  // --- Engine side.
  void Push(SampleDelta delta);
  // The last call of the engine, exactly once. OK after the last sample's finish.
  void Close(absl::Status status);

  // --- Consumer side.
  // The next delta, oldest sample first; nullopt: none yet.
  std::optional<SampleDelta> Take();
  // The final status once Close was called and every delta has been taken.
  std::optional<absl::Status> Ended();
  // Called after Push (if Take would return a delta) and Close, on the engine thread, under this
  // object's lock: it must be short and must not call back into the stream. nullptr removes it;
  // after SetWaker returns, the old one does not run.
  void SetWaker(std::function<void()> waker);

 private:
  const bool final_only_;
  absl::Mutex mu_;
  std::deque<SampleDelta> deltas_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Status> closed_ ABSL_GUARDED_BY(mu_);
  std::function<void()> waker_ ABSL_GUARDED_BY(mu_);
};

// The same for Score, which has one result: `done` runs once, on the engine thread; must not block.
class ScoreTicket {
 public:
  using Done = std::function<void(absl::StatusOr<ScoreResult>)>;
  explicit ScoreTicket(Done done) : done_(std::move(done)) {}

  // Call once. Also destroys `done`.
  void Finish(absl::StatusOr<ScoreResult> result) {
    std::exchange(done_, nullptr)(std::move(result));
  }

 private:
  Done done_;
};

}  // namespace dorad::engine
