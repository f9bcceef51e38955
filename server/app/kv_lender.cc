#include "server/app/kv_lender.h"

#include "absl/synchronization/notification.h"

namespace dorad {

void KvLender::Open(engine::Engine* engine) {
  absl::MutexLock lock(&mu_);
  engine_ = engine;
}

void KvLender::Close() {
  absl::MutexLock lock(&mu_);
  engine_ = nullptr;
}

int64_t KvLender::Lend(int64_t bytes) {
  absl::ReaderMutexLock lock(&mu_);
  if (engine_ == nullptr || engine_->stats().kv_lendable_bytes == 0) return 0;
  int64_t lent = 0;
  absl::Notification done;
  engine_->LendKv(bytes, [&](int64_t given) {
    lent = given;
    done.Notify();
  });
  done.WaitForNotification();
  return lent;
}

}  // namespace dorad
