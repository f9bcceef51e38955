#include "server/backends/cuda/background_launch_queue.h"

#include "absl/time/time.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::cuda {
namespace {

constexpr char kLoading[] = "loading an adapter";
// Time without a step after which steps count as over: gaps between the steps of running streams
// are shorter.
constexpr absl::Duration kIdle = absl::Milliseconds(3);
// The longest wait for a step. Longer steps are prefills, which a launch hardly delays.
constexpr absl::Duration kPatience = absl::Milliseconds(20);

}  // namespace

absl::StatusOr<std::unique_ptr<BackgroundLaunchQueue>> BackgroundLaunchQueue::Create() {
  DORAD_ASSIGN_OR_RETURN(Event done, Event::Create(Event::Wait::kSleeping));
  return std::unique_ptr<BackgroundLaunchQueue>(new BackgroundLaunchQueue(std::move(done)));
}

bool BackgroundLaunchQueue::Stepping() const {
  return steps_ > 0 || (last_end_ && Since(*last_end_) < kIdle);
}

absl::Status BackgroundLaunchQueue::Run(const Stream& stream, Work work) {
  {
    absl::MutexLock lock(&mu_);
    if (!Stepping()) return work(stream.get());
  }
  // The launch must not make the step's stream wait for `stream`.
  DORAD_RETURN_IF_ERROR(stream.Synchronize(kLoading));
  Waiting waiting{work};
  {
    absl::MutexLock lock(&mu_);
    DORAD_CHECK(waiting_ == nullptr);
    waiting_ = &waiting;
    mu_.AwaitWithTimeout(absl::Condition(&waiting.launched), kPatience);
    waiting_ = nullptr;
    if (!waiting.launched) return work(stream.get());
  }
  // Also after a failure: some of the kernels may have been launched.
  waiting.status.Update(done_.Synchronize(kLoading));
  return waiting.status;
}

void BackgroundLaunchQueue::BeginStep(const Stream& stream) {
  absl::MutexLock lock(&mu_);
  ++steps_;
  if (waiting_ == nullptr || waiting_->launched) return;
  waiting_->launched = true;
  waiting_->status = waiting_->work(stream.get());
  waiting_->status.Update(done_.Record(stream, kLoading));
}

void BackgroundLaunchQueue::EndStep() {
  absl::MutexLock lock(&mu_);
  DORAD_CHECK(steps_ > 0);
  --steps_;
  last_end_ = SteadyNow();
}

}  // namespace dorad::cuda
