// dorad.v1.ControlService: information about the server, pauses, sleep and GPU share. Owned by
// Server. Thread-safe.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "dorad/v1/control.pb.h"
#include "server/rpc/raw_service.h"
#include "server/rpc/services.h"
#include "server/rpc/unary_call.h"

namespace dorad::rpc {

class ControlService final : public RawService {
 public:
  explicit ControlService(Services* services);

 private:
  absl::Status GetInfo(const UnaryPtr<v1::GetInfoResponse>& call,
                       const v1::GetInfoRequest& request);
  absl::Status Pause(const UnaryPtr<v1::PauseResponse>& call, const v1::PauseRequest& request);
  absl::Status Resume(const UnaryPtr<v1::ResumeResponse>& call, const v1::ResumeRequest& request);
  absl::Status Sleep(const UnaryPtr<v1::SleepResponse>& call, const v1::SleepRequest& request);
  absl::Status Wake(const UnaryPtr<v1::WakeResponse>& call, const v1::WakeRequest& request);
  absl::Status ShareBaseWeights(const UnaryPtr<v1::ShareBaseWeightsResponse>& call,
                                const v1::ShareBaseWeightsRequest& request);
  absl::Status LimitGpuShare(const UnaryPtr<v1::LimitGpuShareResponse>& call,
                             const v1::LimitGpuShareRequest& request);
  absl::Status EndGpuShareLimit(const UnaryPtr<v1::EndGpuShareLimitResponse>& call,
                                const v1::EndGpuShareLimitRequest& request);
};

}  // namespace dorad::rpc
