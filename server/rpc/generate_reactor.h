// One Generate call: carries deltas from the engine's TokenStream to the client. While a write is
// outstanding, the stream merges what the client has not taken. Lifetime and thread-safety as
// PumpedWriter.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "dorad/v1/inference.pb.h"
#include "server/engine/token_stream.h"
#include "server/rpc/encode.h"
#include "server/rpc/pumped_writer.h"

namespace dorad::rpc {

class GenerateReactor final : public PumpedWriter<v1::GenerateRequest, v1::GenerateResponse> {
 public:
  GenerateReactor(Services* services, grpc::CallbackServerContext* context);

 private:
  int64_t MaxRequestBytes() const override;
  // Validates, takes a lease and submits.
  absl::Status Begin(const v1::GenerateRequest& request) override;
  absl::Status AdmitTokens(int64_t tokens) const;
  std::function<void(int64_t)> Meter() const;
  Turn Next(v1::GenerateResponse* response) override;
  void CancelSource() override;
  void LeaveSource() override;

  std::string ChosenRequestId() ABSL_LOCKS_EXCLUDED(mu_);
  void NameRequest(const engine::RequestBase& request) ABSL_LOCKS_EXCLUDED(mu_);

  std::optional<OpenCount> open_;                // from Begin until gRPC is done
  std::shared_ptr<engine::TokenStream> stream_;  // set once, by Begin
  GenerateHeader header_;
};

}  // namespace dorad::rpc
