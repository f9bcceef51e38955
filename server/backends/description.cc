#include "server/backends/description.h"

#include <algorithm>
#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/backends/backend.h"
#include "server/engine/model_runner.h"
#include "server/platform/error.h"
#include "server/platform/log.h"

namespace dorad {
namespace {

std::string FolderName(const std::string& path) {
  const std::filesystem::path normal = std::filesystem::path(path).lexically_normal();
  return (normal.has_filename() ? normal : normal.parent_path()).filename().string();
}

// For a sequence of a token and the next one's block.
int64_t LeastPages(const engine::KvNeeds& needs) { return needs.PagesFor(1) + needs.groups(); }

}  // namespace

absl::StatusOr<int64_t> ContextLength(const model::ModelConfig& model, int64_t max_context) {
  if (max_context > model.context_length) {
    return MakeInvalid(
        "model",
        {{"model.max_context", "MAX_CONTEXT_OUT_OF_RANGE",
          absl::StrCat(max_context, " is more than the model's own ", model.context_length)}});
  }
  return max_context > 0 ? max_context : model.context_length;
}

absl::StatusOr<int64_t> KvPages(int64_t kv_bytes, const KvSizes& sizes) {
  const int64_t pages = kv_bytes / sizes.page_bytes;
  const int64_t least = LeastPages(sizes.needs);
  if (pages < least) {
    return MakeInvalid(
        "engine", {{"engine.kv_bytes", "KV_TOO_SMALL",
                    absl::StrCat(kv_bytes, " bytes hold ", pages, " pages of ", sizes.page_bytes,
                                 " bytes; at least ", least, " are needed")}});
  }
  return pages;
}

bool FactorsInBf16(const Config& config) {
  return config.adapters.dtype == "bf16" ||
         (config.adapters.dtype == "auto" && config.model.compute_dtype == "bf16");
}

int64_t AutoKvPages(int64_t available, const KvSizes& sizes, int64_t context_length,
                    int64_t max_running_sequences) {
  const int64_t usable = max_running_sequences * sizes.needs.PagesFor(context_length);
  return std::max(LeastPages(sizes.needs), std::min(available / sizes.page_bytes, usable));
}

absl::Status Backend::Describe(const Config& config, const model::ModelConfig& model,
                               const KvSizes& kv, int64_t kv_available) {
  DORAD_ASSIGN_OR_RETURN(info_.context_length, ContextLength(model, config.model.max_context));
  if (config.engine.kv_bytes == 0) {
    info_.kv_pages =
        AutoKvPages(kv_available, kv, info_.context_length, config.engine.max_running_sequences);
  } else {
    DORAD_ASSIGN_OR_RETURN(info_.kv_pages, KvPages(config.engine.kv_bytes, kv));
  }
  const int64_t whole = kv.needs.PagesFor(info_.context_length);
  info_.whole_context_kv_bytes = whole * kv.page_bytes;
  if (kv.needs.state_pages > 0) {
    LogInfo("each running sequence has a recurrent state in the KV cache",
            {{"bytes", kv.needs.state_pages * kv.page_bytes}});
  }
  if (info_.kv_pages < whole) {
    LogWarning("the KV cache is smaller than one whole context: longer requests are refused",
               {{"context_length", info_.context_length},
                {"kv_tokens", kv.needs.TokensIn(info_.kv_pages)},
                {"engine.kv_bytes_needed", info_.whole_context_kv_bytes}});
  }
  info_.kv_bytes = info_.kv_pages * kv.page_bytes;
  info_.kv_min_pages = (config.memory.kv_min_bytes + kv.page_bytes - 1) / kv.page_bytes;
  info_.model_type = model.model_type;
  info_.name = FolderName(config.model.path);
  info_.vocab_size = model.vocab_size;
  info_.image_token_ids = model.image_token_ids;
  if (model.vision) {
    info_.images.token_id = model.vision->image_token_id;
    info_.images.patch_elements = model.vision->patch_elements();
    info_.images.merge = model.vision->merge;
    info_.images.row_breaks = model.vision->row_breaks;
    info_.images.byte_pixels = std::make_shared<const model::BytePixels>(model.vision->byte_pixels);
    info_.images.bidirectional = model.vision->bidirectional;
    info_.images.fixed_side = model.vision->fixed_side;
  }
  info_.hidden_size = model.hidden_size;
  info_.num_layers = model.num_layers();
  info_.eos_token_ids = model.eos_token_ids;
  return absl::OkStatus();
}

}  // namespace dorad
