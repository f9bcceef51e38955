// Ends waits for messages that are late: requests, and the parts of uploads.
//
// All timeouts are equal, so a FIFO list suffices. One thread serves all waits. Owned by Services
// and by Server. Thread-safe.
#pragma once

#include <functional>
#include <list>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/platform/instant.h"

namespace dorad::rpc {

class MessageDeadlines {
 public:
  explicit MessageDeadlines(absl::Duration timeout);
  ~MessageDeadlines();
  MessageDeadlines(const MessageDeadlines&) = delete;
  MessageDeadlines& operator=(const MessageDeadlines&) = delete;

  absl::Duration timeout() const { return timeout_; }

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

// One wait at a time. Only the reader calls Start and Stop. The deadlines outlive it.
class MessageTimer {
 public:
  explicit MessageTimer(MessageDeadlines* deadlines) : deadlines_(deadlines) {}
  ~MessageTimer() { Stop(); }
  MessageTimer(const MessageTimer&) = delete;
  MessageTimer& operator=(const MessageTimer&) = delete;

  // Calls `late` once, on another thread, after the timeout. Stop may return while it runs.
  void Start(std::function<void()> late);
  void Stop();

 private:
  MessageDeadlines* const deadlines_;
  bool started_ = false;
  bool waiting_ = false;  // under the deadlines' mutex
  std::list<MessageDeadlines::Wait>::iterator place_;
};

}  // namespace dorad::rpc
