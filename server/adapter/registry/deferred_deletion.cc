#include "server/adapter/registry/deferred_deletion.h"

#include <utility>

namespace dorad::adapter {

void DeferredDeletion::Free(Garbage remains) {
  {
    absl::MutexLock lock(&mu_);
    if (closed_) return;  // the registry is gone, and with it perhaps the executor's threads
    ++posting_;
  }
  // std::function wants a copyable task, and a copy that outlives the run would free on the wrong
  // thread: the task empties a shared cell instead.
  auto cell = std::make_shared<Garbage>(std::move(remains));
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
