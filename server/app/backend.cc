#include "server/app/backend.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/engine/cpu_model_runner.h"
#include "server/model/model_config.h"
#include "server/model/weights.h"

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

absl::StatusOr<int64_t> KvPages(int64_t kv_bytes, int64_t page_bytes) {
  const int64_t pages = kv_bytes / page_bytes;
  if (pages < 2) {
    return MakeInvalid("engine", {{"engine.kv_bytes", "KV_TOO_SMALL",
                                   absl::StrCat(kv_bytes, " bytes hold ", pages, " pages of ",
                                                page_bytes, " bytes; at least 2 are needed")}});
  }
  return pages;
}

}  // namespace

struct Backend::Impl {
  std::unique_ptr<model::LoadedModel> model;
  Info info;
};

Backend::Backend(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Backend::~Backend() = default;

absl::StatusOr<std::unique_ptr<Backend>> Backend::Load(const Config& config) {
  // The server's own thread team does the heavy work; torch's threads would spin beside it.
  at::set_num_threads(1);
  const std::string& path = config.model.path;
  DORAD_ASSIGN_OR_RETURN(model::ModelConfig model_config, model::ReadModelConfig(path));
  DORAD_ASSIGN_OR_RETURN(const int64_t context,
                         ContextLength(model_config, config.model.max_context));
  const auto compute =
      config.model.compute_dtype == "bf16" ? ops::ComputeDType::kBF16 : ops::ComputeDType::kF32;
  ops::NormOptions norms;
  norms.chunk_budget_bytes = config.adapters.norm_chunk_bytes;
  auto impl = std::make_unique<Impl>();
  DORAD_ASSIGN_OR_RETURN(impl->model,
                         model::LoadedModel::Load(path, std::move(model_config), compute, norms));
  const int64_t page_bytes = engine::CpuKvPageBytes(*impl->model);
  DORAD_ASSIGN_OR_RETURN(const int64_t pages, KvPages(config.engine.kv_bytes, page_bytes));
  const model::ModelConfig& model = impl->model->config();
  Info& info = impl->info;
  info.model_type = model.model_type;
  info.name = FolderName(path);
  info.digest = impl->model->digest();
  info.vocab_size = model.vocab_size;
  info.hidden_size = model.hidden_size;
  info.num_layers = model.num_layers;
  info.context_length = context;
  info.num_parameters = impl->model->num_parameters();
  info.eos_token_ids = model.eos_token_ids;
  info.kv_pages = pages;
  info.weight_bytes = impl->model->bytes();
  info.kv_bytes = pages * page_bytes;
  return std::unique_ptr<Backend>(new Backend(std::move(impl)));
}

const Backend::Info& Backend::info() const { return impl_->info; }
const adapter::BaseModules& Backend::modules() const { return impl_->model->modules(); }
adapter::BaseWeightSource* Backend::base_weights() { return impl_->model.get(); }
int64_t Backend::norm_bytes() const { return impl_->model->norm_cache_bytes(); }

std::unique_ptr<engine::ModelRunner> Backend::MakeRunner() const {
  return engine::MakeCpuModelRunner(*impl_->model, impl_->info.kv_pages,
                                    impl_->info.context_length);
}

}  // namespace dorad
