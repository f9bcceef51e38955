// From a PEFT adapter's bytes to a published version: parse, validate, copy, norms, store (what is
// to be durable), publish.
//
// Work runs on a thread pool that App owns. A failed load leaves everything as it was except for
// the FAILED record. Owned by App. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/adapter/base_modules.h"
#include "server/adapter/builder.h"
#include "server/adapter/peer_tensors.h"
#include "server/adapter/registry.h"
#include "server/adapter/store.h"
#include "server/base/thread_pool.h"

namespace dorad::adapter {

struct LoaderOptions {
  int max_rank = 1024;
  int64_t max_adapter_bytes = int64_t{16} << 30;
  int max_queued_loads = 64;
  int64_t keep_last = 0;  // READY versions of a name after a publish; 0: all
  // Folders under which PublishFromPath may read; empty: none.
  std::vector<std::string> allowed_roots;
};

struct PublishOptions {
  std::string name;
  std::optional<int64_t> version;
  bool activate = false;
  std::optional<int64_t> expected_generation;
  bool durable = false;  // survives a restart
  bool pinned = false;   // its weights stay resident
  std::map<std::string, std::string> tags;
  std::optional<int64_t> keep_last;  // instead of LoaderOptions'
};

struct PublishResult {
  AdapterRecord adapter;
  int64_t generation = 0;
};
using PublishCallback = std::function<void(absl::StatusOr<PublishResult>)>;

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

class AdapterLoader {
 public:
  // All pointers are borrowed and outlive the loader. `pool` runs the loads. `store` is the
  // registry's log, or nullptr: then nothing can be published durably. What `residency` recalls
  // from the store comes through the loader, as long as there is one.
  AdapterLoader(LoaderOptions options, ThreadPool* pool, const BaseModules* modules,
                AdapterBuilder* builder, Residency* residency, AdapterRegistry* registry,
                LoadObserver observer, Store* store = nullptr);
  // Ends queued loads with CANCELLED and waits for the running ones and for recalls.
  ~AdapterLoader();

  // All return at once, or with a store after the disk has the version's number; `done` runs
  // exactly once, on a loader thread or (for what is refused immediately) on the caller's.
  // RESOURCE_EXHAUSTED (LOAD_QUEUE_FULL) with a retry hint, FAILED_PRECONDITION
  // (STORE_NOT_CONFIGURED), statuses of Store.
  // `read` is the time the caller spent receiving the bytes.
  void PublishFromBytes(PublishOptions options, std::string adapter_config_json,
                        std::vector<std::byte> safetensors, absl::Duration read,
                        PublishCallback done);
  // The result is PERMISSION_DENIED (PATH_NOT_ALLOWED) for a path that does not lie, after
  // resolving links, beneath an allowed root. `trusted` skips that check (the operator's command
  // line).
  void PublishFromPath(PublishOptions options, std::string path, bool trusted,
                       PublishCallback done);

  // The result is also ABORTED (HANDOVER_CLOSED) when the process that owns the memory does not
  // want the version any more before it is published, INVALID_ARGUMENT (HANDOVER_DIGEST_MISMATCH)
  // and what CopyToImage says. After `done` nothing is read from the memory.
  void PublishFromMemory(PublishOptions options, std::string adapter_config_json, PeerTensors peer,
                         PublishCallback done);

  // As LoaderOptions::keep_last, for publishes that end from now on.
  void SetKeepLast(int64_t keep_last);

  // No load begins until ReleaseLoads, nor is any under way on return: the base weights, which
  // norms need, may go. What is published meanwhile waits in line.
  void HoldLoads();
  void ReleaseLoads();

  // The content of a stored version, loaded on a thread of the pool while the caller waits. Fails
  // as Store::NoteUnreadable says when its files cannot be read or have another digest than
  // stored.digest, and otherwise as a publish does. REQUIRES: a store.
  absl::StatusOr<std::shared_ptr<const LoadedAdapter>> LoadStored(const std::string& name,
                                                                  int64_t version,
                                                                  const StoredVersion& stored);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dorad::adapter
