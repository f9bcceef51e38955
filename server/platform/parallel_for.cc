#include "server/platform/parallel_for.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/platform/exception.h"

namespace dorad {

int UsableCores(int most) {
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, most);
}

absl::Status ParallelFor(int threads, size_t count, absl::FunctionRef<absl::Status(size_t)> work) {
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  absl::Mutex mu;
  absl::Status first;
  const auto run = [&] {
    for (size_t i = next++; i < count && !failed; i = next++) {
      absl::Status status;
      try {
        status = work(i);
      } catch (...) {
        status = StatusOfException("a piece of parallel work", "INTERNAL_ERROR");
      }
      if (status.ok()) continue;
      failed = true;
      absl::MutexLock lock(&mu);
      first.Update(status);
    }
  };
  std::vector<std::jthread> others;
  const size_t wanted = std::min(count, static_cast<size_t>(std::max(threads, 1)));
  others.reserve(wanted);
  try {
    while (others.size() + 1 < wanted) others.emplace_back(run);
  } catch (const std::system_error&) {  // the host allows no more threads: the others do the work
  }
  run();
  others.clear();  // joins
  return first;
}

}  // namespace dorad
