// Callbacks after changes of an object. Owned by that object. Thread-safe; holds no lock of its own
// during a callback.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace dorad {

class Subscribers {
 public:
  int64_t Add(std::function<void()> on_event);
  // After it returns, the callback neither runs nor is called again. Not to be called from within
  // the callback.
  void Remove(int64_t id);
  // Removes all callbacks; does not wait for running ones.
  void Clear();

  // Runs each callback.
  void Notify();

 private:
  struct Subscriber {
    std::function<void()> on_event;
    int running = 0;  // calls, guarded by mu_
  };

  absl::Mutex mu_;
  std::map<int64_t, std::shared_ptr<Subscriber>> subscribers_ ABSL_GUARDED_BY(mu_);
  int64_t next_id_ ABSL_GUARDED_BY(mu_) = 1;
};

}  // namespace dorad
