// Which requests pauses have stopped, and who waits for a pause to take effect. The base's
// reference stands for every request. Confined to the engine thread.
#pragma once

#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/adapter/version.h"
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
  // A pause that waits for its requests to end.
  struct Waiting {
    adapter::AdapterRef scope;
    Done done;
    int requests = 0;
  };

  bool all() const { return all_; }
  // Whose requests are stopped, in the order of the pauses.
  const std::vector<adapter::AdapterRef>& adapters() const { return adapters_; }
  // Whether a pause of one of its adapters stops the request.
  bool Freezes(const Request& request) const;

  // Pauses of adapters, in effect or waiting, that there may be.
  static constexpr size_t kMost = 1024;
  // OK: this one may begin or wait. RESOURCE_EXHAUSTED (PAUSES_FULL).
  absl::Status CheckRoom(const adapter::AdapterRef& scope) const;
  void Begin(const adapter::AdapterRef& scope);
  // Of everything ends the pauses of adapters, too.
  void End(const adapter::AdapterRef& scope);

  void Wait(Waiting waiting) { waiting_.push_back(std::move(waiting)); }
  // Takes out those that are done when `is_over(scope)`.
  std::vector<Waiting> TakeOver(const std::function<bool(const adapter::AdapterRef&)>& is_over);
  // Takes out those that another pause or a resume of the scope overtakes: the same scope's, and
  // all where that is everything. Who may pause some adapter thus cannot end a pause of everything.
  std::vector<Waiting> TakeOvertaken(const adapter::AdapterRef& scope);
  bool everything_waits() const;
  bool anyone_waits() const { return !waiting_.empty(); }

 private:
  template <typename Condition>
  std::vector<Waiting> Take(Condition condition);

  bool all_ = false;
  std::vector<adapter::AdapterRef> adapters_;
  std::vector<Waiting> waiting_;
};

}  // namespace dorad::engine
