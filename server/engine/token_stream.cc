#include "server/engine/token_stream.h"

#include <algorithm>
#include <utility>

#include "server/platform/check.h"

namespace dorad::engine {

void TokenStream::Push(SampleDelta delta) {
  absl::MutexLock lock(&mu_);
  DORAD_CHECK(!closed_);
  const auto pending = std::find_if(deltas_.begin(), deltas_.end(), [&delta](const SampleDelta& d) {
    return d.sample_index == delta.sample_index;
  });
  const bool takeable = !final_only_ || delta.finished();
  if (pending != deltas_.end()) {
    pending->Append(std::move(delta));
  } else {
    deltas_.push_back(std::move(delta));
  }
  if (takeable && waker_) waker_();
}

void TokenStream::Close(absl::Status status) {
  absl::MutexLock lock(&mu_);
  DORAD_CHECK(!closed_);
  closed_ = std::move(status);
  if (waker_) waker_();
}

std::optional<SampleDelta> TokenStream::Take() {
  absl::MutexLock lock(&mu_);
  const auto ready = std::find_if(deltas_.begin(), deltas_.end(), [this](const SampleDelta& d) {
    return !final_only_ || d.finished();
  });
  if (ready == deltas_.end()) return std::nullopt;
  SampleDelta delta = std::move(*ready);
  deltas_.erase(ready);
  return delta;
}

std::optional<absl::Status> TokenStream::Ended() {
  absl::MutexLock lock(&mu_);
  if (!closed_) return std::nullopt;
  // A failed request may leave unfinished samples; in FINAL mode they are never taken.
  const bool takeable = std::any_of(deltas_.begin(), deltas_.end(), [this](const SampleDelta& d) {
    return !final_only_ || d.finished();
  });
  if (takeable) return std::nullopt;
  return closed_;
}

void TokenStream::SetWaker(std::function<void()> waker) {
  absl::MutexLock lock(&mu_);
  waker_ = std::move(waker);
}

}  // namespace dorad::engine
