// Times for messages that the server waits for: requests, and the parts of uploads.
//
// All have the same time, so the one that began first ends first, and a message that comes, as
// nearly all do at once, costs a place in a list. One thread for all of them. Owned by Services.
// Thread-safe.
#pragma once

#include <functional>
#include <list>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/instant.h"

namespace dorad::rpc {

class MessageDeadlines {
 public:
  explicit MessageDeadlines(absl::Duration timeout);
  ~MessageDeadlines();
  MessageDeadlines(const MessageDeadlines&) = delete;
  MessageDeadlines& operator=(const MessageDeadlines&) = delete;

 private:
  friend class MessageTimer;

  struct Wait {
    Instant end;
    std::function<void()> late;
    bool* waiting;  // its timer's
  };

  void Run() ABSL_LOCKS_EXCLUDED(mu_);

  const absl::Duration timeout_;
  absl::Mutex mu_;
  absl::CondVar changed_;  // from none to some, or closing
  std::list<Wait> waits_ ABSL_GUARDED_BY(mu_);
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;  // last: Run needs the others
};

// One wait at a time. Start and Stop are confined to who reads; stopped before the deadlines go.
class MessageTimer {
 public:
  explicit MessageTimer(MessageDeadlines* deadlines) : deadlines_(deadlines) {}
  ~MessageTimer() { Stop(); }
  MessageTimer(const MessageTimer&) = delete;
  MessageTimer& operator=(const MessageTimer&) = delete;

  // Calls `late` once from another thread if the time passes; at the same time as Stop, perhaps.
  void Start(std::function<void()> late);
  void Stop();

 private:
  MessageDeadlines* const deadlines_;
  bool started_ = false;
  bool waiting_ = false;  // under the deadlines' mutex
  std::list<MessageDeadlines::Wait>::iterator place_;
};

}  // namespace dorad::rpc
