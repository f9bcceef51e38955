// The CPU backend's worker threads.
//
// A decode step has hundreds of short parallel regions, so workers spin for a moment before they
// park (a futex wake costs more than many regions). One team per process is enough; the calling
// thread takes part as worker 0. Run() may be called from several threads: calls are serialised.
// Owned by a function-local static of ops (configured once before first use).
#pragma once

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"

namespace dorad::ops {

class ThreadTeam {
 public:
  // threads >= 1, the caller included. spin: how long a worker looks for work before it parks.
  explicit ThreadTeam(int threads, int64_t spin_microseconds = 200);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int threads() const;

  // Calls work(task) once for each task in [0, tasks), tasks taken in ascending order by whichever
  // worker is free. Returns when all are done. `work` must not throw and must not call Run.
  void Run(int64_t tasks, absl::FunctionRef<void(int64_t)> work);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The process's team. SetThreads before the first use fixes its size (default: hardware threads).
void SetThreads(int threads);
ThreadTeam& Team();

}  // namespace dorad::ops
