#include "server/backends/backend.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/backends/description.h"
#include "server/platform/error.h"
#include "server/platform/process/host_memory.h"

namespace dorad {
namespace {

KvSizes KvSizesOf(const Config& config, const model::ModelConfig& model) {
#ifdef DORAD_CUDA
  if (config.model.device != "cpu") return CudaKvSizes(config, model);
#endif
  return CpuKvSizes(config, model);
}

absl::Status CheckDevice(const Config& config, const model::ModelConfig& model) {
  if (config.model.device == "cpu") {
    if (!model.fp8_kv) return absl::OkStatus();
    return MakeInvalid("engine", {{"engine.kv_dtype", "KV_DTYPE_UNSUPPORTED",
                                   "fp8 needs a GPU (model.device is cpu)"}});
  }
#ifdef DORAD_CUDA
  return CheckCudaConfig(config, model);
#else
  return MakeInvalid("model", {{"model.device", "DEVICE_NOT_BUILT",
                                "this binary was built without CUDA (no nvcc was found)"}});
#endif
}

// Refuses a cache larger than the machine's memory; only the start can know the free memory.
absl::Status CheckHostHoldsKv(const Config& config) {
  const int64_t total = TotalHostMemory();
  if (config.model.device != "cpu" || config.engine.kv_bytes <= total) return absl::OkStatus();
  return MakeInvalid("engine",
                     {{"engine.kv_bytes", "OUT_OF_MEMORY",
                       absl::StrCat(config.engine.kv_bytes, " bytes are more than the ", total,
                                    " bytes of memory that the server may have here")}});
}

// Reads the model's configuration after all checks that need neither device nor weights.
absl::StatusOr<model::ModelConfig> ReadChecked(const Config& config) {
  DORAD_ASSIGN_OR_RETURN(model::ModelConfig model, Backend::ReadModel(config));
  DORAD_RETURN_IF_ERROR(ContextLength(model, config.model.max_context).status());
  DORAD_RETURN_IF_ERROR(CheckDevice(config, model));
  if (config.engine.kv_bytes == 0) return model;
  DORAD_RETURN_IF_ERROR(KvPages(config.engine.kv_bytes, KvSizesOf(config, model)).status());
  DORAD_RETURN_IF_ERROR(CheckHostHoldsKv(config));
  return model;
}

}  // namespace

const Backend::DeviceChoice& Backend::ChooseDevice() {
  static const auto* const choice = new DeviceChoice([]() -> DeviceChoice {
#ifdef DORAD_CUDA
    const absl::StatusOr<std::string> gpu = FindGpu();
    if (gpu.ok()) return {"cuda", *gpu};
    return {"cpu", std::string(gpu.status().message())};
#else
    return {"cpu", "this binary was built without CUDA"};
#endif
  }());
  return *choice;
}

absl::StatusOr<model::ModelConfig> Backend::ReadModel(const Config& config) {
  DORAD_ASSIGN_OR_RETURN(model::ModelConfig model, model::ReadModelConfig(config.model.path));
  model.fp8_kv = config.engine.kv_dtype == "fp8";
#ifdef DORAD_CUDA
  const std::string& device = config.model.device;
  if (model.vision && (device == "auto" ? ChooseDevice().name : device) != "cpu" &&
      !CheckCudaTower(*model.vision).ok()) {
    model.DropVision();
  }
#endif
  return model;
}

absl::Status Backend::Check(const Config& config) { return ReadChecked(config).status(); }

absl::StatusOr<std::unique_ptr<Backend>> Backend::Load(const Config& config) {
  DORAD_ASSIGN_OR_RETURN(model::ModelConfig model, ReadChecked(config));
#ifdef DORAD_CUDA
  if (config.model.device != "cpu") return LoadCudaBackend(config, std::move(model));
#endif
  return LoadCpuBackend(config, std::move(model));
}

}  // namespace dorad
