// Frees ended versions on the executor, since that may take long. Owned by AdapterRegistry.
// Thread-safe; calls the executor without a lock.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/adapter/registry/change_log.h"
#include "server/adapter/registry/version.h"

namespace dorad::adapter {

// Memory and object of an ended version.
struct Garbage {
  std::shared_ptr<const LoadedAdapter> adapter;
  std::string object;  // of the log's store; empty: none
};

class DeferredDeletion {
 public:
  using Executor = std::function<void(std::function<void()>)>;
  // `log` is borrowed and outlives the executor's tasks; nullptr: no objects.
  DeferredDeletion(Executor executor, ChangeLog* log) : executor_(std::move(executor)), log_(log) {}

  // On the executor, or on this thread after Close (then the object stays for the next start).
  void Free(Garbage garbage);
  // Stops calls of the executor and waits for running ones.
  void Close();

 private:
  const Executor executor_;
  ChangeLog* const log_;
  absl::Mutex mu_;
  int posting_ ABSL_GUARDED_BY(mu_) = 0;  // calls of the executor that are running
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace dorad::adapter
