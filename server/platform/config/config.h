// The server's configuration: YAML file, then --set key=value. Precedence: --set > file > default.
// deploy/dorad.yaml documents every key; a test keeps it equal to these structs. Plain values:
// immutable once loaded and therefore thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace dorad {

struct ServerConfig {
  std::string grpc_listen =
      "127.0.0.1:50051";  // host:port, [v6]:port or unix:PATH; port 0 picks one
  std::string metrics_listen = "127.0.0.1:9464";  // host:port; "" = off
  std::string admin_listen;                       // "" = admin RPCs share grpc_listen
  std::string shared_memory_socket;               // path; "" = none
  int64_t max_message_bytes = 64 << 20;
  int64_t max_concurrent_streams = 0;     // of a connection; 0: auto
  double drain_delay_seconds = 0.0;       // SIGTERM: not serving, requests are still taken
  double drain_timeout_seconds = 30.0;    // then: wait this long for running requests
  double default_deadline_seconds = 0.0;  // for calls without a deadline; 0 = none
  double message_timeout_seconds = 60.0;  // for a request, or an upload's next part, to arrive
  double listener_check_seconds = 10.0;   // between two tries to reach its own listeners; 0 = never
};

struct ModelOptions {
  std::string path;                    // Hugging Face folder
  std::string device = "auto";         // "cpu", "cuda"; "auto": a supported GPU, else the CPU
  std::string compute_dtype = "auto";  // "fp32", "bf16"; "auto": fp32 on the CPU, else bf16
  int64_t max_context = 0;             // 0 = the model's own
};

struct EngineConfig {
  int64_t threads = 0;                // 0 = all cores
  int64_t max_step_tokens = 0;        // 0: auto
  int64_t max_running_sequences = 0;  // 0: auto
  int64_t kv_bytes = 0;               // 0: auto
  std::string kv_dtype = "auto";      // "fp8"; "auto": model.compute_dtype
  // Of images' pixels in host memory, and of their features in the device's.
  int64_t image_cache_bytes = int64_t{1} << 30;
  bool prefix_cache = true;
  bool ngram_drafts = false;  // of requests that do not say
  bool deterministic = true;
  double gpu_share = 1.0;                // the largest share of time for steps; also on the CPU
  std::string stream_priority = "high";  // of steps on a GPU: "high", "normal", "low"
  std::string instruction_set = "auto";  // of the kernels on a GPU: "sm90", "mma"; "auto": the best
  double watchdog_seconds = 120.0;       // no progress of the engine: health NOT_SERVING, exit
};

struct MemoryConfig {
  std::string vram_limit = "0.95";  // bytes or a share of the GPU's memory; see ByteLimit
  int64_t reserve = 512 << 20;      // GPU memory for other processes
  // In use by all processes, in the same form: above `high_water` memory is released, down to
  // `low_water`.
  std::string high_water = "0.97";
  std::string low_water = "0.92";
  int64_t kv_min_bytes = 0;   // of the KV cache, never released
  bool host_weights = false;  // keep a copy of the base weights for waking up
};

struct LimitsConfig {
  int64_t max_tokens = 0;  // 0 = the context length
  int64_t max_n = 128;
  int64_t max_logprobs_k = 64;
  int64_t max_chosen_ids = 4096;
  int64_t max_stop_ids = 64;
  int64_t max_stop_sequences = 64;
  int64_t max_stop_sequence_tokens = 64;
  int64_t max_logit_biases = 1024;
  int64_t max_allowed_ids = 4096;
  int64_t max_bad_word_tokens = 4096;
  int64_t max_draft_tokens = 1 << 18;  // of all samples of a request
  int64_t max_score_tokens = 1 << 20;
  int64_t max_queued_requests = 4096;
  int64_t max_queued_tokens = 4 << 20;
  int64_t max_images = 16;          // of a prompt
  int64_t max_image_tokens = 4096;  // of an image
};

struct AdaptersConfig {
  // name=DIR pairs loaded and activated before the server is ready (also --adapter), except names
  // with an active version in the store.
  std::vector<std::pair<std::string, std::string>> preload;
  std::vector<std::string> allowed_roots;
  std::string store_path;      // folder of the durable adapters; "" = none
  int64_t resident_bytes = 0;  // of the weights of all adapters; 0 = no limit
  int64_t host_bytes = 0;      // host memory for weights that are not resident; 0 = none
  int64_t max_rank = 1024;
  int64_t max_bytes = int64_t{16} << 30;  // of one adapter
  double upload_ttl_seconds = 600.0;      // of a broken upload, and of a result
  int64_t keep_last = 0;                  // ready versions of a name after a publish; 0 = all
  int64_t norm_chunk_bytes = 64 << 20;
  int64_t loader_threads = 1;
  std::string dtype = "auto";  // "auto": by the file and compute_dtype; "fp32"; "bf16"
};

struct PeersConfig {
  std::vector<std::string> allowed;  // networks of the servers that adapters may come from
  std::string token_file;            // presented to them; "" = none
  std::string ca_file;               // PEM file: CA of their certificates; "" = no TLS
  int64_t max_transfers = 4;         // at the same time, in each direction
  int64_t bytes_per_second = 0;      // sent to all of them together; 0 = no limit
};

struct MetricsConfig {
  int64_t top_adapters = 20;  // with series of their own
  bool vllm_aliases = false;  // the same metrics under vLLM's names as well
};

struct SecurityConfig {
  std::string tls_cert;         // PEM file: the server's certificate, then its chain; "" = no TLS
  std::string tls_key;          // PEM file: its key
  std::string tls_client_ca;    // PEM file: CA of clients' certificates; "" = none needed
  std::string tokens_file;      // YAML file: callers' rights; "" = all rights for all
  bool allow_insecure = false;  // listen beyond this host without TLS or authentication
};

struct LogConfig {
  std::string level = "info";
  std::string format = "json";  // "json" or "text"
  bool requests = true;         // one line for each call that ended
};

struct Config {
  ServerConfig server;
  ModelOptions model;
  EngineConfig engine;
  MemoryConfig memory;
  LimitsConfig limits;
  AdaptersConfig adapters;
  PeersConfig peers;
  MetricsConfig metrics;
  SecurityConfig security;
  LogConfig log;
};

// A limit in bytes or as a share of `total`: "40GiB", "0.5". REQUIRES: LoadConfig took the value.
int64_t ByteLimit(const std::string& value, int64_t total);

// The source of each value, by "section.key": "FILE:LINE", "--set". Defaults are not in it.
using ConfigOrigins = std::map<std::string, std::string>;

// file: path of a YAML file, or "" for defaults only. overrides: "section.key=value"; a list or a
// map is given in YAML's flow form, one entry of a map also as "adapters.preload.NAME=DIR".
// INVALID_ARGUMENT listing every problem, each with file, line and, for an unknown key, the nearest
// known one (CONFIG_UNKNOWN_KEY, CONFIG_DUPLICATE_KEY, CONFIG_INVALID_VALUE, CONFIG_SYNTAX);
// otherwise as ReadFileText.
absl::StatusOr<Config> LoadConfig(const std::string& file,
                                  const std::vector<std::string>& overrides,
                                  ConfigOrigins* origins = nullptr);

// As LoadConfig, for the text of a file; `name` stands for the file in errors.
absl::StatusOr<Config> ParseConfig(const std::string& text, const std::string& name,
                                   const std::vector<std::string>& overrides,
                                   ConfigOrigins* origins = nullptr);

// Every key with its value, as YAML that ParseConfig reads back to the same values; with origins
// each has a comment with its source.
std::string ToYaml(const Config& config, const ConfigOrigins* origins = nullptr);

}  // namespace dorad
