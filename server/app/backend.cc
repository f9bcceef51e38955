#include "server/app/backend.h"

#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/host_memory.h"
#include "server/engine/cpu_model_runner.h"

namespace dorad {
namespace {

std::string FolderName(const std::string& path) {
  const std::filesystem::path normal = std::filesystem::path(path).lexically_normal();
  return (normal.has_filename() ? normal : normal.parent_path()).filename().string();
}

absl::StatusOr<int64_t> ContextLength(const model::ModelConfig& model, int64_t max_context) {
  if (max_context > model.context_length) {
    return MakeInvalid(
        "model",
        {{"model.max_context", "MAX_CONTEXT_OUT_OF_RANGE",
          absl::StrCat(max_context, " is more than the model's own ", model.context_length)}});
  }
  return max_context > 0 ? max_context : model.context_length;
}

int64_t KvPageBytes(const Config& config, const model::ModelConfig& model) {
#ifdef DORAD_CUDA
  if (config.model.device != "cpu") return CudaKvPageBytes(model);
#endif
  return engine::CpuKvPageBytes(model, config.model.compute_dtype == "bf16" ? 2 : 4);
}

absl::StatusOr<int64_t> KvPages(int64_t kv_bytes, int64_t page_bytes) {
  const int64_t pages = kv_bytes / page_bytes;
  if (pages < 2) {
    return MakeInvalid("engine", {{"engine.kv_bytes", "KV_TOO_SMALL",
                                   absl::StrCat(kv_bytes, " bytes hold ", pages, " pages of ",
                                                page_bytes, " bytes; at least 2 are needed")}});
  }
  return pages;
}

absl::Status CheckDevice(const Config& config) {
  if (config.model.device == "cpu") return absl::OkStatus();
#ifdef DORAD_CUDA
  return CheckCudaConfig(config);
#else
  return MakeInvalid("model", {{"model.device", "DEVICE_NOT_BUILT",
                                "this binary was built without CUDA (no nvcc was found)"}});
#endif
}

// A cache that the machine can never hold; whether it can at the moment, the start finds out.
absl::Status CheckHostHoldsKv(const Config& config) {
  const int64_t total = TotalHostMemory();
  if (config.model.device != "cpu" || config.engine.kv_bytes <= total) return absl::OkStatus();
  return MakeInvalid("engine",
                     {{"engine.kv_bytes", "OUT_OF_MEMORY",
                       absl::StrCat(config.engine.kv_bytes, " bytes are more than the ", total,
                                    " bytes of memory that the server may have here")}});
}

// The model's, once everything that needs neither device nor weights is known to be right.
absl::StatusOr<model::ModelConfig> ReadChecked(const Config& config) {
  DORAD_ASSIGN_OR_RETURN(model::ModelConfig model, model::ReadModelConfig(config.model.path));
  DORAD_RETURN_IF_ERROR(ContextLength(model, config.model.max_context).status());
  DORAD_RETURN_IF_ERROR(CheckDevice(config));
  DORAD_RETURN_IF_ERROR(KvPages(config.engine.kv_bytes, KvPageBytes(config, model)).status());
  DORAD_RETURN_IF_ERROR(CheckHostHoldsKv(config));
  return model;
}

}  // namespace

absl::Status Backend::Check(const Config& config) { return ReadChecked(config).status(); }

absl::StatusOr<std::unique_ptr<Backend>> Backend::Load(const Config& config) {
  DORAD_ASSIGN_OR_RETURN(model::ModelConfig model, ReadChecked(config));
#ifdef DORAD_CUDA
  if (config.model.device != "cpu") return LoadCudaBackend(config, std::move(model));
#endif
  return LoadCpuBackend(config, std::move(model));
}

absl::Status Backend::Describe(const Config& config, const model::ModelConfig& model) {
  const int64_t page_bytes = KvPageBytes(config, model);
  DORAD_ASSIGN_OR_RETURN(info_.context_length, ContextLength(model, config.model.max_context));
  DORAD_ASSIGN_OR_RETURN(info_.kv_pages, KvPages(config.engine.kv_bytes, page_bytes));
  info_.kv_bytes = info_.kv_pages * page_bytes;
  info_.kv_min_pages = (config.memory.kv_min_bytes + page_bytes - 1) / page_bytes;
  info_.model_type = model.model_type;
  info_.name = FolderName(config.model.path);
  info_.vocab_size = model.vocab_size;
  info_.hidden_size = model.hidden_size;
  info_.num_layers = model.num_layers;
  info_.eos_token_ids = model.eos_token_ids;
  return absl::OkStatus();
}

bool FactorsInBf16(const Config& config) {
  return config.adapters.dtype == "bf16" ||
         (config.adapters.dtype == "auto" && config.model.compute_dtype == "bf16");
}

}  // namespace dorad
