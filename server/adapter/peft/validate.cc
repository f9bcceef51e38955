#include "server/adapter/peft/validate.h"

#include <utility>

#include "server/adapter/peft/peft_config.h"
#include "server/adapter/peft/targets.h"
#include "server/adapter/peft/violations.h"

namespace dorad::adapter {
namespace {

struct Plan {
  bool use_dora = false;
  std::vector<Target> targets;
};

absl::StatusOr<Plan> ReadPlan(const std::string& config_json, const BaseModules& modules,
                              int max_rank) {
  DORAD_ASSIGN_OR_RETURN(const PeftConfig config, ParsePeftConfig(config_json, max_rank));
  Plan plan;
  plan.use_dora = config.use_dora;
  DORAD_ASSIGN_OR_RETURN(plan.targets, ResolveTargets(config, modules));
  return plan;
}

}  // namespace

absl::StatusOr<ValidAdapter> ValidateAdapter(const std::string& config_json, ByteBuffer safetensors,
                                             const BaseModules& modules, int max_rank) {
  absl::StatusOr<std::unique_ptr<SafetensorsFile>> file =
      SafetensorsFile::Parse(std::move(safetensors), "adapter_model.safetensors");
  if (!file.ok()) {
    Violations violations;
    violations.AddAll(ReadPlan(config_json, modules, max_rank).status());
    violations.AddAll(file.status());
    return violations.ToStatus("adapter");
  }
  ValidAdapter valid;
  valid.file = *std::move(file);
  DORAD_ASSIGN_OR_RETURN(valid.tensors, ValidateTensors(config_json, valid.file->tensors(),
                                                        TensorPlace::kHost, modules, max_rank));
  return valid;
}

absl::StatusOr<AdapterTensors> ValidateTensors(const std::string& config_json,
                                               const std::map<std::string, TensorView>& tensors,
                                               TensorPlace place, const BaseModules& modules,
                                               int max_rank) {
  const absl::StatusOr<Plan> plan = ReadPlan(config_json, modules, max_rank);
  if (!plan.ok()) {
    Violations violations;
    violations.AddAll(plan.status());
    violations.AddAll(CheckTensorsAlone(tensors, place, modules));
    return violations.ToStatus("adapter");
  }
  return MapTensors(tensors, place, plan->use_dora, plan->targets, modules);
}

}  // namespace dorad::adapter
