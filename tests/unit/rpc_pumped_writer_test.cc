// PumpedWriter behind a real listener, with a source whose timing the test decides.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "dorad/v1/inference.grpc.pb.h"
#include "server/base/error.h"
#include "server/rpc/late_service.h"
#include "server/rpc/pumped_writer.h"
#include "tests/unit/rpc_loopback.h"

namespace dorad::rpc {
namespace {

// Its source ends as soon as it is cancelled, and wakes the call from another thread before
// CancelSource has returned.
class EndsAtCancel final : public PumpedWriter<v1::GenerateRequest, v1::GenerateResponse> {
 public:
  EndsAtCancel(Services* services, grpc::CallbackServerContext* context)
      : PumpedWriter("Generate", services, context) {}

 private:
  absl::Status Begin(const v1::GenerateRequest& request) override {
    if (request.adapter().empty()) throw std::runtime_error("secret internals");
    return MakeError(absl::StatusCode::kNotFound, "ADAPTER_NOT_FOUND", "as told");
  }
  Turn Next(v1::GenerateResponse* /*response*/) override {
    Turn turn;
    if (cancelled_) turn.end = MakeError(absl::StatusCode::kCancelled, "CLIENT_CANCELLED", "gone");
    return turn;
  }
  void CancelSource() override {
    std::thread([this] {
      {
        absl::MutexLock lock(&mu_);
        cancelled_ = true;
      }
      Pump();
    }).join();
  }
  void LeaveSource() override {}

  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
};

// Its source is there when Begin returns, which takes so long that the client gives up meanwhile.
class BeginsSlowly final : public PumpedWriter<v1::GenerateRequest, v1::GenerateResponse> {
 public:
  BeginsSlowly(Services* services, grpc::CallbackServerContext* context)
      : PumpedWriter("Generate", services, context) {}

  inline static std::atomic<bool> began = false;
  inline static std::atomic<bool> cancelled_early = false;
  inline static absl::Notification cancelled;

 private:
  absl::Status Begin(const v1::GenerateRequest& /*request*/) override {
    absl::SleepFor(absl::Milliseconds(300));
    began = true;
    return absl::OkStatus();
  }
  Turn Next(v1::GenerateResponse* /*response*/) override { return {}; }
  void CancelSource() override {
    if (!began) cancelled_early = true;
    if (!cancelled.HasBeenNotified()) cancelled.Notify();
  }
  void LeaveSource() override {}
};

template <typename Reactor>
class PumpingService final : public LateService {
 public:
  explicit PumpingService(Services* services) : LateService("dorad.v1.InferenceService", services) {
    AddServerStream<Reactor>("Generate");
  }
};

class PumpedWriterTest : public testing::Test {
 protected:
  PumpedWriterTest() {
    services_.metrics = &metrics_;
    services_.couriers = &couriers_;
  }
  ~PumpedWriterTest() override { server_->Shutdown(); }

  template <typename Reactor>
  void Serve() {
    service_ = std::make_unique<PumpingService<Reactor>>(&services_);
    Loopback loopback = ListenOnLoopback(service_.get());
    server_ = std::move(loopback.server);
    stub_ = v1::InferenceService::NewStub(loopback.channel);
  }

  grpc::Status Generate(const std::string& adapter,
                        std::chrono::milliseconds deadline = std::chrono::seconds(20)) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + deadline);
    v1::GenerateRequest request;
    request.set_adapter(adapter);
    const auto reader = stub_->Generate(&context, request);
    v1::GenerateResponse message;
    EXPECT_FALSE(reader->Read(&message));
    return reader->Finish();
  }

  Metrics metrics_{{"test", "test", "test", "cpu", "fp32"}};
  ThreadPool couriers_{1, 0};
  Services services_;
  std::unique_ptr<grpc::Service> service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::InferenceService::Stub> stub_;
};

TEST_F(PumpedWriterTest, AThrowIsToldEvenIfTheCancelledSourceEndsFirst) {
  Serve<EndsAtCancel>();
  const grpc::Status status = Generate("");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(status.error_message().find("secret"), std::string::npos) << status.error_message();
}

TEST_F(PumpedWriterTest, ARefusalIsToldEvenIfTheCancelledSourceEndsFirst) {
  Serve<EndsAtCancel>();
  EXPECT_EQ(Generate("unknown").error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(PumpedWriterTest, ASourceIsCancelledOnlyWhenItIsThereAndThenForSure) {
  Serve<BeginsSlowly>();
  EXPECT_EQ(Generate("", std::chrono::milliseconds(50)).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(BeginsSlowly::cancelled.WaitForNotificationWithTimeout(absl::Seconds(20)));
  EXPECT_FALSE(BeginsSlowly::cancelled_early);
}

}  // namespace
}  // namespace dorad::rpc
