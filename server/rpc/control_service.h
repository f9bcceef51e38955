// dorad.v1.ControlService: what the server is, and pausing it. Owned by Server. Thread-safe.
#pragma once

#include <memory>

#include "dorad/v1/control.pb.h"
#include "server/rpc/late_service.h"
#include "server/rpc/services.h"
#include "server/rpc/unary_call.h"

namespace dorad::rpc {

class ControlService final : public LateService {
 public:
  explicit ControlService(Services* services);

 private:
  void GetInfo(const std::shared_ptr<UnaryCall<v1::GetInfoResponse>>& call,
               const v1::GetInfoRequest& request);
  void Pause(const std::shared_ptr<UnaryCall<v1::PauseResponse>>& call,
             const v1::PauseRequest& request);
  void Resume(const std::shared_ptr<UnaryCall<v1::ResumeResponse>>& call,
              const v1::ResumeRequest& request);
  void Sleep(const std::shared_ptr<UnaryCall<v1::SleepResponse>>& call,
             const v1::SleepRequest& request);
  void Wake(const std::shared_ptr<UnaryCall<v1::WakeResponse>>& call,
            const v1::WakeRequest& request);
  void ShareBaseWeights(const std::shared_ptr<UnaryCall<v1::ShareBaseWeightsResponse>>& call,
                        const v1::ShareBaseWeightsRequest& request);
  void Yield(const std::shared_ptr<UnaryCall<v1::YieldResponse>>& call,
             const v1::YieldRequest& request);
  void EndYield(const std::shared_ptr<UnaryCall<v1::EndYieldResponse>>& call,
                const v1::EndYieldRequest& request);
};

}  // namespace dorad::rpc
