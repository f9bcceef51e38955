// UnaryCall behind a real listener, with handlers whose timing the test decides.
#include "server/rpc/unary_call.h"

#include <grpcpp/grpcpp.h>

#include "dorad/v1/inference.grpc.pb.h"
#include "server/rpc/raw_service.h"
#include "tests/unit/rpc/loopback.h"
#include "tests/unit/support/test.h"

namespace dorad::rpc {
namespace {

using AbortCall = UnaryCall<v1::AbortResponse>;
using Handle = std::function<void(const std::shared_ptr<AbortCall>&)>;

class HandlingService final : public RawService {
 public:
  HandlingService(Services* services, Handle handle)
      : RawService("dorad.v1.InferenceService", services), handle_(std::move(handle)) {
    AddUnary("Abort", &HandlingService::Abort);
  }

 private:
  absl::Status Abort(const std::shared_ptr<AbortCall>& call, const v1::AbortRequest& /*request*/) {
    handle_(call);
    return absl::OkStatus();
  }

  const Handle handle_;
};

class UnaryCallTest : public testing::Test {
 protected:
  UnaryCallTest() {
    services_.metrics = &metrics_;
    services_.message_deadlines = std::make_unique<MessageDeadlines>(absl::Seconds(60));
  }
  ~UnaryCallTest() override { Shutdown(); }

  void Serve(Handle handle) {
    service_ = std::make_unique<HandlingService>(&services_, std::move(handle));
    Loopback loopback = ListenOnLoopback(service_.get());
    server_ = std::move(loopback.server);
    stub_ = v1::InferenceService::NewStub(loopback.channel);
  }

  // `context`: of this call alone.
  grpc::StatusCode Abort(grpc::ClientContext* context) {
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    v1::AbortResponse response;
    return stub_->Abort(context, v1::AbortRequest(), &response).error_code();
  }
  grpc::StatusCode Abort() {
    grpc::ClientContext context;
    return Abort(&context);
  }

  void Shutdown() {
    if (server_) server_->Shutdown();
  }

  Metrics metrics_{{"test", "test", "test", "cpu", "fp32"}};
  Services services_;
  std::unique_ptr<HandlingService> service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::InferenceService::Stub> stub_;
};

TEST_F(UnaryCallTest, IsGoneAfterItsEndEvenIfItsCancelHandlerHoldsIt) {
  std::weak_ptr<AbortCall> alive;
  Serve([&](const std::shared_ptr<AbortCall>& call) {
    alive = call;
    call->set_on_cancel([call] { call->End(absl::OkStatus()); });
    call->End(absl::OkStatus());
  });
  EXPECT_EQ(Abort(), grpc::StatusCode::OK);
  Shutdown();
  EXPECT_TRUE(alive.expired());
}

TEST_F(UnaryCallTest, CancelledWhileItsHandlerRunsUndoesWhatThatArrangedFor) {
  absl::Notification begun, given_up, undone;
  Serve([&](const std::shared_ptr<AbortCall>& call) {
    begun.Notify();
    given_up.WaitForNotification();
    absl::SleepFor(absl::Milliseconds(200));  // the cancel arrives here, on all but busy machines
    EXPECT_FALSE(call->record().request_id().empty());
    call->record().NameAdapter({"a", 1});
    call->set_on_cancel([&undone] { undone.Notify(); });
  });
  grpc::ClientContext context;
  std::thread client([&] { EXPECT_EQ(Abort(&context), grpc::StatusCode::CANCELLED); });
  begun.WaitForNotification();
  context.TryCancel();
  client.join();
  given_up.Notify();
  EXPECT_TRUE(undone.WaitForNotificationWithTimeout(absl::Seconds(60)));
}

TEST_F(UnaryCallTest, AHandlerThatThrowsUndoesWhatItArrangedFor) {
  std::atomic<int> undone{0};
  Serve([&](const UnaryPtr<v1::AbortResponse>& call) {
    call->set_on_cancel([&undone] { ++undone; });
    throw std::runtime_error("secret internals");
  });
  EXPECT_EQ(Abort(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(undone, 1);
}

TEST_F(UnaryCallTest, AnsweredWhileItsHandlerRunsIsNotCancelledAfterwards) {
  std::atomic<int> undone{0};
  Serve([&](const std::shared_ptr<AbortCall>& call) {
    call->Complete([](v1::AbortResponse* to) {
      to->set_aborted(7);
      return absl::OkStatus();
    });
    call->set_on_cancel([&undone] { ++undone; });
  });
  EXPECT_EQ(Abort(), grpc::StatusCode::OK);
  Shutdown();
  EXPECT_EQ(undone, 0);
}

}  // namespace
}  // namespace dorad::rpc
