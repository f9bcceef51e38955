// Admits sequences to a step if their adapter weights are resident. Requests reloads of evicted
// weights, measures stalls, and finds the requests that a failed reload affects. Confined to the
// engine thread; owned by EngineLoop.
#pragma once

#include <map>
#include <optional>
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

  // Weights that a sequence needs together; sorted.
  using Entries = std::vector<adapter::Residency::Entry*>;

  // Call before each schedule: weights may have been reloaded.
  void BeginStep(Instant now) {
    now_ = now;
    away_.clear();
  }
  // Whether the sequence's weights are resident; if so, pins them.
  bool MayRun(Sequence* sequence);
  // Whether some were evicted at the current schedule.
  bool any_away() const { return !away_.empty(); }
  // The begin of the longest stall of the request's sequences; nullopt: none is stalled.
  std::optional<Instant> StalledSince(const Request& request) const;
  // Ends the sequence's stall: it has ended, or waits for something else.
  void NoteGone(const Sequence* sequence);

  // Weights whose reload failed since the last call, and the errors.
  std::map<Entries, absl::Status> TakeFailures();
  // Whether the request waits for some of these weights.
  static bool IsConcerned(const Request& request, const Entries& entries);

 private:
  void NoteStalled(const Sequence* sequence) { stalled_.try_emplace(sequence, now_); }
  void EndStall(const Sequence* sequence, Instant now);

  Metrics& metrics_;
  Instant now_;                                            // begin of the current step
  absl::flat_hash_map<const Sequence*, Instant> stalled_;  // begin of the stall
  std::set<Entries> away_;
  std::map<Entries, absl::Status> failures_;
};

}  // namespace dorad::engine
