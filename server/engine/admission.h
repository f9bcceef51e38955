// The engine's door: which requests are let in, and what other threads want of the engine thread.
// Has the one table of the requests that are let in and have not ended, and owns them. Owned by
// Engine. Thread-safe; the requests themselves are the engine thread's once they are let in.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/adapter/registry/version.h"
#include "server/engine/request.h"
#include "server/engine/types.h"

namespace dorad {
class Metrics;
}

namespace dorad::engine {

// UNAVAILABLE (SHUTTING_DOWN) with a retry hint.
absl::Status ShuttingDown();
// UNAVAILABLE (ENGINE_PAUSED) with a retry hint.
absl::Status EnginePaused();

class Admission {
 public:
  using Message = absl::AnyInvocable<void()>;

  // metrics is borrowed.
  Admission(const EngineLimits& limits, Metrics* metrics) : metrics_(metrics), limits_(limits) {}

  // --- Any thread. Messages run on the engine thread in the order in which they came.

  // Takes the request into the table and has the engine thread call `enter` with it. Errors as
  // Engine::Submit; then the request is gone.
  using Enter = std::function<void(Request*)>;
  absl::StatusOr<RequestHandle> Admit(std::unique_ptr<Request> request, Enter enter);
  void Post(Message message);
  // Whether new requests are refused with SERVER_SLEEPING.
  void SetSleeping(bool refuses);
  // From now on new requests are refused with SHUTTING_DOWN.
  void StopAdmission();
  // Likewise, and the engine thread is told to end.
  void Close();

  EngineLimits limits() const;
  // For requests that have not been let in yet.
  void SetLimits(const EngineLimits& limits);

  // True when nobody is in and no message is left.
  bool idle() const;
  // Requests in the table.
  int64_t live_count() const;
  struct Queue {
    int64_t requests = 0;
    int64_t tokens = 0;
  };
  // Of requests that have not started.
  Queue queue() const;
  AdaptersInUse adapters_in_use() const;

  // --- The engine thread.

  // The messages that have come; waits for one, or for Close, up to `patience`. *stop: after Close,
  // when these are the last.
  std::vector<Message> Take(absl::Duration patience, bool* stop);
  // New requests that one of the scopes covers are refused with ENGINE_PAUSED. Some may have been
  // let in before and not have entered.
  void SetRefused(std::vector<adapter::AdapterRef> scopes);
  // A request that was let in waits no longer; each once.
  void Started(const Request& request);
  // Those of the table that have entered.
  std::vector<Request*> Live() const;
  // nullptr: there is none.
  Request* Find(const std::string& key) const;
  // Takes it out of the table: its id is free again. REQUIRES: it has started.
  std::unique_ptr<Request> Ended(Request* request);

 private:
  absl::Status Check(const Request& request, int64_t tokens) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Metrics* const metrics_;
  mutable absl::Mutex mu_;
  EngineLimits limits_ ABSL_GUARDED_BY(mu_);
  std::vector<Message> inbox_ ABSL_GUARDED_BY(mu_);
  struct Users {
    int64_t running = 0;
    int64_t waiting = 0;
  };

  // By Request::key.
  absl::flat_hash_map<std::string, std::unique_ptr<Request>> live_ ABSL_GUARDED_BY(mu_);
  uint64_t next_number_ ABSL_GUARDED_BY(mu_) = 1;
  std::map<std::string, Users> users_ ABSL_GUARDED_BY(mu_);  // by adapter
  Queue queue_ ABSL_GUARDED_BY(mu_);
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  bool sleeping_ ABSL_GUARDED_BY(mu_) = false;  // and refusing
  bool draining_ ABSL_GUARDED_BY(mu_) = false;  // StopAdmission
  std::vector<adapter::AdapterRef> refused_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::engine
