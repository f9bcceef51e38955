// Checks of the sampling fields that change logits. Pure and therefore thread-safe.
#pragma once

#include "dorad/v1/inference.pb.h"
#include "server/engine/types.h"
#include "server/rpc/field_validation.h"

namespace dorad::rpc {

// Adds all problems to `violations`.
engine::LogitParams ReadLogitParams(const v1::SamplingParams& wire,
                                    const engine::EngineLimits& limits, Violations* violations);

}  // namespace dorad::rpc
