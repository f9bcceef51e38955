// The metrics by noun: their families, names, help texts and buckets. metrics.cc counts them, and
// is the only file that includes this one.
//
// Owned by Metrics. Thread-safe, as prometheus-cpp's series are.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "server/platform/metrics/labelled.h"
#include "server/platform/metrics/metrics.h"

namespace dorad::internal {

using prometheus::Counter;
using prometheus::Gauge;
using prometheus::Histogram;
using prometheus::Registry;
using Buckets = Histogram::BucketBoundaries;

// Buckets in seconds. Each decade has enough of them for a p99 to within some 30 %.
inline Buckets RequestBuckets() {
  return {.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800};
}
inline Buckets FirstTokenBuckets() {
  return {.001, .002, .005, .01, .02, .03, .05, .075, .1, .15, .2, .3,
          .5,   .75,  1,    1.5, 2,   3,   5,   7.5,  10, 20,  30, 60};
}
inline Buckets TokenBuckets() {
  return {.0005, .001, .002, .003, .004, .005, .0075, .01, .015, .02, .03, .04,
          .05,   .075, .1,   .15,  .2,   .3,   .5,    .75, 1,    2,   5};
}
inline Buckets QueueBuckets() {
  return {.0001, .0005, .001, .005, .01, .05, .1, .5, 1, 5, 10, 30, 60};
}
inline Buckets LoadBuckets() {
  return {.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120};
}
inline Buckets RpcBuckets() {
  return {.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300};
}
inline Buckets PowersOfTwo(int last_exponent) {
  Buckets buckets;
  for (int i = 0; i <= last_exponent; ++i) buckets.push_back(std::ldexp(1.0, i));
  return buckets;
}

inline prometheus::Family<Counter>& Counters(Registry& registry, const char* name,
                                             const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
}
inline prometheus::Family<Gauge>& Gauges(Registry& registry, const char* name, const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
}
inline prometheus::Family<Histogram>& Histograms(Registry& registry, const char* name,
                                                 const char* help) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry);
}

// A negative observation would make a histogram's sum fall, which reads as a restart.
inline double Seconds(absl::Duration time) { return std::max(0.0, absl::ToDoubleSeconds(time)); }

// For counts that another object keeps.
inline void RaiseTo(Counter& counter, double value) { counter.Increment(value - counter.Value()); }

inline std::string NameOf(RequestKind kind) {
  return kind == RequestKind::kGenerate ? "generate" : "score";
}

// One series for each RequestKind, in the order of the enum.
template <typename Metric>
using ByKind = std::array<Metric*, 2>;

template <typename Metric, typename... Args>
inline ByKind<Metric> PerKind(prometheus::Family<Metric>& family, const Args&... args) {
  return {&family.Add({{"kind", NameOf(RequestKind::kGenerate)}}, args...),
          &family.Add({{"kind", NameOf(RequestKind::kScore)}}, args...)};
}

template <typename Metric>
inline Metric& Of(const ByKind<Metric>& series, RequestKind kind) {
  return *series[kind == RequestKind::kGenerate ? 0 : 1];
}

struct RequestMetrics {
  explicit RequestMetrics(Registry& r)
      : admitted(
            PerKind(Counters(r, "dorad_requests_admitted_total", "Requests the engine accepted."))),
        refused(&Counters(r, "dorad_requests_refused_total",
                          "Requests refused before they were queued, by reason."),
                {"kind", "reason"}),
        ended(&Counters(r, "dorad_requests_ended_total", "Accepted requests that ended."),
              {"kind", "outcome"}),
        seconds(PerKind(Histograms(r, "dorad_request_duration_seconds",
                                   "Time from admission to end of a request."),
                        RequestBuckets())),
        failed(&Counters(r, "dorad_requests_failed_total",
                         "Accepted requests that ended with an error, by its reason."),
               {"kind", "reason"}),
        samples(&Counters(r, "dorad_samples_ended_total", "Generated samples that ended."),
                {"finish_reason"}),
        prompt_tokens(Counters(r, "dorad_prompt_tokens_total",
                               "Prompt tokens, computed or found in the prefix cache.")),
        computed(prompt_tokens.Add({{"source", "computed"}})),
        cached(prompt_tokens.Add({{"source", "cached"}})),
        generated(Counters(r, "dorad_generated_tokens_total", "Tokens generated.").Add({})),
        scored(Counters(r, "dorad_scored_tokens_total", "Tokens scored.").Add({})),
        queue(
            Histograms(r, "dorad_request_queue_seconds",
                       "Time from admission to a request's first step, or to its end without one.")
                .Add({}, QueueBuckets())),
        first_token(Histograms(r, "dorad_time_to_first_token_seconds",
                               "Time from admission to the first token of a request.")
                        .Add({}, FirstTokenBuckets())),
        drafted(BySource(Counters(r, "dorad_draft_tokens_total",
                                  "Guessed tokens that steps verified, by source."))),
        accepted(BySource(Counters(r, "dorad_draft_accepted_tokens_total",
                                   "Guessed tokens that were right, by source."))),
        inter_token(Histograms(r, "dorad_inter_token_latency_seconds",
                               "Time between two consecutive tokens of a sample.")
                        .Add({}, TokenBuckets())) {}

  ByKind<Counter> admitted;
  Labelled<Counter, 2> refused, ended;
  ByKind<Histogram> seconds;
  Labelled<Counter, 2> failed;
  Labelled<Counter, 1> samples;
  prometheus::Family<Counter>& prompt_tokens;
  Counter &computed, &cached, &generated, &scored;
  Histogram &queue, &first_token;
  const std::array<Counter*, 2> drafted, accepted;  // in the order of DraftSource
  Histogram& inter_token;

 private:
  static std::array<Counter*, 2> BySource(prometheus::Family<Counter>& family) {
    return {&family.Add({{"source", "answer"}}), &family.Add({{"source", "ngram"}})};
  }
};

struct EngineMetrics {
  explicit EngineMetrics(Registry& r)
      : step(Histograms(r, "dorad_engine_step_seconds", "Time of one engine step.")
                 .Add({}, TokenBuckets())),
        image(Histograms(r, "dorad_image_encode_seconds", "Time to compute one image's features.")
                  .Add({}, TokenBuckets())),
        phase_seconds(Counters(r, "dorad_engine_step_phase_seconds_total",
                               "Time of the engine's thread, by phase of a step.")),
        phases{
            &phase_seconds.Add({{"phase", "schedule"}}), &phase_seconds.Add({{"phase", "launch"}}),
            &phase_seconds.Add({{"phase", "compute"}}), &phase_seconds.Add({{"phase", "process"}})},
        tokens(Histograms(r, "dorad_engine_step_tokens", "Tokens computed in one step.")
                   .Add({}, PowersOfTwo(14))),
        rows(Histograms(r, "dorad_engine_step_rows", "Tokens computed in one step, by phase.")),
        decode_rows(rows.Add({{"phase", "decode"}}, PowersOfTwo(12))),
        prefill_rows(rows.Add({{"phase", "prefill"}}, PowersOfTwo(12))),
        adapters(Histograms(r, "dorad_engine_step_adapters",
                            "Distinct adapter versions in one step (0: base only).")
                     .Add({}, Buckets{0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128})),
        preemptions(Counters(r, "dorad_engine_preemptions_total",
                             "Sequences put back into the queue to free their KV pages.")
                        .Add({})),
        switches(Counters(r, "dorad_engine_version_switches_total",
                          "Requests that switched to another version of their adapter.")
                     .Add({})),
        held_back(Counters(r, "dorad_engine_throttled_seconds_total",
                           "Time by which steps were delayed to keep the share.")
                      .Add({})),
        gpu_share(
            Gauges(r, "dorad_engine_gpu_share", "The largest share of time for steps; 1: no limit.")
                .Add({})),
        requests(
            Gauges(r, "dorad_engine_requests", "Requests in the engine, in any state.").Add({})),
        frozen(Gauges(r, "dorad_engine_frozen_requests", "Of these, frozen by pauses of adapters.")
                   .Add({})),
        paused_adapters(
            Gauges(r, "dorad_engine_paused_adapters", "Pauses of adapters in force.").Add({})),
        pending_pauses(Gauges(r, "dorad_engine_pending_pauses",
                              "Pauses that wait for requests to end and refuse new ones.")
                           .Add({})),
        running(Gauges(r, "dorad_engine_running_sequences",
                       "Sequences with a place in the steps, frozen ones included.")
                    .Add({})),
        waiting(Gauges(r, "dorad_engine_waiting_sequences",
                       "Sequences waiting for a place in a step: not begun, preempted, further "
                       "samples.")
                    .Add({})),
        queued(
            Gauges(r, "dorad_engine_queued_requests", "Requests waiting to be computed.").Add({})),
        queued_tokens(Gauges(r, "dorad_engine_queued_tokens", "Prompt tokens waiting.").Add({})),
        paused(Gauges(r, "dorad_engine_paused", "1 while the engine is paused.").Add({})),
        pages_capacity(Gauges(r, "dorad_kv_pages_capacity", "KV pages of the server.").Add({})),
        pages_used(Gauges(r, "dorad_kv_pages_used", "KV pages held by sequences.").Add({})),
        pages_cached(
            Gauges(r, "dorad_kv_pages_cached", "KV pages held only by the prefix cache; available.")
                .Add({})),
        pages_released(
            Gauges(r, "dorad_kv_pages_released", "KV pages whose memory is released.").Add({})),
        queried(Counters(r, "dorad_prefix_cache_queried_tokens_total",
                         "Prompt tokens looked up in the prefix cache.")
                    .Add({})),
        hit(Counters(r, "dorad_prefix_cache_hit_tokens_total",
                     "Prompt tokens found in the prefix cache.")
                .Add({})),
        nonfinite(Counters(r, "dorad_nonfinite_logits_total",
                           "Sequences ended because their logits were not finite.")
                      .Add({})) {}

  Histogram &step, &image;
  prometheus::Family<Counter>& phase_seconds;
  const std::array<Counter*, 4> phases;  // in the order of StepPhase
  Histogram& tokens;
  prometheus::Family<Histogram>& rows;
  Histogram &decode_rows, &prefill_rows, &adapters;
  Counter& preemptions;
  Counter& switches;
  Counter& held_back;
  Gauge& gpu_share;
  Gauge &requests, &frozen, &paused_adapters, &pending_pauses;
  Gauge &running, &waiting, &queued, &queued_tokens, &paused, &pages_capacity, &pages_used,
      &pages_cached;
  Gauge& pages_released;
  Counter &queried, &hit, &nonfinite;
};

struct AdapterMetrics {
  explicit AdapterMetrics(Registry& r)
      : loads(Counters(r, "dorad_adapter_loads_total", "Adapter versions loaded.").Add({})),
        failures(&Counters(r, "dorad_adapter_load_failures_total",
                           "Adapter loads that failed, by reason."),
                 {"reason"}),
        seconds(&Histograms(r, "dorad_adapter_load_seconds",
                            "Time of one adapter load, by stage and in total."),
                {"stage"}, LoadBuckets()),
        stalls(Histograms(r, "dorad_adapter_stall_seconds",
                          "Time that a sequence waited for evicted adapter weights.")
                   .Add({}, LoadBuckets())),
        names(Gauges(r, "dorad_adapters_in_use",
                     "Distinct adapters that requests run with or wait for.")),
        running(names.Add({{"state", "running"}})),
        waiting(names.Add({{"state", "waiting"}})),
        versions(Gauges(r, "dorad_adapter_versions", "Adapter versions held, by state.")),
        ready(versions.Add({{"state", "ready"}})),
        retiring(versions.Add({{"state", "retiring"}})),
        loading(versions.Add({{"state", "loading"}})),
        away(Gauges(r, "dorad_adapter_evicted_versions",
                    "Adapter versions held whose weights are not resident.")
                 .Add({})),
        evictions(
            Counters(r, "dorad_adapter_evictions_total", "Evictions of adapter weights.").Add({})),
        reloads(Counters(r, "dorad_adapter_reloads_total", "Reloads of adapter weights.")),
        reloads_from_host(reloads.Add({{"from", "host"}})),
        reloads_from_store(reloads.Add({{"from", "store"}})),
        bytes(Gauges(r, "dorad_adapter_resident_bytes", "Memory of the adapters held.").Add({})),
        host_bytes(Gauges(r, "dorad_adapter_host_bytes",
                          "Host memory taken by copies of adapters' weights.")
                       .Add({})),
        leases(Gauges(r, "dorad_adapter_leases", "Leases on adapter versions.").Add({})),
        generation(Gauges(r, "dorad_adapter_generation",
                          "Generation of the registry; rises with each of its events.")
                       .Add({})),
        idle_uploads(
            Gauges(r, "dorad_adapter_idle_uploads", "Broken uploads that can be resumed.").Add({})),
        idle_upload_bytes(
            Gauges(r, "dorad_adapter_idle_upload_bytes", "Their received bytes.").Add({})),
        shared_memory_connections(Gauges(r, "dorad_shared_memory_connections",
                                         "Connections with registered memory or leased weights.")
                                      .Add({})),
        shared_memory_bytes(
            Gauges(r, "dorad_shared_memory_bytes", "Their registered memory.").Add({})),
        shared_weight_bytes(Gauges(r, "dorad_shared_weight_bytes",
                                   "The base weights' memory while it is leased; else 0.")
                                .Add({})),
        unactivated(Gauges(r, "dorad_adapter_unactivated_versions",
                           "Ready versions above the active one of their name.")
                        .Add({})),
        active_numbers(Gauges(r, "dorad_adapter_active_version_numbers",
                              "Sum of the numbers of the active versions.")
                           .Add({})),
        active_checksum(Gauges(r, "dorad_adapter_active_checksum",
                               "Of names, numbers and digests of the active versions.")
                            .Add({})),
        peer_bytes(
            Counters(r, "dorad_peer_bytes_total", "Bytes of adapters to and from other servers.")),
        peer_sent(peer_bytes.Add({{"direction", "sent"}})),
        peer_received(peer_bytes.Add({{"direction", "received"}})) {}

  Counter& loads;
  Labelled<Counter, 1> failures;
  Labelled<Histogram, 1> seconds;
  Histogram& stalls;
  prometheus::Family<Gauge>& names;
  Gauge &running, &waiting;
  prometheus::Family<Gauge>& versions;
  Gauge &ready, &retiring, &loading, &away;
  Counter& evictions;
  prometheus::Family<Counter>& reloads;
  Counter &reloads_from_host, &reloads_from_store;
  Gauge &bytes, &host_bytes, &leases, &generation;
  Gauge &idle_uploads, &idle_upload_bytes;
  Gauge &shared_memory_connections, &shared_memory_bytes, &shared_weight_bytes;
  Gauge &unactivated, &active_numbers, &active_checksum;
  prometheus::Family<Counter>& peer_bytes;
  Counter &peer_sent, &peer_received;
};

struct StoreMetrics {
  explicit StoreMetrics(Registry& r)
      : journal_bytes(
            Gauges(r, "dorad_store_journal_bytes", "Size of the store's journal.").Add({})),
        objects(Gauges(r, "dorad_store_objects", "Adapters' contents in the store.").Add({})),
        object_bytes(Gauges(r, "dorad_store_object_bytes", "Size of the objects.").Add({})),
        appends(Counters(r, "dorad_store_appends_total",
                         "Changes that were appended to the journal, failed ones included.")
                    .Add({})),
        append_seconds(Counters(r, "dorad_store_append_seconds_total",
                                "Time that appends took to write and sync the journal.")
                           .Add({})),
        compactions(
            Counters(r, "dorad_store_compactions_total", "Times that the journal was rewritten.")
                .Add({})),
        failures(&Counters(r, "dorad_store_failures_total",
                           "Times that the store's disk failed or was full, by reason."),
                 {"reason"}) {}

  Gauge &journal_bytes, &objects, &object_bytes;
  Counter &appends, &append_seconds, &compactions;
  Labelled<Counter, 1> failures;
};

struct DeviceMetrics {
  explicit DeviceMetrics(Registry& r)
      : limit(Gauges(r, "dorad_memory_limit_bytes", "memory.vram_limit.").Add({})),
        total(Gauges(r, "dorad_device_memory_bytes", "Memory of the device.").Add({})),
        free(Gauges(r, "dorad_device_memory_free_bytes", "Of it, free for any process.").Add({})),
        pooled(Gauges(r, "dorad_device_memory_pooled_bytes",
                      "Of it, freed by this server and kept in its pool.")
                   .Add({})),
        others(Gauges(r, "dorad_device_memory_others_bytes",
                      "Of it, in use and not accounted for by this server.")
                   .Add({})),
        refusals(Counters(r, "dorad_memory_refusals_total",
                          "Allocations that were refused at first, by cause.")),
        by_limit(refusals.Add({{"by", "limit"}})),
        by_reserve(refusals.Add({{"by", "reserve"}})),
        given_back(&Counters(r, "dorad_memory_released_bytes_total",
                             "Device memory released for other processes."),
                   {"from"}),
        taken_back(Counters(r, "dorad_kv_grown_bytes_total",
                            "Device memory that the KV cache allocated again.")
                       .Add({})) {}

  Gauge &limit, &total, &free, &pooled, &others;
  prometheus::Family<Counter>& refusals;
  Counter &by_limit, &by_reserve;
  Labelled<Counter, 1> given_back;
  Counter& taken_back;
};

struct RpcMetrics {
  explicit RpcMetrics(Registry& r)
      : started(&Counters(r, "dorad_rpc_started_total", "RPCs started."), {"method"}),
        handled(&Counters(r, "dorad_rpc_handled_total", "RPCs completed, by gRPC code."),
                {"method", "code"}),
        seconds(&Histograms(r, "dorad_rpc_handling_seconds", "Time from start to end of an RPC."),
                {"method"}, RpcBuckets()) {}

  Labelled<Counter, 1> started;
  Labelled<Counter, 2> handled;
  Labelled<Histogram, 1> seconds;
};

struct SecurityMetrics {
  explicit SecurityMetrics(Registry& r)
      : denied(&Counters(r, "dorad_calls_denied_total",
                         "Calls refused for the caller's rights or the tenant's quota, by reason."),
               {"reason"}),
        tokens_reload_failures(Counters(r, "dorad_tokens_reload_failures_total",
                                        "Times that a changed tokens file could not be used.")
                                   .Add({})),
        tls_reload_failures(Counters(r, "dorad_tls_reload_failures_total",
                                     "Times that changed TLS files could not be used.")
                                .Add({})),
        tls_expiry(Gauges(r, "dorad_tls_certificate_expiry_timestamp_seconds",
                          "Expiry of the current certificate; absent without TLS.")) {}

  Labelled<Counter, 1> denied;
  Counter &tokens_reload_failures, &tls_reload_failures;
  prometheus::Family<Gauge>& tls_expiry;
};

}  // namespace dorad::internal
