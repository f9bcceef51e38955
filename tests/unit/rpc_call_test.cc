#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>

#include "dorad/v1/inference.pb.h"
#include "server/rpc/call.h"

namespace dorad::rpc {
namespace {

using Call = UnaryCall<v1::AbortResponse>;

TEST(UnaryCallTest, EndsWithItsCancelHandlerEvenIfThatHoldsIt) {
  Metrics metrics({"test", "test", "test", "cpu", "fp32"});
  Services services;
  services.metrics = &metrics;
  grpc::CallbackServerContext context;
  v1::AbortResponse response;
  std::weak_ptr<Call> alive;
  grpc::ServerUnaryReactor* const reactor =
      Call::Run("Abort", &context, &services, &response, [&](const std::shared_ptr<Call>& call) {
        alive = call;
        call->set_on_cancel([call] { call->End(absl::OkStatus()); });
      });
  EXPECT_FALSE(alive.expired());
  reactor->OnDone();
  EXPECT_TRUE(alive.expired());
}

}  // namespace
}  // namespace dorad::rpc
