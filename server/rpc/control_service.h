// dorad.v1.ControlService: what the server is, and pausing it. Owned by Server. Thread-safe.
#pragma once

#include "dorad/v1/control.grpc.pb.h"
#include "server/rpc/services.h"

namespace dorad::rpc {

class ControlService final : public v1::ControlService::CallbackService {
 public:
  explicit ControlService(Services* services) : services_(services) {}

  grpc::ServerUnaryReactor* GetInfo(grpc::CallbackServerContext* context,
                                    const v1::GetInfoRequest* request,
                                    v1::GetInfoResponse* response) override;
  grpc::ServerUnaryReactor* Pause(grpc::CallbackServerContext* context,
                                  const v1::PauseRequest* request,
                                  v1::PauseResponse* response) override;
  grpc::ServerUnaryReactor* Resume(grpc::CallbackServerContext* context,
                                   const v1::ResumeRequest* request,
                                   v1::ResumeResponse* response) override;
  grpc::ServerUnaryReactor* Sleep(grpc::CallbackServerContext* context,
                                  const v1::SleepRequest* request,
                                  v1::SleepResponse* response) override;
  grpc::ServerUnaryReactor* Wake(grpc::CallbackServerContext* context,
                                 const v1::WakeRequest* request,
                                 v1::WakeResponse* response) override;
  grpc::ServerUnaryReactor* ShareBaseWeights(grpc::CallbackServerContext* context,
                                             const v1::ShareBaseWeightsRequest* request,
                                             v1::ShareBaseWeightsResponse* response) override;
  grpc::ServerUnaryReactor* Yield(grpc::CallbackServerContext* context,
                                  const v1::YieldRequest* request,
                                  v1::YieldResponse* response) override;
  grpc::ServerUnaryReactor* EndYield(grpc::CallbackServerContext* context,
                                     const v1::EndYieldRequest* request,
                                     v1::EndYieldResponse* response) override;

 private:
  Services* const services_;
};

}  // namespace dorad::rpc
