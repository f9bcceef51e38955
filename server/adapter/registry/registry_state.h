// The state shared by AdapterRegistry and its leases: the versions, the events, and the
// implementation of each change.
//
// A change is checked, becomes durable (under change_mu alone, so that readers do not wait for the
// disk) and is applied. The check still holds then: change_mu excludes other changes, and the
// generation does not move. Owned by the registry and by leases. Thread-safe as annotated.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/adapter/registry/change_log.h"
#include "server/adapter/registry/deferred_deletion.h"
#include "server/adapter/registry/event_log.h"
#include "server/adapter/registry/registry.h"
#include "server/adapter/registry/version_book.h"
#include "server/platform/subscribers.h"

namespace dorad::adapter {

struct AdapterRegistry::State {
  using Version = VersionBook::Version;
  // Work after a change, without locks.
  struct After {
    std::vector<Garbage> freed;
    bool notify = false;
  };

  explicit State(Options options);

  // --- Changes, as the registry's functions of the same names.
  absl::StatusOr<int64_t> Reserve(const std::string& name, std::optional<int64_t> version,
                                  std::map<std::string, std::string> tags, bool of_peer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu) ABSL_LOCKS_EXCLUDED(mu);
  absl::StatusOr<int64_t> Publish(std::shared_ptr<const LoadedAdapter> adapter, bool activate,
                                  std::optional<int64_t> expected_generation,
                                  const std::string& object, After& after)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu) ABSL_LOCKS_EXCLUDED(mu);
  absl::StatusOr<Activation> Activate(const std::string& name, int64_t number,
                                      std::optional<int64_t> expected_generation, After& after)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu) ABSL_LOCKS_EXCLUDED(mu);
  absl::StatusOr<Retirement> Retire(const std::string& name, int64_t number, bool force,
                                    After& after) ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu)
      ABSL_LOCKS_EXCLUDED(mu);
  void FailLoad(Version& version, absl::Status reason, After& after)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // The end of a lease. Waits for no change; may be called during one.
  void Release(const std::string& name, int64_t number) ABSL_LOCKS_EXCLUDED(mu);
  void Finish(After after) ABSL_LOCKS_EXCLUDED(mu);

  // --- Parts of changes.
  absl::Status CheckGeneration(std::optional<int64_t> expected) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void BeginChange() ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu, mu) { changing = true; }
  void EndChange(After& after) ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu, mu);
  // Makes the change durable; up to `generations` generations may follow it.
  absl::Status Log(Change change, int64_t generations) ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu);
  void Append(const std::vector<EventType>& types, const Version& version, After& after)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // READY -> RETIRING, -> GONE without leases.
  void BeginRetiring(Version& version, After& after) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void Gone(Version& version, After& after) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  ChangeLog* const log;  // nullptr: none
  const std::function<void(std::function<void()>)> executor;
  DeferredDeletion deferred_deletion;
  Subscribers subscribers;
  // Held through a whole change; taken before mu.
  absl::Mutex change_mu;
  // The highest generation before another change must be durable.
  int64_t generation_limit ABSL_GUARDED_BY(change_mu) = 0;
  absl::Mutex mu;
  bool changing ABSL_GUARDED_BY(mu) = false;
  // RETIRING versions whose last lease ended during a change.
  std::vector<std::pair<std::string, int64_t>> released ABSL_GUARDED_BY(mu);
  VersionBook book ABSL_GUARDED_BY(mu);
  EventLog events ABSL_GUARDED_BY(mu);
  int total_leases ABSL_GUARDED_BY(mu) = 0;
};

}  // namespace dorad::adapter
