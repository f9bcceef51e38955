// One Generate call: sends deltas from the engine's TokenStream to the client. While a write is
// outstanding, the stream merges further deltas. Lifetime and thread-safety as Call.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dorad/v1/inference.pb.h"
#include "server/engine/token_stream.h"
#include "server/engine/types.h"
#include "server/rpc/encode.h"
#include "server/rpc/server_stream_call.h"

namespace dorad::rpc {

class GenerateCall final : public ServerStreamCall {
 public:
  using ServerStreamCall::ServerStreamCall;

 private:
  // Validates, takes a lease and submits.
  absl::Status OnMessage(grpc::ByteBuffer* bytes) override;
  Turn Next() override;
  void CancelWork() override;
  void Release() override;

  // The input with its lease, admitted by the tenant's quota.
  absl::StatusOr<engine::GenerateInput> Admit(const v1::GenerateRequest& request);

  std::shared_ptr<engine::TokenStream> stream_;   // set once, by OnMessage
  std::optional<engine::RequestHandle> request_;  // set once, by OnMessage
  GenerateHeader header_;
  v1::GenerateResponse response_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::rpc
