// dorad.v1.InferenceService over the engine. Owned by Server. Thread-safe.
#pragma once

#include <memory>

#include "dorad/v1/inference.pb.h"
#include "server/rpc/late_service.h"
#include "server/rpc/services.h"
#include "server/rpc/unary_call.h"

namespace dorad::rpc {

class InferenceService final : public LateService {
 public:
  explicit InferenceService(Services* services);

 private:
  void Score(const std::shared_ptr<UnaryCall<v1::ScoreResponse>>& call,
             const v1::ScoreRequest& request);
  void Abort(const std::shared_ptr<UnaryCall<v1::AbortResponse>>& call,
             const v1::AbortRequest& request);
};

}  // namespace dorad::rpc
