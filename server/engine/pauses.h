// Which requests pauses have stopped, which new ones they refuse, and who waits for a pause to take
// effect. The base's reference stands for every request. Confined to the engine thread.
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

namespace dorad::engine {

class Pauses {
 public:
  // Whether a pause of the scope is about the request.
  static bool Covers(const adapter::AdapterRef& scope, const Request& request) {
    return scope.is_base() || request.Holds(scope);
  }

  // As Engine::PauseDone.
  using Done = std::function<void(absl::StatusOr<int>)>;
  // Somebody who waits for the requests of a scope to end.
  struct Waiter {
    uint64_t pause_id = 0;
    int requests = 0;
    Done done;
  };

  // Scopes of adapters, in force or waited for, that there may be, and that one tenant may have.
  static constexpr int kMost = 1024;
  static constexpr int kMostOfTenant = 64;
  // OK: the scope is there, or may come. RESOURCE_EXHAUSTED (PAUSES_FULL). nullopt: nobody's.
  absl::Status CheckRoom(const adapter::AdapterRef& scope,
                         const std::optional<std::string>& tenant) const;

  // In force from now on.
  void Begin(const adapter::AdapterRef& scope, const std::optional<std::string>& tenant);
  // Not in force any more; of everything, no pause is.
  void End(const adapter::AdapterRef& scope);
  // What the scope covers runs to its end meanwhile, whatever pauses of adapters are in force; of
  // everything, whatever pauses are.
  void Wait(const adapter::AdapterRef& scope, const std::optional<std::string>& tenant,
            Waiter waiter);

  // The scopes for whose requests somebody waits begin to be in force when `is_over(scope,
  // &witness)`; returns who waited. The witness is for is_over to remember, by scope, what it saw.
  using IsOver = std::function<bool(const adapter::AdapterRef& scope, std::string* witness)>;
  std::vector<Waiter> Complete(const IsOver& is_over);
  // Who waits for what a pause of the scope would stop: for it, or for a part of it.
  std::vector<Waiter> RemoveWaitersWithin(const adapter::AdapterRef& scope);
  // Who waits for the scope; of everything, all who wait.
  std::vector<Waiter> RemoveWaiters(const adapter::AdapterRef& scope);
  // nullopt: nobody waits with this pause_id any more.
  std::optional<Waiter> Cancel(uint64_t pause_id);

  // Whether a pause of one of its adapters stops the request.
  bool Freezes(const Request& request) const;
  bool Refuses(const Request& request) const;
  // Whether somebody waits for the scope's requests and more.
  bool IsPartOfWait(const adapter::AdapterRef& scope) const;

  // Whether everything is stopped.
  bool all() const { return all_; }
  // Adapters in force whose requests stand still.
  const std::vector<adapter::AdapterRef>& stopped() const { return stopped_; }
  // Whose requests somebody waits for.
  const std::vector<adapter::AdapterRef>& waiting() const { return waiting_; }
  // Whose new requests are refused: those that are or were waited for.
  const std::vector<adapter::AdapterRef>& refused() const { return refused_; }

 private:
  // One for each scope that is in force or waited for.
  struct Pause {
    adapter::AdapterRef scope;
    std::optional<std::string> tenant;
    bool in_force = false;
    bool refuses = false;  // since it was waited for
    std::vector<Waiter> waiters;
    std::string witness;
  };

  Pause& FindOrAdd(const adapter::AdapterRef& scope, const std::optional<std::string>& tenant);
  template <typename Condition>
  std::vector<Waiter> TakeIf(Condition condition);
  void Update();

  std::vector<Pause> pauses_;  // in the order in which they came
  // What these come to.
  bool all_ = false;
  std::vector<adapter::AdapterRef> stopped_, waiting_, refused_;
};

}  // namespace dorad::engine
