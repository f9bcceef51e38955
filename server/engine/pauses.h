// The pauses of requests, the refusals of new requests, and the callers that wait for a pause to
// take effect. The base's reference stands for every request. Confined to the engine thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/adapter/registry/version.h"
#include "server/engine/request.h"
#include "server/platform/instant.h"

namespace dorad::engine {

// "12.3s".
std::string ShortTime(Instant from, Instant to);

class Pauses {
 public:
  // Whether a pause of the scope covers the request.
  static bool Covers(const adapter::AdapterRef& scope, const Request& request) {
    return scope.is_base() || request.Holds(scope);
  }

  // As Engine::PauseDone.
  using Done = std::function<void(absl::StatusOr<int>)>;
  // A caller that waits for the requests of a scope to end.
  struct Waiter {
    uint64_t pause_id = 0;
    int requests = 0;
    Done done;
  };

  // A pause that stops or refuses requests.
  struct Stop {
    adapter::AdapterRef scope;
    Instant since;
    bool waits = false;  // not in force yet: a caller waits for the scope's requests to end
  };
  // "adapter policy@1 has been paused for 12.3s; Resume of policy@1 ends the pause".
  static std::string Explain(const Stop& stop, Instant now);

  // Limits on pauses of adapters, in force or waited for: of all, and of one tenant.
  static constexpr int kMost = 1024;
  static constexpr int kMostOfTenant = 64;
  // OK: the scope exists or may be added. RESOURCE_EXHAUSTED (PAUSES_FULL). nullopt: no tenant.
  absl::Status CheckRoom(const adapter::AdapterRef& scope,
                         const std::optional<std::string>& tenant) const;

  // Puts the pause in force.
  void Begin(const adapter::AdapterRef& scope, const std::optional<std::string>& tenant);
  // Ends the pause of the scope; for the base, all pauses.
  void End(const adapter::AdapterRef& scope);
  // Lets the requests of the scope run to their end in spite of pauses of adapters; for the base,
  // in spite of all pauses.
  void Wait(const adapter::AdapterRef& scope, const std::optional<std::string>& tenant,
            Waiter waiter);

  // Puts each waited-for scope in force for which `is_over(scope, &witness)` is true; returns the
  // waiters. is_over may store a request in the scope's witness for its next call.
  using IsOver = std::function<bool(const adapter::AdapterRef& scope, std::string* witness)>;
  std::vector<Waiter> Complete(const IsOver& is_over);
  // The waiters whose scope a pause of `scope` covers.
  std::vector<Waiter> RemoveWaitersWithin(const adapter::AdapterRef& scope);
  // The waiters of the scope; for the base, all waiters.
  std::vector<Waiter> RemoveWaiters(const adapter::AdapterRef& scope);
  // nullopt: no such waiter.
  std::optional<Waiter> Cancel(uint64_t pause_id);

  // Whether a pause of one of its adapters stops the request.
  bool Freezes(const Request& request) const;
  // The pause that stops the request, its adapter's or one of everything; nullopt: none.
  std::optional<Stop> StopOf(const Request& request) const;
  // The pause that refuses the request; nullopt: none.
  std::optional<Stop> RefusalOf(const Request& request) const;
  // Whether a caller waits for a wider scope.
  bool IsPartOfWait(const adapter::AdapterRef& scope) const;

  // Whether everything is stopped.
  bool all() const { return all_; }
  // Adapters whose requests are frozen.
  const std::vector<adapter::AdapterRef>& stopped() const { return stopped_; }
  // Scopes with waiters.
  const std::vector<adapter::AdapterRef>& waiting() const { return waiting_; }
  // Pauses whose new requests are refused: they are or were waited for.
  const std::vector<Stop>& refused() const { return refused_; }

 private:
  // One for each scope that is in force or waited for.
  struct Pause {
    adapter::AdapterRef scope;
    std::optional<std::string> tenant;
    bool in_force = false;
    bool refuses = false;  // it was waited for
    Instant since;         // in force, or else waited for
    std::vector<Waiter> waiters;
    std::string witness;
  };

  static Stop StopBy(const Pause& pause) { return {pause.scope, pause.since, !pause.in_force}; }
  static void PutInForce(Pause& pause);
  bool Stops(const Pause& pause) const;
  Pause& FindOrAdd(const adapter::AdapterRef& scope, const std::optional<std::string>& tenant);
  template <typename Condition>
  std::vector<Waiter> TakeIf(Condition condition);
  void Update();

  std::vector<Pause> pauses_;  // in order of arrival
  // Derived from pauses_ by Update.
  bool all_ = false;
  std::vector<adapter::AdapterRef> stopped_, waiting_;
  std::vector<Stop> refused_;
};

}  // namespace dorad::engine
