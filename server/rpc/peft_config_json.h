// PeftConfig as the adapter_config.json that it stands for, so that there is one validation of
// both. Pure functions, hence thread-safe.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "dorad/v1/adapters.pb.h"

namespace dorad::rpc {

// What is not set is left out, except that a selector without a choice selects nothing.
std::string ToAdapterConfigJson(const v1::PeftConfig& config);

// The refusal of such a configuration, in the terms of the message: "peft_config.r" instead of
// "adapter_config.json:r".
absl::Status NamePeftConfigFields(const absl::Status& refusal);

}  // namespace dorad::rpc
