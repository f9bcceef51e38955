#include "server/app/options_from_config.h"

#include <algorithm>
#include <filesystem>
#include <limits>

#include "absl/time/clock.h"
#include "commit.h"
#include "server/engine/model_runner.h"
#include "server/platform/log.h"

namespace dorad {

int32_t ToInt32(int64_t value) {
  return static_cast<int32_t>(std::min<int64_t>(value, std::numeric_limits<int32_t>::max()));
}

Config Resolved(Config config) {
  ModelOptions& model = config.model;
  if (model.device == "auto") model.device = Backend::ChooseDevice().name;
  const bool on_cpu = model.device == "cpu";
  if (model.compute_dtype == "auto") model.compute_dtype = on_cpu ? "fp32" : "bf16";
  if (config.engine.kv_dtype == "auto") config.engine.kv_dtype = model.compute_dtype;
  const auto choose = [on_cpu](int64_t* value, int64_t cpu, int64_t gpu) {
    if (*value == 0) *value = on_cpu ? cpu : gpu;
  };
  choose(&config.engine.max_step_tokens, 512, 2048);
  choose(&config.engine.max_running_sequences, 256, 1024);
  choose(&config.server.max_concurrent_streams, 1024, 4096);
  return config;
}

std::vector<LogField> ChosenValues(const Config& config, const Config& resolved,
                                   const Backend::Info& model) {
  std::vector<LogField> chosen;
  if (config.model.device == "auto") {
    chosen.emplace_back("model.device", resolved.model.device);
    chosen.emplace_back("because", Backend::ChooseDevice().reason);
  }
  if (config.model.compute_dtype == "auto") {
    chosen.emplace_back("model.compute_dtype", resolved.model.compute_dtype);
  }
  if (config.engine.kv_dtype == "auto") {
    chosen.emplace_back("engine.kv_dtype", resolved.engine.kv_dtype);
  }
  const auto add = [&chosen](const char* key, int64_t configured, int64_t value) {
    if (configured == 0) chosen.emplace_back(key, value);
  };
  add("engine.max_step_tokens", config.engine.max_step_tokens, resolved.engine.max_step_tokens);
  add("engine.max_running_sequences", config.engine.max_running_sequences,
      resolved.engine.max_running_sequences);
  add("engine.kv_bytes", config.engine.kv_bytes, model.kv_bytes);
  add("server.max_concurrent_streams", config.server.max_concurrent_streams,
      resolved.server.max_concurrent_streams);
  return chosen;
}

void ApplyLogging(const LogConfig& config) {
  LogLevel level = LogLevel::kInfo;
  ParseLogLevel(config.level, &level);
  SetLogging(level, config.format == "json", config.requests);
}

engine::EngineOptions ToEngineOptions(const Config& config, const Backend::Info& model) {
  engine::EngineOptions options;
  options.max_step_tokens = config.engine.max_step_tokens;
  options.max_running_sequences = ToInt32(config.engine.max_running_sequences);
  options.kv_min_pages = model.kv_min_pages;
  options.prefix_cache = config.engine.prefix_cache;
  options.ngram_drafts = config.engine.ngram_drafts;
  options.gpu_share = config.engine.gpu_share;
  options.eos_token_ids = model.eos_token_ids;
  options.vocab_size = ToInt32(model.vocab_size);
  options.image_token_ids = model.image_token_ids;
  options.images = model.images;
  options.images.max_images = config.limits.max_images;
  options.images.max_tokens = config.limits.max_image_tokens;
  if (options.images.bidirectional) {  // one step computes them
    options.images.max_tokens = std::min(options.images.max_tokens, options.max_step_tokens);
  }
  options.image_cache_bytes = config.engine.image_cache_bytes;
  options.context_length = model.context_length;
  options.max_tokens = config.limits.max_tokens;
  options.max_n = ToInt32(config.limits.max_n);
  options.max_logprobs_k = ToInt32(config.limits.max_logprobs_k);
  options.max_chosen_ids = ToInt32(config.limits.max_chosen_ids);
  options.max_stop_ids = ToInt32(config.limits.max_stop_ids);
  options.max_stop_sequences = ToInt32(config.limits.max_stop_sequences);
  options.max_stop_sequence_tokens = ToInt32(config.limits.max_stop_sequence_tokens);
  options.max_logit_biases = ToInt32(config.limits.max_logit_biases);
  options.max_allowed_ids = ToInt32(config.limits.max_allowed_ids);
  options.max_bad_word_tokens = ToInt32(config.limits.max_bad_word_tokens);
  options.max_draft_tokens = config.limits.max_draft_tokens;
  options.max_score_tokens = config.limits.max_score_tokens;
  options.max_queued_requests = ToInt32(config.limits.max_queued_requests);
  options.max_queued_tokens = config.limits.max_queued_tokens;
  return options;
}

adapter::LoaderOptions ToLoaderOptions(const Config& config) {
  adapter::LoaderOptions options;
  options.read.max_rank = ToInt32(config.adapters.max_rank);
  options.read.max_adapter_bytes = config.adapters.max_bytes;
  options.read.allowed_roots = config.adapters.allowed_roots;
  options.keep_last = config.adapters.keep_last;
  return options;
}

rpc::UploadStore::Options ToUploadOptions(const Config& config, bool has_store) {
  rpc::UploadStore::Options options;
  options.has_store = has_store;
  options.max_image_bytes = config.adapters.max_bytes;
  options.max_bytes = 2 * config.adapters.max_bytes;
  options.time_to_live = absl::Seconds(config.adapters.upload_ttl_seconds);
  return options;
}

rpc::Peers::Options ToPeerOptions(const Config& config, const security::TlsFiles* own) {
  rpc::Peers::Options options;
  options.allowed = config.peers.allowed;
  options.token_file = config.peers.token_file;
  options.ca_file = config.peers.ca_file;
  options.own = own;
  options.allow_insecure = config.security.allow_insecure;
  options.max_transfers = ToInt32(config.peers.max_transfers);
  options.bytes_per_second = config.peers.bytes_per_second;
  options.patience = absl::Seconds(config.server.message_timeout_seconds);
  return options;
}

Metrics::Info ToMetricsInfo(const Config& config, const Backend::Info& model) {
  Metrics::Info info{DORAD_VERSION,
                     model.name,
                     model.model_type,
                     config.model.device,
                     config.model.compute_dtype,
                     config.engine.kv_dtype};
  info.instruction_set = model.instruction_set;
  info.commit = DORAD_COMMIT;
#ifdef DORAD_CUDA
  info.cuda = true;
#endif
  info.top_adapters = ToInt32(config.metrics.top_adapters);
  info.vllm_aliases = config.metrics.vllm_aliases;
  info.kv_page_tokens = static_cast<int>(engine::kKvPageTokens);
  info.max_adapters_in_step = ToInt32(config.engine.max_running_sequences);
  return info;
}

rpc::ServerInfo ToServerInfo(const Config& config, const Backend::Info& model) {
  rpc::ServerInfo info;
  info.version = DORAD_VERSION;
  info.device = config.model.device;
  info.instruction_set = model.instruction_set;
  info.model_type = model.model_type;
  info.model_name = model.name;
  info.model_digest = model.digest;
  info.compute_dtype = config.model.compute_dtype;
  info.kv_dtype = config.engine.kv_dtype;
  info.hidden_size = model.hidden_size;
  info.num_layers = model.num_layers;
  info.num_parameters = model.num_parameters;
  info.whole_context_length = model.context_length;
  info.whole_context_kv_bytes = model.whole_context_kv_bytes;
  info.eos_token_ids = model.eos_token_ids;
  info.max_adapter_rank = config.adapters.max_rank;
  info.deterministic = config.engine.deterministic;
  if (!config.server.shared_memory_socket.empty()) {
    info.shared_memory_socket =
        std::filesystem::absolute(config.server.shared_memory_socket).string();
  }
  info.start_time = absl::Now();
  return info;
}

}  // namespace dorad
