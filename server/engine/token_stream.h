// The mailbox between the engine and the one consumer of a request. The engine never waits for a
// consumer: deltas of a sample that have not been taken are merged, so memory is bounded by the
// request's own n × max_tokens positions. Shared by both sides. Thread-safe.
#pragma once

#include <atomic>
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
  // final_only: deltas are held back until their sample has finished. meter: gets the number of new
  // tokens as they are pushed, on the engine thread; must be short.
  explicit TokenStream(bool final_only, std::function<void(int64_t)> meter = nullptr)
      : final_only_(final_only), meter_(std::move(meter)) {}

  // --- Engine side.
  void Push(SampleDelta delta);
  // The last call of the engine, exactly once. OK after the last sample's finish.
  void Close(absl::Status status);
  // True once the consumer has gone; the engine drops the request when it is told to look.
  bool cancelled() const { return cancelled_.load(std::memory_order_acquire); }

  // --- Consumer side.
  // One delta to send, oldest sample first; nullopt when there is none now.
  std::optional<SampleDelta> Take();
  // The final status once Close was called and every delta has been taken.
  std::optional<absl::Status> Ended();
  // Called after Push (of something takeable) and Close, on the engine thread, under this object's
  // lock: it must be short and must not call back into the stream. nullptr removes it; after
  // SetWaker returns the old one is not running and never runs again.
  void SetWaker(std::function<void()> waker);
  void Cancel() { cancelled_.store(true, std::memory_order_release); }

 private:
  const bool final_only_;
  const std::function<void(int64_t)> meter_;
  std::atomic<bool> cancelled_{false};
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

  void Cancel() { cancelled_.store(true, std::memory_order_release); }
  bool cancelled() const { return cancelled_.load(std::memory_order_acquire); }
  // Once. What `done` holds is let go.
  void Finish(absl::StatusOr<ScoreResult> result) {
    std::exchange(done_, nullptr)(std::move(result));
  }

 private:
  std::atomic<bool> cancelled_{false};
  Done done_;
};

}  // namespace dorad::engine
