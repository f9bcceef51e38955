#include "server/base/config_schema.h"

#include <charconv>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/edit_distance.h"

namespace dorad {
namespace {

constexpr double kMaxCount = 2147483647;  // many of these end as int32
constexpr double kMaxTokens = double{1LL << 40};
constexpr double kMiB = 1 << 20;
constexpr double kMaxBytes = double{1LL << 50};
constexpr double kDay = 86400;

template <typename Section, typename T>
std::function<ConfigField(Config&)> At(Section Config::*section, T Section::*member) {
  return [=](Config& config) -> ConfigField { return &(config.*section.*member); };
}

using Server = ServerConfig;
using Model = ModelOptions;
using Engine = EngineConfig;
using Memory = MemoryConfig;
using Limits = LimitsConfig;
using Adapters = AdaptersConfig;

std::vector<ConfigKey> ServerKeys() {
  const auto at = [](auto member) { return At(&Config::server, member); };
  return {
      {"server", "grpc_listen", ConfigType::kListen, at(&Server::grpc_listen), 0, 0, {}, false},
      {"server", "metrics_listen", ConfigType::kTcp, at(&Server::metrics_listen), 0, 0, {}, true},
      {"server", "admin_listen", ConfigType::kListen, at(&Server::admin_listen), 0, 0, {}, true},
      {"server",
       "handover_socket",
       ConfigType::kText,
       at(&Server::handover_socket),
       0,
       0,
       {},
       true},
      {"server",
       "max_message_bytes",
       ConfigType::kBytes,
       at(&Server::max_message_bytes),
       65536,
       kMaxCount,
       {},
       false},
      {"server",
       "max_concurrent_streams",
       ConfigType::kInteger,
       at(&Server::max_concurrent_streams),
       1,
       kMaxCount,
       {},
       false},
      {"server",
       "drain_delay_seconds",
       ConfigType::kSeconds,
       at(&Server::drain_delay_seconds),
       0,
       kDay,
       {},
       false},
      {"server",
       "drain_timeout_seconds",
       ConfigType::kSeconds,
       at(&Server::drain_timeout_seconds),
       0,
       kDay,
       {},
       false},
      {"server",
       "default_deadline_seconds",
       ConfigType::kSeconds,
       at(&Server::default_deadline_seconds),
       0,
       7 * kDay,
       {},
       false},
      {"server",
       "message_timeout_seconds",
       ConfigType::kSeconds,
       at(&Server::message_timeout_seconds),
       1,
       kDay,
       {},
       false},
      {"server",
       "self_dial_seconds",
       ConfigType::kSeconds,
       at(&Server::self_dial_seconds),
       0,
       kDay,
       {},
       false},
  };
}

std::vector<ConfigKey> ModelKeys() {
  const auto at = [](auto member) { return At(&Config::model, member); };
  return {
      {"model", "path", ConfigType::kText, at(&Model::path), 0, 0, {}, false},
      {"model", "device", ConfigType::kChoice, at(&Model::device), 0, 0, {"cpu", "cuda"}, false},
      {"model",
       "compute_dtype",
       ConfigType::kChoice,
       at(&Model::compute_dtype),
       0,
       0,
       {"auto", "fp32", "bf16"},
       false},
      {"model",
       "max_context",
       ConfigType::kInteger,
       at(&Model::max_context),
       0,
       kMaxCount,
       {},
       false},
  };
}

std::vector<ConfigKey> EngineKeys() {
  const auto at = [](auto member) { return At(&Config::engine, member); };
  return {
      {"engine", "threads", ConfigType::kInteger, at(&Engine::threads), 0, 4096, {}, false},
      {"engine",
       "max_step_tokens",
       ConfigType::kInteger,
       at(&Engine::max_step_tokens),
       1,
       1 << 20,
       {},
       false},
      {"engine",
       "max_running_sequences",
       ConfigType::kInteger,
       at(&Engine::max_running_sequences),
       1,
       1 << 20,
       {},
       false},
      {"engine", "kv_bytes", ConfigType::kBytes, at(&Engine::kv_bytes), 1, kMaxBytes, {}, false},
      {"engine", "prefix_cache", ConfigType::kBoolean, at(&Engine::prefix_cache), 0, 0, {}, false},
      {"engine",
       "deterministic",
       ConfigType::kBoolean,
       at(&Engine::deterministic),
       0,
       0,
       {},
       false},
      {"engine", "gpu_share", ConfigType::kShare, at(&Engine::gpu_share), 0.01, 1, {}, false},
      {"engine",
       "stream_priority",
       ConfigType::kChoice,
       at(&Engine::stream_priority),
       0,
       0,
       {"high", "normal", "low"},
       false},
      {"engine",
       "watchdog_seconds",
       ConfigType::kSeconds,
       at(&Engine::watchdog_seconds),
       5,
       kDay,
       {},
       false},
  };
}

std::vector<ConfigKey> MemoryKeys() {
  const auto at = [](auto member) { return At(&Config::memory, member); };
  return {
      {"memory", "vram_limit", ConfigType::kByteLimit, at(&Memory::vram_limit), 0, 0, {}, false},
      {"memory", "reserve", ConfigType::kBytes, at(&Memory::reserve), 0, kMaxBytes, {}, false},
      {"memory", "high_water", ConfigType::kByteLimit, at(&Memory::high_water), 0, 0, {}, false},
      {"memory", "low_water", ConfigType::kByteLimit, at(&Memory::low_water), 0, 0, {}, false},
      {"memory",
       "kv_min_bytes",
       ConfigType::kBytes,
       at(&Memory::kv_min_bytes),
       0,
       kMaxBytes,
       {},
       false},
      {"memory", "host_weights", ConfigType::kBoolean, at(&Memory::host_weights), 0, 0, {}, false},
  };
}

std::vector<ConfigKey> LimitsKeys() {
  const auto at = [](auto member) { return At(&Config::limits, member); };
  const auto integer = [&](const char* name, int64_t Limits::*member, double min, double max) {
    return ConfigKey{"limits", name, ConfigType::kInteger, at(member), min, max, {}, false};
  };
  return {
      integer("max_tokens", &Limits::max_tokens, 0, kMaxCount),
      integer("max_n", &Limits::max_n, 1, 65536),
      integer("max_logprobs_k", &Limits::max_logprobs_k, 0, 1 << 20),
      integer("max_chosen_ids", &Limits::max_chosen_ids, 0, 1 << 20),
      integer("max_stop_ids", &Limits::max_stop_ids, 0, 1 << 20),
      integer("max_score_tokens", &Limits::max_score_tokens, 1, kMaxTokens),
      integer("max_queued_requests", &Limits::max_queued_requests, 1, kMaxCount),
      integer("max_queued_tokens", &Limits::max_queued_tokens, 1, kMaxTokens),
  };
}

std::vector<ConfigKey> AdaptersKeys() {
  const auto at = [](auto member) { return At(&Config::adapters, member); };
  return {
      {"adapters", "preload", ConfigType::kMap, at(&Adapters::preload), 0, 0, {}, false},
      {"adapters",
       "allowed_roots",
       ConfigType::kFolders,
       at(&Adapters::allowed_roots),
       0,
       0,
       {},
       false},
      {"adapters", "store_path", ConfigType::kText, at(&Adapters::store_path), 0, 0, {}, true},
      {"adapters",
       "resident_bytes",
       ConfigType::kBytes,
       at(&Adapters::resident_bytes),
       0,
       kMaxBytes,
       {},
       false},
      {"adapters",
       "host_bytes",
       ConfigType::kBytes,
       at(&Adapters::host_bytes),
       0,
       kMaxBytes,
       {},
       false},
      {"adapters", "max_rank", ConfigType::kInteger, at(&Adapters::max_rank), 1, 65536, {}, false},
      {"adapters",
       "max_bytes",
       ConfigType::kBytes,
       at(&Adapters::max_bytes),
       kMiB,
       kMaxBytes,
       {},
       false},
      {"adapters",
       "upload_ttl_seconds",
       ConfigType::kSeconds,
       at(&Adapters::upload_ttl_seconds),
       0,
       kDay,
       {},
       false},
      {"adapters",
       "keep_last",
       ConfigType::kInteger,
       at(&Adapters::keep_last),
       0,
       kMaxCount,
       {},
       false},
      {"adapters",
       "norm_chunk_bytes",
       ConfigType::kBytes,
       at(&Adapters::norm_chunk_bytes),
       65536,
       kMaxBytes,
       {},
       false},
      {"adapters",
       "loader_threads",
       ConfigType::kInteger,
       at(&Adapters::loader_threads),
       1,
       64,
       {},
       false},
      {"adapters",
       "dtype",
       ConfigType::kChoice,
       at(&Adapters::dtype),
       0,
       0,
       {"auto", "fp32", "bf16"},
       false},
  };
}

std::vector<ConfigKey> MetricsKeys() {
  const auto at = [](auto member) { return At(&Config::metrics, member); };
  using Metrics = MetricsConfig;
  return {
      {"metrics",
       "top_adapters",
       ConfigType::kInteger,
       at(&Metrics::top_adapters),
       0,
       1000,
       {},
       false},
      {"metrics",
       "vllm_aliases",
       ConfigType::kBoolean,
       at(&Metrics::vllm_aliases),
       0,
       0,
       {},
       false},
  };
}

std::vector<ConfigKey> SecurityKeys() {
  const auto at = [](auto member) { return At(&Config::security, member); };
  const auto file = [&](const char* name, std::string SecurityConfig::*member) {
    return ConfigKey{"security", name, ConfigType::kText, at(member), 0, 0, {}, true};
  };
  return {
      file("tls_cert", &SecurityConfig::tls_cert),
      file("tls_key", &SecurityConfig::tls_key),
      file("tls_client_ca", &SecurityConfig::tls_client_ca),
      file("tokens_file", &SecurityConfig::tokens_file),
      {"security",
       "allow_insecure",
       ConfigType::kBoolean,
       at(&SecurityConfig::allow_insecure),
       0,
       0,
       {},
       false},
  };
}

std::vector<ConfigKey> LogKeys() {
  const auto at = [](auto member) { return At(&Config::log, member); };
  return {
      {"log",
       "level",
       ConfigType::kChoice,
       at(&LogConfig::level),
       0,
       0,
       {"debug", "info", "warning", "error"},
       false},
      {"log", "format", ConfigType::kChoice, at(&LogConfig::format), 0, 0, {"json", "text"}, false},
      {"log", "requests", ConfigType::kBoolean, at(&LogConfig::requests), 0, 0, {}, false},
  };
}

std::string Number(ConfigType type, double value) {
  if (type == ConfigType::kBytes) return FormatBytes(static_cast<int64_t>(value));
  if (type == ConfigType::kSeconds || type == ConfigType::kShare) return FormatDecimal(value);
  return absl::StrCat(static_cast<int64_t>(value));
}

}  // namespace

const std::vector<ConfigKey>& ConfigKeys() {
  static const std::vector<ConfigKey>* const keys = [] {
    auto* all = new std::vector<ConfigKey>();
    for (auto section : {ServerKeys, ModelKeys, EngineKeys, MemoryKeys, LimitsKeys, AdaptersKeys,
                         MetricsKeys, SecurityKeys, LogKeys}) {
      for (ConfigKey& key : section()) all->push_back(std::move(key));
    }
    return all;
  }();
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
    return absl::StrCat(Number(key.type, key.min), " to ", Number(key.type, key.max));
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
    // A key of the same section wins over an equally near one elsewhere.
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
