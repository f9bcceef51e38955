#include "server/platform/subscribers.h"

#include <utility>
#include <vector>

namespace dorad {

int64_t Subscribers::Add(std::function<void()> on_event) {
  auto subscriber = std::make_shared<Subscriber>();
  subscriber->on_event = std::move(on_event);
  absl::MutexLock lock(&mu_);
  subscribers_[next_id_] = std::move(subscriber);
  return next_id_++;
}

void Subscribers::Remove(int64_t id) {
  absl::MutexLock lock(&mu_);
  const auto it = subscribers_.find(id);
  if (it == subscribers_.end()) return;
  const std::shared_ptr<Subscriber> subscriber = it->second;
  subscribers_.erase(it);
  const auto idle = [&subscriber] { return subscriber->running == 0; };
  mu_.Await(absl::Condition(&idle));
}

void Subscribers::Clear() {
  absl::MutexLock lock(&mu_);
  subscribers_.clear();
}

void Subscribers::Notify() {
  std::vector<std::shared_ptr<Subscriber>> called;
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [id, subscriber] : subscribers_) {
      ++subscriber->running;
      called.push_back(subscriber);
    }
  }
  for (const auto& subscriber : called) subscriber->on_event();
  absl::MutexLock lock(&mu_);
  for (const auto& subscriber : called) --subscriber->running;
}

}  // namespace dorad
