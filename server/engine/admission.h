// Admission of requests, and the queue of messages for the engine thread. Owns the table of
// admitted requests that have not ended. Owned by Engine. Thread-safe; after its admission only the
// engine thread uses a request.
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
#include "server/engine/pauses.h"
#include "server/engine/request.h"
#include "server/engine/types.h"

namespace dorad {
class Metrics;
}

namespace dorad::engine {

// UNAVAILABLE (SHUTTING_DOWN) with a retry hint.
absl::Status ShuttingDown();
// UNAVAILABLE (ENGINE_PAUSED) with a retry hint; names the pause.
absl::Status EnginePaused(const Pauses::Stop& stop);

class Admission {
 public:
  using Message = absl::AnyInvocable<void()>;

  // metrics is borrowed.
  Admission(const EngineLimits& limits, Metrics* metrics) : metrics_(metrics), limits_(limits) {}

  // --- Any thread. Messages run on the engine thread in order of arrival.

  // Adds the request to the table; the engine thread then calls `enter` with it. Errors as
  // Engine::Submit; an error destroys the request.
  using Enter = std::function<void(Request*)>;
  absl::StatusOr<RequestHandle> Admit(std::unique_ptr<Request> request, Enter enter);
  void Post(Message message);
  // Whether new requests are refused with SERVER_SLEEPING.
  void SetSleeping(bool refuses);
  // From now on new requests are refused with SHUTTING_DOWN.
  void StopAdmission();
  // As StopAdmission; the engine thread also ends.
  void Close();

  EngineLimits limits() const;
  // For requests that are not admitted yet.
  void SetLimits(const EngineLimits& limits);

  // True when the table and the message queue are empty.
  bool idle() const;
  // Requests in the table.
  int64_t live_count() const;
  struct Queue {
    int64_t requests = 0;
    int64_t tokens = 0;
  };
  // Requests that have not started.
  Queue queue() const;
  AdaptersInUse adapters_in_use() const;

  // --- The engine thread.

  // Returns the queued messages; waits up to `patience` for one or for Close. *stop: Close was
  // called and no message follows these.
  std::vector<Message> Take(absl::Duration patience, bool* stop);
  // Refuses new requests of these pauses with ENGINE_PAUSED. Requests that were admitted before may
  // still enter.
  void SetRefused(std::vector<Pauses::Stop> pauses);
  // An admitted request has left the queue. Once for each request.
  void Started(const Request& request);
  // The requests that have entered.
  std::vector<Request*> Live() const;
  // nullptr: no such request.
  Request* Find(const std::string& key) const;
  // Removes the request and frees its id. REQUIRES: it has started.
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
  bool sleeping_ ABSL_GUARDED_BY(mu_) = false;  // requests are refused
  bool draining_ ABSL_GUARDED_BY(mu_) = false;  // after StopAdmission
  std::vector<Pauses::Stop> refused_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::engine
