// Which sequences may have rows: those whose weights are there. Asks for weights that are away, and
// finds out whom a failure to bring them concerns. Confined to the engine thread; owned by
// EngineLoop.
#pragma once

#include <map>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "server/adapter/residency.h"
#include "server/engine/request.h"
#include "server/engine/sequence.h"

namespace dorad::engine {

class WeightsGate {
 public:
  // What some sequence needs together; sorted.
  using Entries = std::vector<adapter::Residency::Entry*>;

  // Before a step is scheduled: weights may have come since.
  void BeginStep() { away_.clear(); }
  // Whether the weights that a sequence's rows need are there; then it has uses of them.
  bool MayRun(Sequence* sequence);
  // Whether some were not there in the step that is scheduled.
  bool any_away() const { return !away_.empty(); }

  // Weights that could not be brought, and why, since the last call.
  std::map<Entries, absl::Status> TakeFailures();
  // Whether the request waits for some of these weights.
  static bool IsConcerned(const Request& request, const Entries& entries);

 private:
  std::set<Entries> away_;
  std::map<Entries, absl::Status> failures_;
};

}  // namespace dorad::engine
