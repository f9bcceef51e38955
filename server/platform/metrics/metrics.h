// Every metric of the server, by event. The only place that knows their names
// (docs/reference/metrics.md lists them). Names start with dorad_, base units, lint-clean for
// promtool; no label carries an unbounded value (adapter names only in the bounded series of
// TopAdapters and in vllm:lora_requests_info; a label's values beyond 256 count as "other"). Owned
// by App. Thread-safe; no function waits long for a scrape's lock.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace dorad {

enum class RequestKind { kGenerate, kScore };

// Where a guess at a sample's next tokens is from: the answer that the caller expects, or n-grams
// of the request's texts.
enum class DraftSource { kAnswer, kNgram };

// The phases of the engine's thread in a step: choose the rows, pass them to the runner, compute or
// wait for the results, process the results.
enum class StepPhase { kSchedule, kLaunch, kCompute, kProcess };

class Metrics {
 public:
  // Constant labels of dorad_build_info and dorad_model_info, and options.
  struct Info {
    std::string version, model, model_type, device, compute_dtype, kv_dtype;
    std::string instruction_set;     // of a GPU's kernels
    std::string commit = "unknown";  // that the program was built from
    bool cuda = false;               // it was built with the GPU backend
    int top_adapters = 20;           // with series of their own
    bool vllm_aliases = false;
    int kv_page_tokens = 0;
    int max_adapters_in_step = 0;
  };
  explicit Metrics(const Info& info);
  ~Metrics();

  // --- Requests. `outcome` is "ok" or a gRPC code in lower case ("aborted", "cancelled",
  // "deadline_exceeded", "resource_exhausted", ...): a small fixed set.
  void RequestAdmitted(RequestKind kind);
  void RequestRefused(RequestKind kind, const std::string& reason);
  void RequestEnded(RequestKind kind, const std::string& outcome, absl::Duration total);
  // With the reason of its error.
  void RequestFailed(RequestKind kind, const std::string& reason);
  void SampleEnded(const std::string& finish_reason);
  void PromptTokens(int64_t computed, int64_t cached);
  void GeneratedTokens(int64_t tokens);
  void ScoredTokens(int64_t tokens);
  void QueueTime(absl::Duration time);
  void TimeToFirstToken(absl::Duration time);
  // `tokens` tokens were generated, each `time` after its predecessor in its own sample.
  void InterTokenLatency(absl::Duration time, int64_t tokens);

  // Verified tokens of guesses, and of them those that were right.
  void DraftTokens(DraftSource source, int64_t verified, int64_t accepted);

  // --- Engine. One call a step.
  struct Step {
    absl::Duration time;
    int64_t decode_rows = 0;
    int64_t prefill_rows = 0;
    int distinct_adapters = 0;
  };
  void StepDone(const Step& step);
  void StepPhaseDone(StepPhase phase, absl::Duration time);
  void Preemptions(int64_t count);
  void VersionSwitched();
  // Steps that could have run were delayed for `time`.
  void StepsThrottled(absl::Duration time);
  // An image's features were computed.
  void ImageEncoded(absl::Duration time);
  struct EngineGauges {
    int requests = 0;
    int frozen_requests = 0;  // by pauses of adapters
    int paused_adapters = 0;
    int pending_pauses = 0;  // not in effect yet
    int running_sequences = 0;
    int64_t waiting_sequences = 0;
    int queued_requests = 0;
    int64_t queued_tokens = 0;
    int64_t kv_pages_total = 0;
    int64_t kv_pages_used = 0;
    int64_t kv_pages_cached = 0;
    int64_t kv_pages_released = 0;
    bool paused = false;
    double gpu_share = 1;
  };
  void SetEngine(const EngineGauges& gauges);
  // One look-up of a prompt.
  void PrefixCache(int64_t queried_tokens, int64_t hit_tokens);
  void NonFiniteLogits();

  // --- Adapters.

  // One adapter's part of an ended request; name "": the base.
  struct AdapterUse {
    int64_t requests = 0;
    int64_t prompt_tokens = 0;
    int64_t generated_tokens = 0;
    int64_t scored_tokens = 0;
  };
  void AdapterUsed(const std::string& name, const AdapterUse& use);
  // Requests may use the name from now on: its series begin before its first request, if there is
  // room.
  void AdapterAnnounced(const std::string& name);
  // Names of adapters with running and with waiting requests.
  void SetAdaptersInUse(const std::vector<std::string>& running,
                        const std::vector<std::string>& waiting);
  // A sequence has waited `time` for evicted weights.
  void AdapterStall(absl::Duration time);
  // Durations of one load by stage: queue, read, validate, copy, norms, store, activate, total.
  void AdapterLoaded(const std::map<std::string, absl::Duration>& stages);
  void AdapterLoadFailed(const std::string& reason);
  // Bytes of adapters to and from other servers.
  void PeerBytes(int64_t sent, int64_t received);
  struct PeerTraffic {
    int64_t sent = 0, received = 0;
  };
  // Of PeerBytes, since the start.
  PeerTraffic peer_traffic() const;
  struct AdapterGauges {
    int ready = 0, retiring = 0, loading = 0;
    int64_t resident_bytes = 0;
    int64_t host_bytes = 0;
    int away = 0;           // READY or RETIRING, and not resident
    int64_t evictions = 0;  // since the start
    int64_t reloads_from_host = 0;
    int64_t reloads_from_store = 0;
    int leases = 0;
    int64_t generation = 0;
    int idle_uploads = 0;
    int64_t idle_upload_bytes = 0;
    int64_t shared_memory_connections = 0;
    int64_t shared_memory_bytes = 0;
    int64_t shared_weight_bytes = 0;
    int unactivated = 0;  // READY versions above their name's active one
    int64_t active_numbers = 0;
    uint32_t active_checksum = 0;
  };
  void SetAdapters(const AdapterGauges& gauges);

  // --- The store of durable adapters.
  struct StoreGauges {
    int64_t journal_bytes = 0;
    int64_t objects = 0;
    int64_t object_bytes = 0;
    // Since the start.
    int64_t appends = 0;
    absl::Duration append_time;
    int64_t compactions = 0;
    std::map<std::string, int64_t> failures;  // by reason
  };
  void SetStore(const StoreGauges& gauges);

  // --- Memory by kind: "weights", "kv", "adapters", "norms".
  void SetMemory(const std::string& kind, int64_t bytes);

  // --- Memory of a device that other processes also use.
  struct DeviceGauges {
    int64_t limit_bytes = 0;  // of this server
    int64_t total_bytes = 0;
    int64_t free_bytes = 0;
    int64_t pooled_bytes = 0;  // freed by this server and kept in its pool
    int64_t others_bytes = 0;  // neither free nor accounted for
    // Allocations refused since the start.
    int64_t refused_by_limit = 0;
    int64_t refused_by_reserve = 0;
  };
  void SetDevice(const DeviceGauges& gauges);
  // from: "pool", "adapters", "kv".
  void MemoryReleased(const std::string& from, int64_t bytes);
  void KvMemoryGrown(int64_t bytes);

  // --- tag: "weights", "kv", "adapters".
  void SetSleeping(const std::string& tag, bool asleep);

  // --- Life. result: "applied", "refused".
  void ConfigReloaded(const std::string& result);

  // --- gRPC. method: "Generate"; code: "OK", "INVALID_ARGUMENT", ...
  void RpcStarted(const std::string& method);
  void RpcHandled(const std::string& method, const std::string& code, absl::Duration time);

  // --- Security. A call was refused for the caller's rights, or for the tenant's quota.
  void CallDenied(const std::string& reason);
  struct SecurityGauges {
    // Since the start.
    int64_t tokens_reload_failures = 0;
    int64_t tls_reload_failures = 0;
    std::optional<absl::Time> tls_expiry;  // nullopt: no TLS
  };
  void SetSecurity(const SecurityGauges& gauges);

  // Prometheus text format 0.0.4. Also sets process metrics (RSS, CPU, open fds, start time).
  std::string Render();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dorad
