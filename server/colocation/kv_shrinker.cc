#include "server/colocation/kv_shrinker.h"

#include "absl/synchronization/notification.h"

namespace dorad {

void KvShrinker::Open(engine::Engine* engine) {
  absl::MutexLock lock(&mu_);
  engine_ = engine;
}

void KvShrinker::Close() {
  absl::MutexLock lock(&mu_);
  engine_ = nullptr;
}

int64_t KvShrinker::Shrink(int64_t bytes) {
  absl::ReaderMutexLock lock(&mu_);
  if (engine_ == nullptr || engine_->stats().kv_shrinkable_bytes == 0) return 0;
  int64_t released = 0;
  absl::Notification done;
  engine_->ShrinkKv(bytes, [&](int64_t bytes_released) {
    released = bytes_released;
    done.Notify();
  });
  done.WaitForNotification();
  return released;
}

}  // namespace dorad
