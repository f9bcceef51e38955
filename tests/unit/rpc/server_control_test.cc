// Pause, yield, sleep and wake through the services.

#include "tests/unit/rpc/server_fixture.h"

namespace dorad::rpc {
namespace {

TEST_F(ServerTest, APauseWhoseCallerHasGivenUpIsUndone) {
  runner_->step_time = 50;
  const auto context = Context();
  const auto reader = inference_->Generate(context.get(), Request(400));
  ASSERT_TRUE(Eventually([&] { return engine_->stats().steps > 3; }));
  v1::PauseRequest pause;
  pause.set_mode(v1::PAUSE_MODE_WAIT);
  v1::PauseResponse paused;
  const auto impatient = Context();
  std::thread pausing([&] {
    const grpc::Status status = control_->Pause(impatient.get(), pause, &paused);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
  });
  v1::GetInfoResponse info;
  EXPECT_TRUE(Eventually([&] {
    EXPECT_TRUE(control_->GetInfo(Context().get(), v1::GetInfoRequest(), &info).ok());
    return info.engine().pausing();
  }));
  EXPECT_FALSE(info.engine().paused());
  EXPECT_EQ(ReasonOfWire(Generate(Request(5)).status), "ENGINE_PAUSED");
  impatient->TryCancel();
  pausing.join();
  EXPECT_TRUE(Eventually([&] { return Generate(Request(5)).status.ok(); }));
  EXPECT_TRUE(engine_->stats().pending_pauses.empty());
  context->TryCancel();
  (void)reader->Finish();
  EXPECT_TRUE(Eventually([&] { return engine_->idle(); }));
  EXPECT_FALSE(engine_->stats().paused);
}

TEST_F(ServerTest, PausesAndResumes) {
  v1::PauseRequest pause;
  pause.set_mode(v1::PAUSE_MODE_WAIT);
  v1::PauseResponse paused;
  ASSERT_TRUE(control_->Pause(Context().get(), pause, &paused).ok());
  EXPECT_EQ(ReasonOfWire(Generate(Request(5)).status), "ENGINE_PAUSED");
  v1::GetInfoResponse info;
  ASSERT_TRUE(control_->GetInfo(Context().get(), v1::GetInfoRequest(), &info).ok());
  EXPECT_TRUE(info.engine().paused());
  EXPECT_EQ(info.memory_bytes().at("weights"), 5u);
  EXPECT_EQ(info.model().vocab_size(), static_cast<uint32_t>(kVocab));
  v1::ResumeResponse resumed;
  ASSERT_TRUE(control_->Resume(Context().get(), v1::ResumeRequest(), &resumed).ok());
  EXPECT_TRUE(Generate(Request(5)).status.ok());
}

TEST_F(ServerTest, YieldsUntilToldOtherwise) {
  v1::LimitGpuShareRequest request;
  request.set_limit_id("a");
  v1::LimitGpuShareResponse yielded;
  EXPECT_EQ(ReasonOfWire(control_->LimitGpuShare(Context().get(), request, &yielded)),
            "GPU_SHARE_OUT_OF_RANGE");
  request.set_gpu_share(0.25);
  request.mutable_time_to_live()->set_seconds(600);
  ASSERT_TRUE(control_->LimitGpuShare(Context().get(), request, &yielded).ok());
  EXPECT_EQ(yielded.gpu_share(), 0.25);
  v1::GetInfoResponse info;
  ASSERT_TRUE(control_->GetInfo(Context().get(), v1::GetInfoRequest(), &info).ok());
  EXPECT_EQ(info.engine().gpu_share(), 0.25);
  EXPECT_TRUE(Generate(Request(5)).status.ok());
  v1::EndGpuShareLimitRequest end;
  end.set_limit_id("a");
  v1::EndGpuShareLimitResponse ended;
  ASSERT_TRUE(control_->EndGpuShareLimit(Context().get(), end, &ended).ok());
  EXPECT_TRUE(ended.ended());
  ASSERT_TRUE(control_->EndGpuShareLimit(Context().get(), end, &ended).ok());
  EXPECT_FALSE(ended.ended());
  ASSERT_TRUE(control_->GetInfo(Context().get(), v1::GetInfoRequest(), &info).ok());
  EXPECT_EQ(info.engine().gpu_share(), 1);
}

TEST_F(ServerTest, PassesSleepAndWakeOn) {
  sleep_.wake_status = MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY", "injected");
  v1::SleepRequest request;
  request.add_tags("kv");
  request.set_keep_kv(true);
  v1::SleepResponse slept;
  ASSERT_TRUE(control_->Sleep(Context().get(), request, &slept).ok());
  EXPECT_EQ(slept.freed_bytes().at("kv"), 7u);
  EXPECT_THAT(sleep_.asleep(), ElementsAre("kv"));
  EXPECT_TRUE(sleep_.asked_options.keep_kv && !sleep_.asked_options.refuse_requests);
  v1::GetInfoResponse info;
  ASSERT_TRUE(control_->GetInfo(Context().get(), v1::GetInfoRequest(), &info).ok());
  EXPECT_THAT(info.engine().sleeping(), ElementsAre("kv"));
  v1::WakeResponse woke;
  EXPECT_EQ(ReasonOfWire(control_->Wake(Context().get(), v1::WakeRequest(), &woke)),
            "OUT_OF_MEMORY");
  EXPECT_TRUE(sleep_.woken.empty());
}

}  // namespace
}  // namespace dorad::rpc
