// A few threads that run tasks in order of submission, for work that may block (adapter loads). An
// exception of a task is logged and dropped: a task with a caller to answer must catch it itself.
// Owned by App. Thread-safe.
#pragma once

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace dorad {

class ThreadPool {
 public:
  // nice: added to the threads' scheduling priority on Linux (0 to 19), so that loads do not slow
  // running streams.
  ThreadPool(int threads, int nice);
  // Runs all submitted tasks, also those submitted meanwhile, then joins the threads.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  void Submit(std::function<void()> task);

 private:
  void Work(int nice);
  absl::Mutex mu_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace dorad
