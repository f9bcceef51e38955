// dorad.v1.InferenceService over the engine. Owned by Server. Thread-safe.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "dorad/v1/inference.pb.h"
#include "server/rpc/raw_service.h"
#include "server/rpc/services.h"
#include "server/rpc/unary_call.h"

namespace dorad::rpc {

class InferenceService final : public RawService {
 public:
  explicit InferenceService(Services* services);

 private:
  absl::Status Score(const UnaryPtr<v1::ScoreResponse>& call, const v1::ScoreRequest& request);
  absl::Status Abort(const UnaryPtr<v1::AbortResponse>& call, const v1::AbortRequest& request);
};

}  // namespace dorad::rpc
