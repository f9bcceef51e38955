#include "server/app/adapter_check.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/adapter/peft/base_modules.h"
#include "server/adapter/peft/digest.h"
#include "server/adapter/peft/folder.h"
#include "server/adapter/peft/validate.h"
#include "server/adapter/publish/reader.h"
#include "server/app/options_from_config.h"
#include "server/backends/backend.h"
#include "server/model/model_config.h"
#include "server/platform/error.h"

namespace dorad {

absl::StatusOr<adapter::AdapterSummary> CheckAdapterFiles(const std::string& folder,
                                                          const Config& config) {
  DORAD_ASSIGN_OR_RETURN(const model::ModelConfig model, Backend::ReadModel(config));
  const adapter::BaseModules modules = model::MakeModules(model);
  DORAD_ASSIGN_OR_RETURN(
      adapter::AdapterFiles files,
      adapter::ReadAdapterFolder(folder, {{}, /*trusted=*/true}, config.adapters.max_bytes));
  DORAD_ASSIGN_OR_RETURN(const adapter::ValidAdapter valid,
                         adapter::ValidateAdapter(files.config_json, std::move(files.safetensors),
                                                  modules, ToInt32(config.adapters.max_rank)));
  adapter::AdapterSummary summary = adapter::Summarise(valid.tensors);
  DORAD_ASSIGN_OR_RETURN(summary.digest, adapter::ContentDigest(valid.tensors, modules));
  return summary;
}

std::string ToYaml(const adapter::AdapterSummary& summary) {
  return absl::StrCat("kind: ", summary.kind == adapter::AdapterKind::kDora ? "dora" : "lora",
                      "\nmin_rank: ", summary.min_rank, "\nmax_rank: ", summary.max_rank,
                      "\nnum_modules: ", summary.num_modules,
                      "\nnum_parameters: ", summary.num_parameters, "\ndigest: ", summary.digest,
                      "\nchecked_by_the_server_only:\n"
                      "  - copies of base weights in the file equal the model's\n"
                      "  - no row with a magnitude has a norm of zero\n"
                      "  - the factors fit into the server's number format\n"
                      "  - name, token, quotas and memory\n");
}

}  // namespace dorad
