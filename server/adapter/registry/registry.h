// The adapter versions, the active version of each name, and the leases.
//
// A version moves LOADING -> READY -> RETIRING -> GONE, or LOADING -> FAILED. Version numbers rise
// per name and are never reused. Every visible change takes the next number of one generation
// counter and is appended to a bounded event log for watchers.
//
// With a ChangeLog, a change is durable before it is visible. Changes then wait for the disk, one
// after the other; Acquire, the release of a lease and reads never do. Owned by App. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/adapter/registry/change_log.h"
#include "server/adapter/registry/record.h"
#include "server/adapter/registry/version.h"

namespace dorad::adapter {

class AdapterRegistry {
 public:
  struct Options {
    int max_events = 4096;        // kept for watchers
    int max_ended_records = 256;  // GONE and FAILED versions kept for Get and List
    // Runs a task on another thread (a loader's): the deletion of adapter memory and of stored
    // objects, and the loads of Restore.
    std::function<void(std::function<void()>)> executor;
    // Borrowed; outlives the executor's tasks. nullptr: no version is durable.
    ChangeLog* log = nullptr;
  };
  explicit AdapterRegistry(Options options);
  // Leases may outlive the registry: the last lease of a version then frees it inline.
  ~AdapterRegistry();

  // Restores the state of earlier runs, before any other call. `load` returns a version's content;
  // it runs on all threads of the executor, and versions appear in the order of `stored`. A version
  // whose load fails is FAILED with its status. Names whose active version is not READY have none.
  // Generations and version numbers continue above all earlier ones; the events of earlier runs
  // count as no longer kept.
  using LoadStored = std::function<absl::StatusOr<std::shared_ptr<const LoadedAdapter>>(
      const std::string& name, int64_t version, const StoredVersion& stored)>;
  void Restore(const StoredState& stored, const LoadStored& load);

  // All changes below, except Fail, may also fail as ChangeLog::Append; then nothing changes
  // (except that Publish makes its version FAILED).

  // Takes a version number for a load (LOADING). version nullopt: the next one. INVALID_ARGUMENT
  // (ADAPTER_NAME_INVALID, ADAPTER_VERSION_INVALID: not within [1, 10^18)), ABORTED
  // (ADAPTER_VERSION_TAKEN) when the number is not above all numbers of the name; of_peer: when
  // this server has a version of that number. A peer's version comes back under its own number: the
  // caller, who knows its digest, answers for it being the same one.
  absl::StatusOr<int64_t> Reserve(const std::string& name, std::optional<int64_t> version,
                                  std::map<std::string, std::string> tags, bool of_peer = false);
  // The object of the log's store with a READY durable version's files. NOT_FOUND as Get; "": the
  // version is not durable.
  absl::StatusOr<std::string> ObjectOf(const AdapterRef& ref) const;
  // LOADING -> READY; with activate it also becomes active, at the same time. ABORTED
  // (GENERATION_MISMATCH): nothing changes and the version becomes FAILED. `object` of the log's
  // store makes the version durable (dropped when the version is GONE; after a failure it is still
  // the caller's); empty: ephemeral. Returns the new generation.
  absl::StatusOr<int64_t> Publish(std::shared_ptr<const LoadedAdapter> adapter, bool activate,
                                  std::optional<int64_t> expected_generation,
                                  const std::string& object = "");
  // LOADING -> FAILED.
  void Fail(const std::string& name, int64_t version, absl::Status reason);

  struct Activation {
    AdapterRecord adapter;
    int64_t previous_version = 0;
    int64_t generation = 0;
  };
  // NOT_FOUND (ADAPTER_NOT_FOUND), FAILED_PRECONDITION (ADAPTER_NOT_READY), ABORTED
  // (GENERATION_MISMATCH). Activating the active version without expected_generation changes
  // nothing.
  absl::StatusOr<Activation> Activate(const std::string& name, int64_t version,
                                      std::optional<int64_t> expected_generation);

  struct Retirement {
    AdapterRecord adapter;
    int64_t generation = 0;
  };
  // READY -> RETIRING (and no longer active), -> GONE when the last lease ends, at once without
  // leases. Errors as Activate's; retiring twice is ADAPTER_NOT_READY. A durable version that could
  // not be restored (FAILED) can be retired, too. force: sets LoadedAdapter::revoked.
  absl::StatusOr<Retirement> Retire(const std::string& name, int64_t version, bool force = false);

  // Retires the READY versions of a name that are neither active nor among its newest `keep` READY
  // ones, the oldest first; returns the number. Stops when the log fails. REQUIRES: keep >= 1.
  absl::StatusOr<int> RetireOlder(const std::string& name, int64_t keep);

  // A lease on a READY version. The base gives an empty lease. NOT_FOUND (ADAPTER_NOT_FOUND;
  // ADAPTER_NO_ACTIVE_VERSION), FAILED_PRECONDITION (ADAPTER_NOT_READY).
  absl::StatusOr<AdapterLease> Acquire(const AdapterRef& ref);

  absl::StatusOr<AdapterRecord> Get(const AdapterRef& ref) const;
  // NOT_FOUND (ADAPTER_NOT_FOUND) unless there is such a version, or any version of the name. The
  // base exists.
  absl::Status CheckExists(const AdapterRef& ref) const;
  // Ordered by (name, version), after (after_name, after_version), at most `limit`. Empty name: all
  // names.
  std::vector<AdapterRecord> List(const std::string& name, const std::string& after_name,
                                  int64_t after_version, int limit) const;
  // Holds the lock for less than a millisecond even with thousands of versions.
  VersionTotals Totals() const;
  int64_t generation() const;
  int total_leases() const;

  // Events with a greater generation, in order, at most `limit`. Each event has a generation of
  // its own. OUT_OF_RANGE: GENERATION_COMPACTED when
  // some of them are no longer kept, GENERATION_UNKNOWN when the generation has not been reached
  // (it is of another run of the server).
  absl::StatusOr<std::vector<RegistryEvent>> EventsAfter(int64_t generation, int limit) const;
  // Calls back after each new event, on the thread that made it and without a lock; must not block.
  // Returns an id for Unsubscribe, which waits for a running call of that subscriber (and so must
  // not be called by it).
  int64_t Subscribe(std::function<void()> on_event);
  void Unsubscribe(int64_t id);

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with leases, which may outlive the registry
};

}  // namespace dorad::adapter
