// Which sequences may have rows: those whose weights are there. Asks for weights that are away,
// measures how long sequences wait for them, and finds out whom a failure to bring them concerns.
// Confined to the engine thread; owned by EngineLoop.
#pragma once

#include <map>
#include <set>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "server/adapter/residency/residency.h"
#include "server/engine/request.h"
#include "server/engine/sequence.h"

namespace dorad {
class Metrics;
}

namespace dorad::engine {

class WeightsGate {
 public:
  // metrics is borrowed.
  explicit WeightsGate(Metrics* metrics) : metrics_(*metrics) {}

  // What some sequence needs together; sorted.
  using Entries = std::vector<adapter::Residency::Entry*>;

  // Before a step is scheduled: weights may have come since.
  void BeginStep(Instant now) {
    now_ = now;
    away_.clear();
  }
  // Whether the weights that a sequence's rows need are there; then it has uses of them.
  bool MayRun(Sequence* sequence);
  // Whether some were not there in the step that is scheduled.
  bool any_away() const { return !away_.empty(); }
  // A sequence waits no longer: it has ended, or something else keeps it now.
  void NoteGone(const Sequence* sequence);

  // Weights that could not be brought, and why, since the last call.
  std::map<Entries, absl::Status> TakeFailures();
  // Whether the request waits for some of these weights.
  static bool IsConcerned(const Request& request, const Entries& entries);

 private:
  void NoteStalled(const Sequence* sequence) { stalled_.try_emplace(sequence, now_); }
  void EndStall(const Sequence* sequence, Instant now);

  Metrics& metrics_;
  Instant now_;                                            // the step at hand began then
  absl::flat_hash_map<const Sequence*, Instant> stalled_;  // since
  std::set<Entries> away_;
  std::map<Entries, absl::Status> failures_;
};

}  // namespace dorad::engine
