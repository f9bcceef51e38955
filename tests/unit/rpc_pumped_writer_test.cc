// PumpedWriter behind a real listener, with a source whose timing the test decides.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "dorad/v1/inference.grpc.pb.h"
#include "server/base/error.h"
#include "server/rpc/pumped_writer.h"

namespace dorad::rpc {
namespace {

// Its source ends as soon as it is cancelled, and wakes the call from another thread before
// CancelSource has returned.
class EndsAtCancel final : public PumpedWriter<v1::GenerateResponse> {
 public:
  EndsAtCancel(Services* services, grpc::CallbackServerContext* context)
      : PumpedWriter("Generate", services, context) {}

  // NOLINTNEXTLINE(readability-convert-member-functions-to-static): as StartAs calls it.
  absl::Status Begin(const v1::GenerateRequest& request) {
    if (request.adapter().empty()) throw std::runtime_error("secret internals");
    return MakeError(absl::StatusCode::kNotFound, "ADAPTER_NOT_FOUND", "as told");
  }

 private:
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

class PumpingService final : public v1::InferenceService::CallbackService {
 public:
  explicit PumpingService(Services* services) : services_(services) {}

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override {
    return EndsAtCancel::StartAs<EndsAtCancel>(services_, context, *request);
  }

 private:
  Services* const services_;
};

class PumpedWriterTest : public testing::Test {
 protected:
  PumpedWriterTest() {
    services_.metrics = &metrics_;
    services_.couriers = &couriers_;
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    stub_ = v1::InferenceService::NewStub(grpc::CreateChannel("127.0.0.1:" + std::to_string(port),
                                                              grpc::InsecureChannelCredentials()));
  }
  ~PumpedWriterTest() override { server_->Shutdown(); }

  grpc::Status Generate(const std::string& adapter) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
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
  PumpingService service_{&services_};
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::InferenceService::Stub> stub_;
};

TEST_F(PumpedWriterTest, AThrowIsToldEvenIfTheCancelledSourceEndsFirst) {
  const grpc::Status status = Generate("");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(status.error_message().find("secret"), std::string::npos) << status.error_message();
}

TEST_F(PumpedWriterTest, ARefusalIsToldEvenIfTheCancelledSourceEndsFirst) {
  EXPECT_EQ(Generate("unknown").error_code(), grpc::StatusCode::NOT_FOUND);
}

}  // namespace
}  // namespace dorad::rpc
