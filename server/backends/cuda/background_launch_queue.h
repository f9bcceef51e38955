// Takes the loader's heavy kernels out of the decoder's way. A kernel that fills the GPU for a
// quarter of a millisecond would, launched at any time, slip into the short gaps between a step's
// kernels a few blocks at a time and hold up each of them. So while steps run, such work is
// launched between two steps, by the engine's thread and on the engine's stream, one piece a step:
// a step is later by one piece and no more.
// Thread-safe.
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

  // For a loader's thread; one at a time. While no steps run: launches on `stream`, in order with
  // what it has. Otherwise waits until that is done, then for the next step, and returns when the
  // GPU has done the work; a step that takes very long is not waited for.
  absl::Status Run(const Stream& stream, Work work);

  // For the engine's thread, before it gives `stream` anything of a step, and when it has the
  // step's outputs or has given it up. Several steps may be under way.
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

  const Event done_;  // of the last work that a step's stream was given
  mutable absl::Mutex mu_;
  Waiting* waiting_ ABSL_GUARDED_BY(mu_) = nullptr;
  int steps_ ABSL_GUARDED_BY(mu_) = 0;  // under way
  std::optional<Instant> last_end_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::cuda
