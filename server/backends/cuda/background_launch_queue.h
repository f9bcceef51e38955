// Keeps the loader's heavy kernels from delaying the decoder. Launched at any time, a kernel that
// fills the GPU for a quarter of a millisecond would enter the short gaps between a step's kernels,
// a few blocks at a time, and delay each of them. So while steps run, such work is launched between
// two steps, by the engine's thread and on the engine's stream, one piece a step: it delays a step
// by one piece at most. Thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/backends/cuda/device.h"
#include "server/platform/instant.h"

namespace dorad::cuda {

class BackgroundLaunchQueue {
 public:
  // Launches kernels on a stream, nothing else.
  using Work = absl::FunctionRef<absl::Status(cudaStream_t)>;

  static absl::StatusOr<std::unique_ptr<BackgroundLaunchQueue>> Create();

  // For a loader's thread; one at a time. While no steps run: launches on `stream`. Otherwise waits
  // for the earlier work of `stream`, then for the next step, and returns when the GPU has done the
  // work; a very long step is not waited for.
  absl::Status Run(const Stream& stream, Work work);

  // For the engine's thread: before it gives `stream` work of a step, and after it has the step's
  // outputs or has given it up. Several steps may be in flight.
  void BeginStep(const Stream& stream);
  void EndStep();

 private:
  struct Waiting {
    Work work;
    bool launched = false;
    absl::Status status;
  };

  explicit BackgroundLaunchQueue(Event done) : done_(std::move(done)) {}
  bool Stepping() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Event done_;  // end of the last work on a step's stream
  mutable absl::Mutex mu_;
  Waiting* waiting_ ABSL_GUARDED_BY(mu_) = nullptr;
  int steps_ ABSL_GUARDED_BY(mu_) = 0;  // in flight
  std::optional<Instant> last_end_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::cuda
