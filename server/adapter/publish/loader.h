// Makes a published version from a PEFT adapter's bytes: parse, validate, copy, norms, store (if
// durable), publish.
//
// Work runs on a thread pool that App owns. A failed load changes nothing except the FAILED record.
// Owned by App. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/adapter/publish/publisher.h"
#include "server/adapter/publish/reader.h"
#include "server/adapter/registry/registry.h"
#include "server/adapter/store/store.h"
#include "server/platform/thread_pool.h"

namespace dorad::adapter {

struct LoaderOptions {
  AdapterReader::Options read;
  int max_queued_loads = 64;
  // Runs a task that waits for the store's disk (a version number) on another thread; null: inline.
  std::function<void(std::function<void()>)> run_change;
  int64_t keep_last = 0;  // READY versions of a name after a publish; 0: all
};

// A finished load; summary: nullptr after a failure.
struct EndedLoad {
  std::string name;
  int64_t version = 0;  // 0: it never got one
  const AdapterSummary* summary = nullptr;
  absl::Status status;
  absl::Duration queue;     // in the queue of loads
  absl::Duration activate;  // making the version READY, and active if requested
};
// Called once for each load that ends (metrics).
using LoadObserver = std::function<void(const EndedLoad& load)>;

class AdapterLoader final : public AdapterPublisher {
 public:
  // All pointers are borrowed and outlive the loader. `pool` runs the loads. `store` is the
  // registry's log; nullptr: nothing can be published durably. `residency` reloads from the store
  // through the loader.
  AdapterLoader(const LoaderOptions& options, ThreadPool* pool, const BaseModules* modules,
                AdapterBuilder* builder, Residency* residency, AdapterRegistry* registry,
                LoadObserver observer, Store* store = nullptr);
  // Ends queued loads with CANCELLED and waits for the running ones and for reloads.
  ~AdapterLoader() override;

  void Publish(PublishOptions options, AdapterSource source, PublishCallback done) override;

  // As LoaderOptions::keep_last, for publishes that end after this call.
  void SetKeepLast(int64_t keep_last);

  // Stops all loads, of publishes and of the residency, until Resume; waits for the running ones.
  // The base weights, which norms need, may then be released. Queued loads wait; new publishes are
  // refused.
  void Suspend();
  void Resume();

  // Loads a stored version on the calling thread, one of the pool's. Errors as
  // Store::NoteUnreadable when the files cannot be read or their digest is not stored.digest,
  // otherwise as a publish. REQUIRES: a store.
  absl::StatusOr<std::shared_ptr<const LoadedAdapter>> LoadStored(const std::string& name,
                                                                  int64_t version,
                                                                  const StoredVersion& stored);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dorad::adapter
