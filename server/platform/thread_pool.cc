#include "server/platform/thread_pool.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "server/platform/check.h"
#include "server/platform/exception.h"

namespace dorad {

ThreadPool::ThreadPool(int threads, int nice) {
  DORAD_CHECK(threads >= 1);
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this, nice] { Work(nice); });
}

ThreadPool::~ThreadPool() {
  {
    absl::MutexLock lock(&mu_);
    closing_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::Submit(std::function<void()> task) {
  absl::MutexLock lock(&mu_);
  tasks_.push_back(std::move(task));
}

void ThreadPool::Work(int nice) {
  // On Linux a thread id sets one thread's priority; a failure is harmless.
  if (nice > 0) (void)setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), nice);
  while (true) {
    std::function<void()> task;
    {
      absl::MutexLock lock(&mu_);
      const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
        return closing_ || !tasks_.empty();
      };
      mu_.Await(absl::Condition(&ready));
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    // A task with a caller to answer catches its own exceptions; this catch keeps the thread for
    // later tasks.
    try {
      task();
    } catch (...) {
      StatusOfException("a task of a thread pool", "INTERNAL_ERROR").IgnoreError();  // logs it
    }
  }
}

}  // namespace dorad
