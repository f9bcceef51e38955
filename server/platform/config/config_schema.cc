#include "server/platform/config/config_schema.h"

#include <charconv>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/platform/config/edit_distance.h"

namespace dorad {
namespace {

constexpr double kMaxCount = 2147483647;  // many of these end as int32
constexpr double kMaxTokens = double{1LL << 40};
constexpr double kMiB = 1 << 20;
constexpr double kMaxBytes = double{1LL << 50};
constexpr double kDay = 86400;

// Adds the keys of one section, in order.
template <typename Section>
class SectionKeys {
 public:
  SectionKeys(const char* name, Section Config::*section, std::vector<ConfigKey>* keys)
      : name_(name), section_(section), keys_(keys) {}

  SectionKeys& Text(const char* key, std::string Section::*member) {
    return Add(key, ConfigType::kText, member);
  }
  SectionKeys& Listen(const char* key, std::string Section::*member, bool may_be_empty = false) {
    Add(key, ConfigType::kListen, member).keys_->back().may_be_empty = may_be_empty;
    return *this;
  }
  SectionKeys& Tcp(const char* key, std::string Section::*member, bool may_be_empty = false) {
    Add(key, ConfigType::kTcp, member).keys_->back().may_be_empty = may_be_empty;
    return *this;
  }
  SectionKeys& Choice(const char* key, std::string Section::*member,
                      std::vector<std::string> choices) {
    Add(key, ConfigType::kChoice, member).keys_->back().choices = std::move(choices);
    return *this;
  }
  SectionKeys& Integer(const char* key, int64_t Section::*member, double min, double max,
                       bool may_be_auto = false) {
    Add(key, ConfigType::kInteger, member, min, max).keys_->back().may_be_auto = may_be_auto;
    return *this;
  }
  SectionKeys& Bytes(const char* key, int64_t Section::*member, double min = 0,
                     double max = kMaxBytes, bool may_be_auto = false) {
    Add(key, ConfigType::kBytes, member, min, max).keys_->back().may_be_auto = may_be_auto;
    return *this;
  }
  SectionKeys& ByteLimit(const char* key, std::string Section::*member) {
    return Add(key, ConfigType::kByteLimit, member);
  }
  SectionKeys& Seconds(const char* key, double Section::*member, double min = 0,
                       double max = kDay) {
    return Add(key, ConfigType::kSeconds, member, min, max);
  }
  SectionKeys& Share(const char* key, double Section::*member, double min, double max) {
    return Add(key, ConfigType::kShare, member, min, max);
  }
  SectionKeys& Boolean(const char* key, bool Section::*member) {
    return Add(key, ConfigType::kBoolean, member);
  }
  SectionKeys& Folders(const char* key, std::vector<std::string> Section::*member) {
    return Add(key, ConfigType::kFolders, member);
  }
  SectionKeys& Networks(const char* key, std::vector<std::string> Section::*member) {
    return Add(key, ConfigType::kNetworks, member);
  }
  SectionKeys& Map(const char* key, ConfigStringMap Section::*member) {
    return Add(key, ConfigType::kMap, member);
  }

 private:
  template <typename T>
  SectionKeys& Add(const char* key, ConfigType type, T Section::*member, double min = 0,
                   double max = 0) {
    const auto field = [section = section_, member](Config& config) -> ConfigField {
      return &(config.*section.*member);
    };
    keys_->push_back({name_, key, type, field, min, max, {}, false, false});
    return *this;
  }

  const char* const name_;
  Section Config::*const section_;
  std::vector<ConfigKey>* const keys_;
};

std::vector<ConfigKey> AllKeys() {
  using Server = ServerConfig;
  using Model = ModelOptions;
  using Engine = EngineConfig;
  using Memory = MemoryConfig;
  using Limits = LimitsConfig;
  using Adapters = AdaptersConfig;
  using Peers = PeersConfig;
  using Metrics = MetricsConfig;
  using Security = SecurityConfig;
  using Log = LogConfig;
  constexpr bool kMayBeEmpty = true, kMayBeAuto = true;
  std::vector<ConfigKey> keys;
  SectionKeys("server", &Config::server, &keys)
      .Listen("grpc_listen", &Server::grpc_listen)
      .Tcp("metrics_listen", &Server::metrics_listen, kMayBeEmpty)
      .Listen("admin_listen", &Server::admin_listen, kMayBeEmpty)
      .Text("shared_memory_socket", &Server::shared_memory_socket)
      .Bytes("max_message_bytes", &Server::max_message_bytes, 65536, kMaxCount)
      .Integer("max_concurrent_streams", &Server::max_concurrent_streams, 1, kMaxCount, kMayBeAuto)
      .Seconds("drain_delay_seconds", &Server::drain_delay_seconds)
      .Seconds("drain_timeout_seconds", &Server::drain_timeout_seconds)
      .Seconds("default_deadline_seconds", &Server::default_deadline_seconds, 0, 7 * kDay)
      .Seconds("message_timeout_seconds", &Server::message_timeout_seconds, 1)
      .Seconds("listener_check_seconds", &Server::listener_check_seconds);
  SectionKeys("model", &Config::model, &keys)
      .Text("path", &Model::path)
      .Choice("device", &Model::device, {"auto", "cpu", "cuda"})
      .Choice("compute_dtype", &Model::compute_dtype, {"auto", "fp32", "bf16"})
      .Integer("max_context", &Model::max_context, 0, kMaxCount);
  SectionKeys("engine", &Config::engine, &keys)
      .Integer("threads", &Engine::threads, 0, 4096)
      .Integer("max_step_tokens", &Engine::max_step_tokens, 1, 1 << 20, kMayBeAuto)
      .Integer("max_running_sequences", &Engine::max_running_sequences, 1, 1 << 20, kMayBeAuto)
      .Bytes("kv_bytes", &Engine::kv_bytes, 1, kMaxBytes, kMayBeAuto)
      .Choice("kv_dtype", &Engine::kv_dtype, {"auto", "fp8"})
      .Boolean("prefix_cache", &Engine::prefix_cache)
      .Boolean("ngram_drafts", &Engine::ngram_drafts)
      .Bytes("image_cache_bytes", &Engine::image_cache_bytes)
      .Boolean("deterministic", &Engine::deterministic)
      .Share("gpu_share", &Engine::gpu_share, 0.01, 1)
      .Choice("stream_priority", &Engine::stream_priority, {"high", "normal", "low"})
      .Choice("instruction_set", &Engine::instruction_set, {"auto", "sm90", "mma"})
      .Seconds("watchdog_seconds", &Engine::watchdog_seconds, 5);
  SectionKeys("memory", &Config::memory, &keys)
      .ByteLimit("vram_limit", &Memory::vram_limit)
      .Bytes("reserve", &Memory::reserve)
      .ByteLimit("high_water", &Memory::high_water)
      .ByteLimit("low_water", &Memory::low_water)
      .Bytes("kv_min_bytes", &Memory::kv_min_bytes)
      .Boolean("host_weights", &Memory::host_weights);
  SectionKeys("limits", &Config::limits, &keys)
      .Integer("max_tokens", &Limits::max_tokens, 0, kMaxCount)
      .Integer("max_n", &Limits::max_n, 1, 65536)
      .Integer("max_logprobs_k", &Limits::max_logprobs_k, 0, 1 << 20)
      .Integer("max_chosen_ids", &Limits::max_chosen_ids, 0, 1 << 20)
      .Integer("max_stop_ids", &Limits::max_stop_ids, 0, 1 << 20)
      .Integer("max_stop_sequences", &Limits::max_stop_sequences, 0, 4096)
      .Integer("max_stop_sequence_tokens", &Limits::max_stop_sequence_tokens, 1, 4096)
      .Integer("max_logit_biases", &Limits::max_logit_biases, 0, 1 << 20)
      .Integer("max_allowed_ids", &Limits::max_allowed_ids, 0, 1 << 20)
      .Integer("max_bad_word_tokens", &Limits::max_bad_word_tokens, 0, 1 << 20)
      .Integer("max_draft_tokens", &Limits::max_draft_tokens, 0, 1 << 24)
      .Integer("max_score_tokens", &Limits::max_score_tokens, 1, kMaxTokens)
      .Integer("max_queued_requests", &Limits::max_queued_requests, 1, kMaxCount)
      .Integer("max_queued_tokens", &Limits::max_queued_tokens, 1, kMaxTokens)
      .Integer("max_images", &Limits::max_images, 0, 4096)
      .Integer("max_image_tokens", &Limits::max_image_tokens, 1, 1 << 20);
  SectionKeys("adapters", &Config::adapters, &keys)
      .Map("preload", &Adapters::preload)
      .Folders("allowed_roots", &Adapters::allowed_roots)
      .Text("store_path", &Adapters::store_path)
      .Bytes("resident_bytes", &Adapters::resident_bytes)
      .Bytes("host_bytes", &Adapters::host_bytes)
      .Integer("max_rank", &Adapters::max_rank, 1, 65536)
      .Bytes("max_bytes", &Adapters::max_bytes, kMiB)
      .Seconds("upload_ttl_seconds", &Adapters::upload_ttl_seconds)
      .Integer("keep_last", &Adapters::keep_last, 0, kMaxCount)
      .Bytes("norm_chunk_bytes", &Adapters::norm_chunk_bytes, 65536)
      .Integer("loader_threads", &Adapters::loader_threads, 1, 64)
      .Choice("dtype", &Adapters::dtype, {"auto", "fp32", "bf16"});
  SectionKeys("peers", &Config::peers, &keys)
      .Networks("allowed", &Peers::allowed)
      .Text("token_file", &Peers::token_file)
      .Text("ca_file", &Peers::ca_file)
      .Integer("max_transfers", &Peers::max_transfers, 1, 64)
      .Bytes("bytes_per_second", &Peers::bytes_per_second, 0, kMaxBytes);
  SectionKeys("metrics", &Config::metrics, &keys)
      .Integer("top_adapters", &Metrics::top_adapters, 0, 1000)
      .Boolean("vllm_aliases", &Metrics::vllm_aliases);
  SectionKeys("security", &Config::security, &keys)
      .Text("tls_cert", &Security::tls_cert)
      .Text("tls_key", &Security::tls_key)
      .Text("tls_client_ca", &Security::tls_client_ca)
      .Text("tokens_file", &Security::tokens_file)
      .Boolean("allow_insecure", &Security::allow_insecure);
  SectionKeys("log", &Config::log, &keys)
      .Choice("level", &Log::level, {"debug", "info", "warning", "error"})
      .Choice("format", &Log::format, {"json", "text"})
      .Boolean("requests", &Log::requests);
  return keys;
}

std::string Number(ConfigType type, double value) {
  if (type == ConfigType::kBytes) return FormatBytes(static_cast<int64_t>(value));
  if (type == ConfigType::kSeconds || type == ConfigType::kShare) return FormatDecimal(value);
  return absl::StrCat(static_cast<int64_t>(value));
}

}  // namespace

const std::vector<ConfigKey>& ConfigKeys() {
  static const auto* const keys = new std::vector<ConfigKey>(AllKeys());
  return *keys;
}

const ConfigKey* FindConfigKey(std::string_view section, std::string_view name) {
  for (const ConfigKey& key : ConfigKeys()) {
    if (section == key.section && name == key.name) return &key;
  }
  return nullptr;
}

std::string DescribeValues(const ConfigKey& key) {
  const auto range = [&key] {
    return absl::StrCat(Number(key.type, key.min), " to ", Number(key.type, key.max),
                        key.may_be_auto ? ", or auto" : "");
  };
  switch (key.type) {
    case ConfigType::kText:
      return "text";
    case ConfigType::kChoice:
      return absl::StrCat("one of ", absl::StrJoin(key.choices, ", "));
    case ConfigType::kListen:
      return absl::StrCat("host:port, [v6]:port or unix:PATH",
                          key.may_be_empty ? ", or empty" : "");
    case ConfigType::kTcp:
      return absl::StrCat("host:port or [v6]:port", key.may_be_empty ? ", or empty" : "");
    case ConfigType::kInteger:
      return absl::StrCat("integer, ", range());
    case ConfigType::kBytes:
      return absl::StrCat("bytes (512MiB, 2GiB or a plain number), ", range());
    case ConfigType::kByteLimit:
      return "bytes (512MiB, 2GiB or a plain number), or a share above 0.0 and up to 1.0";
    case ConfigType::kSeconds:
      return absl::StrCat("seconds, ", range());
    case ConfigType::kShare:
      return absl::StrCat("share, ", range());
    case ConfigType::kBoolean:
      return "true or false";
    case ConfigType::kFolders:
      return "list of absolute paths";
    case ConfigType::kNetworks:
      return "list of IP addresses and networks (10.0.0.0/8)";
    case ConfigType::kMap:
      return "map of name: folder";
  }
  return "";
}

std::string NearestConfigKey(const std::string& section, const std::string& name) {
  if (name.size() > kLongestComparedName) return "";
  const ConfigKey* best = nullptr;
  size_t best_score = SIZE_MAX;
  for (const ConfigKey& key : ConfigKeys()) {
    const size_t distance = EditDistance(name, key.name);
    // A key of the same section wins over an equally similar one elsewhere.
    const size_t score = 2 * distance + (section == key.section ? 0 : 1);
    if (!IsNear(distance, key.name) || score >= best_score) continue;
    best = &key;
    best_score = score;
  }
  return best == nullptr ? "" : best->path();
}

std::string NearestConfigSection(const std::string& section) {
  if (section.size() > kLongestComparedName) return "";
  std::string best;
  size_t best_distance = SIZE_MAX;
  for (const ConfigKey& key : ConfigKeys()) {
    const size_t distance = EditDistance(section, key.section);
    if (!IsNear(distance, key.section) || distance >= best_distance) continue;
    best = key.section;
    best_distance = distance;
  }
  return best;
}

std::string FormatBytes(int64_t bytes) {
  static constexpr const char* kUnits[] = {"", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (unit < 4 && bytes != 0 && bytes % 1024 == 0) {
    bytes /= 1024;
    ++unit;
  }
  return absl::StrCat(bytes, kUnits[unit]);
}

std::string FormatDecimal(double value) {
  char buffer[32];
  const auto result = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return std::string(buffer, result.ptr);
}

}  // namespace dorad
