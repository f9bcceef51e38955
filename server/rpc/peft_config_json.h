// Writes a PeftConfig as adapter_config.json, so that both share one validation. Pure functions and
// therefore thread-safe.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "dorad/v1/adapters.pb.h"

namespace dorad::rpc {

// Leaves out unset fields, except that a selector without a choice selects nothing.
std::string ToAdapterConfigJson(const v1::PeftConfig& config);

// A refusal of that JSON, with the message's field names: "peft_config.r" instead of
// "adapter_config.json:r".
absl::Status NamePeftConfigFields(const absl::Status& refusal);

}  // namespace dorad::rpc
