// dorad.v1.InferenceService over the engine. Owned by Server. Thread-safe.
#pragma once

#include "dorad/v1/inference.grpc.pb.h"
#include "server/rpc/services.h"

namespace dorad::rpc {

class InferenceService final : public v1::InferenceService::CallbackService {
 public:
  explicit InferenceService(Services* services) : services_(services) {}

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override;
  grpc::ServerUnaryReactor* Score(grpc::CallbackServerContext* context,
                                  const v1::ScoreRequest* request,
                                  v1::ScoreResponse* response) override;
  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context,
                                  const v1::AbortRequest* request,
                                  v1::AbortResponse* response) override;

 private:
  Services* const services_;
};

}  // namespace dorad::rpc
