// ServerStreamCall behind a real listener, with a source whose timing the test decides.
#include "server/rpc/server_stream_call.h"

#include <grpcpp/grpcpp.h>

#include "dorad/v1/inference.grpc.pb.h"
#include "server/rpc/raw_service.h"
#include "tests/unit/rpc/loopback.h"
#include "tests/unit/support/test.h"

namespace dorad::rpc {
namespace {

// Its source ends as soon as it is cancelled, and wakes the call from another thread before
// CancelWork has returned.
class EndsAtCancel final : public ServerStreamCall {
 public:
  using ServerStreamCall::ServerStreamCall;

 private:
  absl::Status OnMessage(grpc::ByteBuffer* bytes) override {
    v1::GenerateRequest request;
    DORAD_RETURN_IF_ERROR(Parse(bytes, &request));
    if (request.adapter().empty()) throw std::runtime_error("secret internals");
    return MakeError(absl::StatusCode::kNotFound, "ADAPTER_NOT_FOUND", "injected");
  }
  Turn Next() override {
    Turn turn;
    if (cancelled_) turn.end = MakeError(absl::StatusCode::kCancelled, "CLIENT_CANCELLED", "gone");
    return turn;
  }
  void CancelWork() override {
    std::thread([this] {
      {
        absl::MutexLock lock(&mu_);
        cancelled_ = true;
      }
      Pump();
    }).join();
  }

  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
};

// Its source is there when OnMessage returns, after the client has given up.
class BeginsSlowly final : public ServerStreamCall {
 public:
  using ServerStreamCall::ServerStreamCall;

  inline static absl::Notification begins, given_up, cancelled;
  inline static std::atomic<bool> is_there = false;
  inline static std::atomic<bool> cancelled_early = false;

 private:
  absl::Status OnMessage(grpc::ByteBuffer* /*bytes*/) override {
    begins.Notify();
    given_up.WaitForNotification();
    absl::SleepFor(absl::Milliseconds(200));  // the cancel arrives here, on all but busy machines
    is_there = true;
    return absl::OkStatus();
  }
  Turn Next() override { return {}; }
  void CancelWork() override {
    if (!is_there) cancelled_early = true;
    if (!cancelled.HasBeenNotified()) cancelled.Notify();
  }
};

template <typename Kind>
class PumpingService final : public RawService {
 public:
  explicit PumpingService(Services* services) : RawService("dorad.v1.InferenceService", services) {
    AddStream<Kind>("Generate");
  }
};

class ServerStreamCallTest : public testing::Test {
 protected:
  ServerStreamCallTest() {
    services_.metrics = &metrics_;
    services_.response_executor = &response_executor_;
    services_.message_deadlines = std::make_unique<MessageDeadlines>(absl::Seconds(60));
  }
  ~ServerStreamCallTest() override { server_->Shutdown(); }

  template <typename Kind>
  void Serve() {
    service_ = std::make_unique<PumpingService<Kind>>(&services_);
    Loopback loopback = ListenOnLoopback(service_.get());
    server_ = std::move(loopback.server);
    stub_ = v1::InferenceService::NewStub(loopback.channel);
  }

  // `context`: of this call alone.
  grpc::Status Generate(const std::string& adapter, grpc::ClientContext* context) {
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    v1::GenerateRequest request;
    request.set_adapter(adapter);
    const auto reader = stub_->Generate(context, request);
    v1::GenerateResponse message;
    EXPECT_FALSE(reader->Read(&message));
    return reader->Finish();
  }
  grpc::Status Generate(const std::string& adapter) {
    grpc::ClientContext context;
    return Generate(adapter, &context);
  }

  Metrics metrics_{{"test", "test", "test", "cpu", "fp32"}};
  ThreadPool response_executor_{1, 0};
  Services services_;
  std::unique_ptr<grpc::Service> service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::InferenceService::Stub> stub_;
};

TEST_F(ServerStreamCallTest, AThrowIsToldEvenIfTheCancelledSourceEndsFirst) {
  Serve<EndsAtCancel>();
  const grpc::Status status = Generate("");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(status.error_message().find("secret"), std::string::npos) << status.error_message();
}

TEST_F(ServerStreamCallTest, ARefusalIsToldEvenIfTheCancelledSourceEndsFirst) {
  Serve<EndsAtCancel>();
  EXPECT_EQ(Generate("unknown").error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(ServerStreamCallTest, ASourceIsCancelledOnlyWhenItIsThereAndThenForSure) {
  Serve<BeginsSlowly>();
  grpc::ClientContext context;
  std::thread client(
      [&] { EXPECT_EQ(Generate("", &context).error_code(), grpc::StatusCode::CANCELLED); });
  BeginsSlowly::begins.WaitForNotification();
  context.TryCancel();
  client.join();
  BeginsSlowly::given_up.Notify();
  EXPECT_TRUE(BeginsSlowly::cancelled.WaitForNotificationWithTimeout(absl::Seconds(60)));
  EXPECT_FALSE(BeginsSlowly::cancelled_early);
}

}  // namespace
}  // namespace dorad::rpc
