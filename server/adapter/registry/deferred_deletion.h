// Where versions that have come to their end are freed: elsewhere, since that may take its time.
// Owned by AdapterRegistry. Thread-safe; calls the executor under no lock.
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

// What a version leaves at its end.
struct Garbage {
  std::shared_ptr<const LoadedAdapter> adapter;
  std::string object;  // of the log's store; empty: none
};

class DeferredDeletion {
 public:
  using Executor = std::function<void(std::function<void()>)>;
  // `log` is borrowed and outlives the executor's tasks; nullptr: there are no objects.
  DeferredDeletion(Executor executor, ChangeLog* log) : executor_(std::move(executor)), log_(log) {}

  // On the executor, or on this thread after Close (then the object stays for the next start).
  void Free(Garbage remains);
  // From now on the executor is left alone. Waits for the calls of it that are running.
  void Close();

 private:
  const Executor executor_;
  ChangeLog* const log_;
  absl::Mutex mu_;
  int posting_ ABSL_GUARDED_BY(mu_) = 0;  // calls of the executor that are running
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace dorad::adapter
