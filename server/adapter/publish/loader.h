// From a PEFT adapter's bytes to a published version: parse, validate, copy, norms, store (what is
// to be durable), publish.
//
// Work runs on a thread pool that App owns. A failed load leaves everything as it was except for
// the FAILED record. Owned by App. Thread-safe.
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
  // Runs what waits for the store's disk (a version number) on another thread; null: the caller's.
  std::function<void(std::function<void()>)> run_change;
  int64_t keep_last = 0;  // READY versions of a name after a publish; 0: all
};

// A load that has ended; summary: nullptr after a failure.
struct EndedLoad {
  std::string name;
  int64_t version = 0;  // 0: it never got one
  const AdapterSummary* summary = nullptr;
  absl::Status status;
  absl::Duration queue;     // in the line of loads
  absl::Duration activate;  // making the version READY, and active if it was to be
};
// Called once for each load that ends (metrics).
using LoadObserver = std::function<void(const EndedLoad& load)>;

class AdapterLoader final : public AdapterPublisher {
 public:
  // All pointers are borrowed and outlive the loader. `pool` runs the loads. `store` is the
  // registry's log; nullptr: nothing can be published durably. What `residency`
  // reloads from the store comes through the loader, as long as there is one.
  AdapterLoader(const LoaderOptions& options, ThreadPool* pool, const BaseModules* modules,
                AdapterBuilder* builder, Residency* residency, AdapterRegistry* registry,
                LoadObserver observer, Store* store = nullptr);
  // Ends queued loads with CANCELLED and waits for the running ones and for reloads.
  ~AdapterLoader() override;

  void Publish(PublishOptions options, AdapterSource source, PublishCallback done) override;

  // As LoaderOptions::keep_last, for publishes that end from now on.
  void SetKeepLast(int64_t keep_last);

  // No load of a publish or of the residency begins until Resume, and none is under way on return:
  // the base weights may go, which norms need. Queued loads wait; new publishes are refused.
  void Suspend();
  void Resume();

  // The content of a stored version, loaded on the calling thread: one of the pool's. Fails as
  // Store::NoteUnreadable says when its files cannot be read or have another digest than
  // stored.digest, and otherwise as a publish does. REQUIRES: a store.
  absl::StatusOr<std::shared_ptr<const LoadedAdapter>> LoadStored(const std::string& name,
                                                                  int64_t version,
                                                                  const StoredVersion& stored);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dorad::adapter
