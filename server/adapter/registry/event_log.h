// The registry's generation, and the events of its last changes for watchers. Owned by
// AdapterRegistry, whose lock guards it.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "absl/status/statusor.h"
#include "server/adapter/registry/record.h"

namespace dorad::adapter {

class EventLog {
 public:
  // REQUIRES: max_events >= 1.
  explicit EventLog(int max_events);

  int64_t generation() const { return generation_; }
  // Continues the generations of earlier runs, whose events count as no longer kept. REQUIRES: no
  // change yet.
  void ContinueAfter(int64_t generation);

  // Events of one change, in order; each takes the next generation, so a watcher can continue after
  // any of them.
  void Append(const std::vector<EventType>& types, const AdapterRecord& adapter);

  // As AdapterRegistry::EventsAfter.
  absl::StatusOr<std::vector<RegistryEvent>> After(int64_t generation, int limit) const;

 private:
  const size_t max_events_;
  int64_t generation_ = 0;
  // The generation of the newest dropped event.
  int64_t compacted_ = 0;
  std::deque<RegistryEvent> events_;
};

}  // namespace dorad::adapter
