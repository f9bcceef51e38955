// All checks of an adapter before its norms are computed, in one call. Functions are thread-safe.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/adapter/peft/base_modules.h"
#include "server/adapter/peft/tensors.h"
#include "server/platform/files/byte_buffer.h"
#include "server/platform/files/safetensors.h"

namespace dorad::adapter {

struct ValidAdapter {
  std::unique_ptr<SafetensorsFile> file;
  AdapterTensors tensors;  // views into the file
};

// INVALID_ARGUMENT listing all problems of the configuration, the targets and the tensors, as far
// as each can be judged after a problem before it. Reasons: docs/guides/adapters.md.
absl::StatusOr<ValidAdapter> ValidateAdapter(const std::string& config_json,
                                             SharedBytes safetensors, const BaseModules& modules,
                                             int max_rank);

// The same for tensors outside a file, in any memory.
absl::StatusOr<AdapterTensors> ValidateTensors(const std::string& config_json,
                                               const std::map<std::string, TensorView>& tensors,
                                               TensorPlace place, const BaseModules& modules,
                                               int max_rank);

}  // namespace dorad::adapter
