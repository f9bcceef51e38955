#include "server/adapter/peft/validate.h"

#include <optional>
#include <utility>

#include "server/adapter/peft/peft_config.h"
#include "server/adapter/peft/targets.h"
#include "server/adapter/peft/violations.h"

namespace dorad::adapter {
namespace {

constexpr char kSubject[] = "adapter";

// The configuration, its targets and the tensors, as far as each can be judged after violations
// before it. tensors: nullptr if the file cannot be read.
AdapterTensors Check(const std::string& config_json,
                     const std::map<std::string, TensorView>* tensors, TensorPlace place,
                     const BaseModules& base, int max_rank, Violations& violations) {
  const BaseModules& modules = tensors == nullptr ? base : SpellingOf(*tensors, base);
  const std::optional<PeftConfig> config = ParsePeftConfig(config_json, max_rank, violations);
  Targets targets;
  targets.complete = false;
  std::optional<bool> use_dora;
  if (config) {
    targets = ResolveTargets(*config, modules, violations);
    if (!config->Refuses({"use_dora"})) use_dora = config->use_dora;
  }
  if (tensors == nullptr) return {};
  return MapTensors(*tensors, place, use_dora, targets, modules, violations);
}

}  // namespace

absl::StatusOr<ValidAdapter> ValidateAdapter(const std::string& config_json,
                                             SharedBytes safetensors, const BaseModules& modules,
                                             int max_rank) {
  absl::StatusOr<std::unique_ptr<SafetensorsFile>> file =
      SafetensorsFile::Parse(std::move(safetensors), "adapter_model.safetensors");
  Violations violations;
  ValidAdapter valid;
  valid.tensors = Check(config_json, file.ok() ? &(*file)->tensors() : nullptr, TensorPlace::kHost,
                        modules, max_rank, violations);
  if (!file.ok()) violations.AddAll(file.status());
  DORAD_RETURN_IF_ERROR(violations.ToStatus(kSubject));
  valid.file = *std::move(file);
  return valid;
}

absl::StatusOr<AdapterTensors> ValidateTensors(const std::string& config_json,
                                               const std::map<std::string, TensorView>& tensors,
                                               TensorPlace place, const BaseModules& modules,
                                               int max_rank) {
  Violations violations;
  AdapterTensors valid = Check(config_json, &tensors, place, modules, max_rank, violations);
  DORAD_RETURN_IF_ERROR(violations.ToStatus(kSubject));
  return valid;
}

}  // namespace dorad::adapter
