#include "server/adapter/registry/deferred_deletion.h"

#include <utility>

namespace dorad::adapter {

void DeferredDeletion::Free(Garbage garbage) {
  {
    absl::MutexLock lock(&mu_);
    if (closed_) return;  // the executor's threads may be gone with the registry
    ++posting_;
  }
  // std::function needs a copyable task, and a late copy would free on the wrong thread: the task
  // empties a shared cell instead.
  auto cell = std::make_shared<Garbage>(std::move(garbage));
  executor_([cell, log = log_] {
    cell->adapter.reset();
    if (!cell->object.empty()) log->Drop(cell->object);
  });
  absl::MutexLock lock(&mu_);
  --posting_;
}

void DeferredDeletion::Close() {
  absl::MutexLock lock(&mu_);
  closed_ = true;
  const auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return posting_ == 0; };
  mu_.Await(absl::Condition(&idle));
}

}  // namespace dorad::adapter
