#include "server/rpc/message_deadlines.h"

#include <iterator>
#include <utility>

namespace dorad::rpc {

MessageDeadlines::MessageDeadlines(absl::Duration timeout)
    : timeout_(timeout), thread_([this] { Run(); }) {}

MessageDeadlines::~MessageDeadlines() {
  {
    absl::MutexLock lock(&mu_);
    closing_ = true;
    changed_.Signal();
  }
  thread_.join();
}

void MessageDeadlines::Run() {
  absl::MutexLock lock(&mu_);
  while (!closing_) {
    if (waits_.empty()) {
      changed_.Wait(&mu_);
      continue;
    }
    const absl::Duration left = Between(SteadyNow(), waits_.front().end);
    if (left > absl::ZeroDuration()) {
      changed_.WaitWithTimeout(&mu_, left);
      continue;
    }
    *waits_.front().waiting = false;
    const std::function<void()> late = std::move(waits_.front().late);
    waits_.pop_front();
    mu_.Unlock();
    late();
    mu_.Lock();
  }
}

void MessageTimer::Start(std::function<void()> late) {
  Stop();
  absl::MutexLock lock(&deadlines_->mu_);
  deadlines_->waits_.push_back({FromNow(deadlines_->timeout_), std::move(late), &waiting_});
  place_ = std::prev(deadlines_->waits_.end());
  started_ = waiting_ = true;
  if (deadlines_->waits_.size() == 1) deadlines_->changed_.Signal();
}

void MessageTimer::Stop() {
  if (!std::exchange(started_, false)) return;
  std::function<void()> late;  // freed without the lock
  absl::MutexLock lock(&deadlines_->mu_);
  if (!std::exchange(waiting_, false)) return;
  late = std::move(place_->late);
  deadlines_->waits_.erase(place_);
}

}  // namespace dorad::rpc
