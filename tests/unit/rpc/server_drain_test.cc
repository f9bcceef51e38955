// What a drain waits for, and what it ends.

#include "tests/unit/rpc/server_fixture.h"

namespace dorad::rpc {
namespace {

TEST_F(ServerTest, DrainsRunningRequestsAndRefusesNewOnes) {
  runner_->step_time = 50;
  std::thread drain;
  const auto context = Context();
  const auto reader = inference_->Generate(context.get(), Request(40));
  ASSERT_TRUE(Eventually([&] { return engine_->stats().steps > 0; }));
  drain = std::thread([&] { Drain(absl::Minutes(1), absl::Seconds(1)); });
  ASSERT_TRUE(Eventually([&] { return services_.draining.load(); }));
  EXPECT_TRUE(
      Eventually([&] { return ReasonOfWire(Generate(Request(1)).status) == "SHUTTING_DOWN"; }));
  EXPECT_EQ(ReasonOfWire(Publish("late").first), "SHUTTING_DOWN");
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  EXPECT_EQ(UnpackIds(message.token_ids()).size(), 40u);
  EXPECT_TRUE(reader->Finish().ok());
  drain.join();
}

TEST_F(ServerTest, DrainGivesBackTheTokensOfFrozenRequestsAtOnce) {
  runner_->step_time = 50;
  const auto context = Context();
  const auto reader = inference_->Generate(context.get(), Request(400));
  ASSERT_TRUE(Eventually([&] { return engine_->stats().steps > 3; }));
  v1::PauseResponse paused;
  ASSERT_TRUE(control_->Pause(Context().get(), v1::PauseRequest(), &paused).ok());
  std::thread drain([&] { Drain(absl::Hours(1), absl::Seconds(1)); });
  v1::GenerateResponse message;
  EXPECT_TRUE(reader->Read(&message));
  EXPECT_EQ(message.finish().reason(), v1::FINISH_REASON_ABORTED);
  EXPECT_FALSE(message.token_ids().empty());
  EXPECT_TRUE(reader->Finish().ok());
  drain.join();
}

TEST_F(ServerTest, DrainGivesBackTheTokensOfRequestsThatAreFrozenMeanwhile) {
  runner_->step_time = 50;
  const auto context = Context();
  const auto reader = inference_->Generate(context.get(), Request(400));
  ASSERT_TRUE(Eventually([&] { return engine_->stats().steps > 3; }));
  std::thread drain([&] { Drain(absl::Hours(1), absl::Seconds(1)); });
  EXPECT_TRUE(Eventually([&] { return services_.draining.load(); }));
  v1::PauseResponse paused;
  EXPECT_TRUE(control_->Pause(Context().get(), v1::PauseRequest(), &paused).ok());
  v1::GenerateResponse message;
  EXPECT_TRUE(reader->Read(&message));
  EXPECT_EQ(message.finish().reason(), v1::FINISH_REASON_ABORTED);
  EXPECT_FALSE(message.token_ids().empty());
  EXPECT_TRUE(reader->Finish().ok());
  drain.join();
}

TEST_F(ServerTest, DrainAnswersAPublishThatHasNoVersionYet) {
  // The disk takes its time for the number, and for what is retired after the version is READY.
  ThreadPool disk(1, 0);
  absl::Notification taken;
  publisher_.on_publish = [&](const adapter::PublishOptions& options,
                              adapter::PublishCallback done) {
    disk.Submit([this, options, done = std::move(done)] {
      absl::SleepFor(absl::Milliseconds(700));
      const absl::StatusOr<adapter::PublishResult> result = publisher_.PublishNow(options);
      absl::SleepFor(absl::Milliseconds(700));
      done(result);
    });
    taken.Notify();
  };
  v1::PublishFromPathRequest request;
  request.set_name("a");
  request.set_path("/somewhere");
  v1::PublishFromPathResponse response;
  grpc::Status status;
  std::thread publish(
      [&] { status = adapters_->PublishFromPath(Context().get(), request, &response); });
  taken.WaitForNotification();
  Drain(absl::Minutes(1), absl::ZeroDuration());
  server_->Shutdown(absl::Milliseconds(200));
  publish.join();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.adapter().version(), 1);
}

TEST_F(ServerTest, DrainAnswersAnActivateThatWaitsForTheDisk) {
  ASSERT_TRUE(Publish("a", /*activate=*/false).first.ok());
  const grpc::Status status = ActivateInADrain();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST_F(ServerTest, DrainAnswersAnActivateThoughTheServerSleeps) {
  ASSERT_TRUE(Publish("a", /*activate=*/false).first.ok());
  GoToSleep({"weights", "kv", "adapters"});
  const grpc::Status status = ActivateInADrain();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST_F(ServerTest, DrainWaitsForLoadsUnlessTheWeightsSleep) {
  std::vector<adapter::PublishCallback> held;
  absl::Notification taken;
  publisher_.on_publish = [&](const adapter::PublishOptions&, adapter::PublishCallback done) {
    held.push_back(std::move(done));
    taken.Notify();
  };
  grpc::Status status;
  std::thread publish([&] { status = Publish("a").first; });
  taken.WaitForNotification();
  GoToSleep({"kv"});
  std::atomic<bool> drained{false};
  std::thread drain([&] {
    Drain(absl::Hours(1), absl::ZeroDuration());
    drained = true;
  });
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_FALSE(drained);
  GoToSleep({"kv", "weights"});
  drain.join();
  held.front()(absl::CancelledError("as the loader's end says"));
  publish.join();
}

TEST_F(ServerTest, DrainLetsAnUploadFinishAndAnswersIt) {
  const auto context = Context();
  v1::PublishResponse response;
  const auto writer = adapters_->Publish(context.get(), &response);
  writer->Write(BeginUpload("u", 1 << 20));
  ASSERT_TRUE(Eventually([&] { return Uploaded("u").total_bytes() == 1 << 20; }));
  std::thread drain([&] {
    Drain(absl::Minutes(1), absl::ZeroDuration());
    server_->Shutdown(absl::Milliseconds(200));
  });
  EXPECT_TRUE(Eventually([&] { return services_.draining.load(); }));
  absl::SleepFor(absl::Milliseconds(500));
  writer->Write(Chunk(0, 'a'));
  v1::PublishRequest commit;
  commit.mutable_commit();
  writer->Write(commit);
  const grpc::Status status = writer->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.adapter().version(), 1);
  drain.join();
}

TEST_F(ServerTest, DrainWaitsForAnUploadThatStallsNoLongerThanItsTime) {
  const auto context = Context();
  v1::PublishResponse response;
  const auto writer = adapters_->Publish(context.get(), &response);
  writer->Write(BeginUpload("u", 1 << 20));
  ASSERT_TRUE(Eventually([&] { return Uploaded("u").total_bytes() == 1 << 20; }));
  Drain(absl::Milliseconds(200), absl::ZeroDuration());
  server_->Shutdown(absl::Milliseconds(200));
  EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

// Its answer is far larger than what a client takes that does not ask for it.
TEST_F(ServerTest, DrainWaitsForAScoreWhoseAnswerIsBeingSent) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto stub = v1::InferenceService::NewStub(
      grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(), arguments));
  v1::ScoreRequest request;
  for (int i = 0; i < 500; ++i) {
    request.add_sequences()->set_token_ids(Pack<int32_t>(std::vector<int32_t>(kContext, 7)));
  }
  const auto context = Context();
  grpc::CompletionQueue queue;
  const auto next = [&] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  const auto call = stub->AsyncScore(context.get(), request, &queue);
  call->ReadInitialMetadata(nullptr);
  ASSERT_TRUE(next());
  ASSERT_TRUE(Eventually([&] { return engine_->idle(); }));
  std::atomic<bool> drained{false};
  std::thread drain([&] {
    Drain(absl::Minutes(1), absl::ZeroDuration());
    drained = true;
  });
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_FALSE(drained);
  v1::ScoreResponse response;
  grpc::Status status;
  call->Finish(&response, &status, nullptr);
  EXPECT_TRUE(next());
  drain.join();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.sequences_size(), 500);
}

void ExpectAbortedWithTokens(grpc::ClientReader<v1::GenerateResponse>* reader) {
  v1::GenerateResponse message;
  EXPECT_TRUE(reader->Read(&message));
  EXPECT_EQ(message.finish().reason(), v1::FINISH_REASON_ABORTED);
  EXPECT_FALSE(message.token_ids().empty());
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(ServerTest, DrainGivesBackTheTokensOfWhatIsLeftAfterItsTime) {
  runner_->step_time = 50;
  const auto context = Context();
  const auto reader = inference_->Generate(context.get(), Request(400));
  ASSERT_TRUE(Eventually([&] { return engine_->stats().steps > 1; }));
  std::thread drain([&] { Drain(absl::Milliseconds(100), absl::Seconds(10)); });
  ExpectAbortedWithTokens(reader.get());
  drain.join();
}

TEST_F(ServerTest, DrainTakesRequestsUntilItsDelayHasPassed) {
  std::thread drain([&] {
    server_->Drain({absl::Hours(1), absl::Minutes(1), absl::Seconds(1)}, hurry_);
  });
  EXPECT_TRUE(Eventually([&] { return !IsServing(server_->address(), "readiness"); }));
  EXPECT_TRUE(IsServing(server_->address(), "liveness"));
  EXPECT_TRUE(Generate(Request(5)).status.ok());
  hurry_.Notify();
  drain.join();
  EXPECT_EQ(ReasonOfWire(Generate(Request(1)).status), "SHUTTING_DOWN");
}

TEST_F(ServerTest, DrainInAHurryGivesBackTheTokensOfWhatRuns) {
  runner_->step_time = 50;
  const auto context = Context();
  const auto reader = inference_->Generate(context.get(), Request(400));
  ASSERT_TRUE(Eventually([&] { return engine_->stats().steps > 1; }));
  std::thread drain([&] { Drain(absl::Hours(1), absl::Seconds(10)); });
  ASSERT_TRUE(Eventually([&] { return services_.draining.load(); }));
  hurry_.Notify();
  ExpectAbortedWithTokens(reader.get());
  drain.join();
}

}  // namespace
}  // namespace dorad::rpc
