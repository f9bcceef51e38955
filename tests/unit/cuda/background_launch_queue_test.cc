#include "server/backends/cuda/background_launch_queue.h"

#include "kernels/random/fill.h"
#include "tests/unit/kernels/device.h"
#include "tests/unit/support/test.h"

namespace dorad::cuda {
namespace {

class BackgroundLaunchQueueTest : public kernels::KernelTest {
 protected:
  void SetUp() override {
    kernels::KernelTest::SetUp();
    if (IsSkipped()) return;
    gaps_ = *BackgroundLaunchQueue::Create();
    loader_ = std::make_unique<Stream>(*Stream::Create(Priority::kLow));
    engine_ = std::make_unique<Stream>(*Stream::Create());
  }

  std::unique_ptr<BackgroundLaunchQueue> gaps_;
  std::unique_ptr<Stream> loader_;
  std::unique_ptr<Stream> engine_;
};

TEST_F(BackgroundLaunchQueueTest, WithoutStepsWorkRunsAtOnceOnItsOwnStream) {
  cudaStream_t used = nullptr;
  EXPECT_TRUE(gaps_
                  ->Run(*loader_,
                        [&](cudaStream_t stream) {
                          used = stream;
                          return absl::OkStatus();
                        })
                  .ok());
  EXPECT_EQ(used, loader_->get());
}

TEST_F(BackgroundLaunchQueueTest, WorkWaitsForTheNextStepAndIsDoneOnReturn) {
  const kernels::DeviceBuffer<float> out(1 << 20);
  std::atomic<int> steps{0};
  std::atomic<bool> stop{false};
  std::thread engine([&] {
    while (!stop) {
      gaps_->BeginStep(*engine_);
      ++steps;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      gaps_->EndStep();
    }
  });
  while (steps == 0) std::this_thread::yield();
  for (int i = 0; i < 5; ++i) {
    const int before = steps;
    cudaStream_t used = nullptr;
    EXPECT_TRUE(gaps_
                    ->Run(*loader_,
                          [&](cudaStream_t stream) {
                            used = stream;
                            return ToStatus(kernels::FillConstant(out.get(), 1 << 20,
                                                                  static_cast<float>(i), stream),
                                            "the test");
                          })
                    .ok());
    EXPECT_EQ(used, engine_->get());
    EXPECT_GE(steps, before);
    EXPECT_EQ(out.Read()[(1 << 20) - 1], static_cast<float>(i));
  }
  stop = true;
  engine.join();
}

TEST_F(BackgroundLaunchQueueTest, ALongStepIsNotWaitedFor) {
  gaps_->BeginStep(*engine_);
  cudaStream_t used = nullptr;
  EXPECT_TRUE(gaps_
                  ->Run(*loader_,
                        [&](cudaStream_t stream) {
                          used = stream;
                          return absl::OkStatus();
                        })
                  .ok());
  gaps_->EndStep();
  EXPECT_EQ(used, loader_->get());
}

TEST_F(BackgroundLaunchQueueTest, AFailureIsTheLoadersAlone) {
  std::atomic<bool> stop{false};
  std::thread engine([&] {
    while (!stop) {
      gaps_->BeginStep(*engine_);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      gaps_->EndStep();
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(gaps_->Run(*loader_, [](cudaStream_t) { return absl::InternalError("x"); }).code(),
              absl::StatusCode::kInternal);
  }
  stop = true;
  engine.join();
}

}  // namespace
}  // namespace dorad::cuda
