#include "server/platform/metrics/metrics.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "prometheus/text_serializer.h"
#include "server/platform/metrics/metric_families.h"
#include "server/platform/metrics/process_metrics.h"
#include "server/platform/metrics/top_adapters.h"
#include "server/platform/metrics/vllm_aliases.h"

namespace dorad {

using internal::AdapterMetrics;
using internal::Counter;
using internal::Counters;
using internal::DeviceMetrics;
using internal::EngineMetrics;
using internal::Gauge;
using internal::Gauges;
using internal::Labelled;
using internal::NameOf;
using internal::Of;
using internal::RaiseTo;
using internal::Registry;
using internal::RequestMetrics;
using internal::RpcMetrics;
using internal::Seconds;
using internal::SecurityMetrics;
using internal::StoreMetrics;

struct Metrics::Impl {
  explicit Impl(const Info& info)
      : requests(registry),
        engine(registry),
        adapters(registry),
        store(registry),
        sleeping(&Gauges(registry, "dorad_sleeping", "1 while the tag sleeps."), {"tag"}),
        memory(&Gauges(registry, "dorad_memory_bytes", "Memory of the server's data, by kind."),
               {"kind"}),
        reloads(&Counters(registry, "dorad_config_reloads_total",
                          "Times that the configuration was read again."),
                {"result"}),
        device(registry),
        rpc(registry),
        security(registry),
        top_adapters(info.top_adapters),
        process(&registry) {
    Gauges(registry, "dorad_build_info", "The running program; the value is 1.")
        .Add({{"version", info.version},
              {"commit", info.commit},
              {"cuda", info.cuda ? "yes" : "no"}})
        .Set(1);
    Gauges(registry, "dorad_model_info", "The served base model; the value is 1.")
        .Add({{"model", info.model},
              {"model_type", info.model_type},
              {"device", info.device},
              {"instruction_set", info.instruction_set},
              {"compute_dtype", info.compute_dtype},
              {"kv_dtype", info.kv_dtype}})
        .Set(1);
    if (info.vllm_aliases) {
      aliases.emplace(internal::VllmAliases::Options{info.model, info.kv_page_tokens,
                                                     info.max_adapters_in_step});
    }
    for (const char* result : {"applied", "refused"}) reloads.Of({result});
    // Series for alerts begin at 0: increase() does not see a series' first value.
    for (const char* reason : {"STORE_FULL", "STORE_UNAVAILABLE", "STORE_OBJECT_DAMAGED"}) {
      store.failures.Of({reason});
    }
    for (const char* reason : {"INTERNAL", "OUT_OF_MEMORY", "STORE_FULL", "STORE_UNAVAILABLE"}) {
      adapters.failures.Of({reason});
    }
  }

  Registry registry;
  RequestMetrics requests;
  EngineMetrics engine;
  AdapterMetrics adapters;
  StoreMetrics store;
  Labelled<Gauge, 1> sleeping;
  Labelled<Gauge, 1> memory;
  Labelled<Counter, 1> reloads;
  DeviceMetrics device;
  RpcMetrics rpc;
  SecurityMetrics security;
  internal::TopAdapters top_adapters;
  std::optional<internal::VllmAliases> aliases;
  internal::ProcessMetrics process;
};

Metrics::Metrics(const Info& info) : impl_(std::make_unique<Impl>(info)) {}
Metrics::~Metrics() = default;

void Metrics::RequestAdmitted(RequestKind kind) { Of(impl_->requests.admitted, kind).Increment(); }

void Metrics::RequestRefused(RequestKind kind, const std::string& reason) {
  impl_->requests.refused.Of({NameOf(kind), reason}).Increment();
}

void Metrics::RequestEnded(RequestKind kind, const std::string& outcome, absl::Duration total) {
  impl_->requests.ended.Of({NameOf(kind), outcome}).Increment();
  Of(impl_->requests.seconds, kind).Observe(Seconds(total));
}

void Metrics::RequestFailed(RequestKind kind, const std::string& reason) {
  impl_->requests.failed.Of({NameOf(kind), reason}).Increment();
}

void Metrics::SampleEnded(const std::string& finish_reason) {
  impl_->requests.samples.Of({finish_reason}).Increment();
}

void Metrics::PromptTokens(int64_t computed, int64_t cached) {
  impl_->requests.computed.Increment(static_cast<double>(computed));
  impl_->requests.cached.Increment(static_cast<double>(cached));
}

void Metrics::GeneratedTokens(int64_t tokens) {
  impl_->requests.generated.Increment(static_cast<double>(tokens));
}

void Metrics::ScoredTokens(int64_t tokens) {
  impl_->requests.scored.Increment(static_cast<double>(tokens));
}

void Metrics::QueueTime(absl::Duration time) { impl_->requests.queue.Observe(Seconds(time)); }

void Metrics::TimeToFirstToken(absl::Duration time) {
  impl_->requests.first_token.Observe(Seconds(time));
}

void Metrics::DraftTokens(DraftSource source, int64_t verified, int64_t accepted) {
  const auto index = static_cast<size_t>(source);
  impl_->requests.drafted[index]->Increment(static_cast<double>(verified));
  impl_->requests.accepted[index]->Increment(static_cast<double>(accepted));
}

void Metrics::InterTokenLatency(absl::Duration time, int64_t tokens) {
  const double seconds = Seconds(time);
  for (int64_t i = 0; i < tokens; ++i) impl_->requests.inter_token.Observe(seconds);
}

void Metrics::StepDone(const Step& step) {
  EngineMetrics& engine = impl_->engine;
  engine.step.Observe(Seconds(step.time));
  // A step without rows of a phase is no sample of that phase's batch size.
  if (step.decode_rows > 0) engine.decode_rows.Observe(static_cast<double>(step.decode_rows));
  if (step.prefill_rows > 0) engine.prefill_rows.Observe(static_cast<double>(step.prefill_rows));
  engine.tokens.Observe(static_cast<double>(step.decode_rows + step.prefill_rows));
  engine.adapters.Observe(step.distinct_adapters);
}

void Metrics::StepPhaseDone(StepPhase phase, absl::Duration time) {
  impl_->engine.phases[static_cast<size_t>(phase)]->Increment(Seconds(time));
}

void Metrics::Preemptions(int64_t count) {
  impl_->engine.preemptions.Increment(static_cast<double>(count));
}

void Metrics::VersionSwitched() { impl_->engine.switches.Increment(); }

void Metrics::ImageEncoded(absl::Duration time) { impl_->engine.image.Observe(Seconds(time)); }

void Metrics::StepsThrottled(absl::Duration time) {
  impl_->engine.held_back.Increment(Seconds(time));
}

void Metrics::SetEngine(const EngineGauges& gauges) {
  EngineMetrics& engine = impl_->engine;
  engine.requests.Set(gauges.requests);
  engine.frozen.Set(gauges.frozen_requests);
  engine.paused_adapters.Set(gauges.paused_adapters);
  engine.pending_pauses.Set(gauges.pending_pauses);
  engine.running.Set(gauges.running_sequences);
  engine.waiting.Set(static_cast<double>(gauges.waiting_sequences));
  engine.queued.Set(gauges.queued_requests);
  engine.queued_tokens.Set(static_cast<double>(gauges.queued_tokens));
  engine.paused.Set(gauges.paused ? 1 : 0);
  engine.gpu_share.Set(gauges.gpu_share);
  engine.pages_capacity.Set(static_cast<double>(gauges.kv_pages_total));
  engine.pages_used.Set(static_cast<double>(gauges.kv_pages_used));
  engine.pages_cached.Set(static_cast<double>(gauges.kv_pages_cached));
  engine.pages_released.Set(static_cast<double>(gauges.kv_pages_released));
}

void Metrics::PrefixCache(int64_t queried_tokens, int64_t hit_tokens) {
  impl_->engine.queried.Increment(static_cast<double>(queried_tokens));
  impl_->engine.hit.Increment(static_cast<double>(hit_tokens));
}

void Metrics::NonFiniteLogits() { impl_->engine.nonfinite.Increment(); }

void Metrics::AdapterUsed(const std::string& name, const AdapterUse& use) {
  impl_->top_adapters.Count(name, use);
}

void Metrics::AdapterAnnounced(const std::string& name) { impl_->top_adapters.Announce(name); }

void Metrics::SetAdaptersInUse(const std::vector<std::string>& running,
                               const std::vector<std::string>& waiting) {
  impl_->adapters.running.Set(static_cast<double>(running.size()));
  impl_->adapters.waiting.Set(static_cast<double>(waiting.size()));
  if (impl_->aliases) impl_->aliases->SetAdaptersInUse(running, waiting);
}

void Metrics::AdapterStall(absl::Duration time) { impl_->adapters.stalls.Observe(Seconds(time)); }

void Metrics::AdapterLoaded(const std::map<std::string, absl::Duration>& stages) {
  impl_->adapters.loads.Increment();
  for (const auto& [stage, time] : stages) {
    impl_->adapters.seconds.Of({stage}).Observe(Seconds(time));
  }
}

void Metrics::AdapterLoadFailed(const std::string& reason) {
  impl_->adapters.failures.Of({reason}).Increment();
}

void Metrics::PeerBytes(int64_t sent, int64_t received) {
  impl_->adapters.peer_sent.Increment(static_cast<double>(sent));
  impl_->adapters.peer_received.Increment(static_cast<double>(received));
}

Metrics::PeerTraffic Metrics::peer_traffic() const {
  return {.sent = static_cast<int64_t>(impl_->adapters.peer_sent.Value()),
          .received = static_cast<int64_t>(impl_->adapters.peer_received.Value())};
}

void Metrics::SetAdapters(const AdapterGauges& gauges) {
  AdapterMetrics& adapters = impl_->adapters;
  adapters.ready.Set(gauges.ready);
  adapters.retiring.Set(gauges.retiring);
  adapters.loading.Set(gauges.loading);
  adapters.away.Set(gauges.away);
  RaiseTo(adapters.evictions, static_cast<double>(gauges.evictions));
  RaiseTo(adapters.reloads_from_host, static_cast<double>(gauges.reloads_from_host));
  RaiseTo(adapters.reloads_from_store, static_cast<double>(gauges.reloads_from_store));
  adapters.bytes.Set(static_cast<double>(gauges.resident_bytes));
  adapters.host_bytes.Set(static_cast<double>(gauges.host_bytes));
  adapters.leases.Set(gauges.leases);
  adapters.generation.Set(static_cast<double>(gauges.generation));
  adapters.idle_uploads.Set(gauges.idle_uploads);
  adapters.idle_upload_bytes.Set(static_cast<double>(gauges.idle_upload_bytes));
  adapters.shared_memory_connections.Set(static_cast<double>(gauges.shared_memory_connections));
  adapters.shared_memory_bytes.Set(static_cast<double>(gauges.shared_memory_bytes));
  adapters.shared_weight_bytes.Set(static_cast<double>(gauges.shared_weight_bytes));
  adapters.unactivated.Set(gauges.unactivated);
  adapters.active_numbers.Set(static_cast<double>(gauges.active_numbers));
  adapters.active_checksum.Set(gauges.active_checksum);
}

void Metrics::SetStore(const StoreGauges& gauges) {
  StoreMetrics& store = impl_->store;
  store.journal_bytes.Set(static_cast<double>(gauges.journal_bytes));
  store.objects.Set(static_cast<double>(gauges.objects));
  store.object_bytes.Set(static_cast<double>(gauges.object_bytes));
  RaiseTo(store.appends, static_cast<double>(gauges.appends));
  RaiseTo(store.append_seconds, Seconds(gauges.append_time));
  RaiseTo(store.compactions, static_cast<double>(gauges.compactions));
  for (const auto& [reason, count] : gauges.failures) {
    RaiseTo(store.failures.Of({reason}), static_cast<double>(count));
  }
}

void Metrics::SetMemory(const std::string& kind, int64_t bytes) {
  impl_->memory.Of({kind}).Set(static_cast<double>(bytes));
}

void Metrics::SetDevice(const DeviceGauges& gauges) {
  DeviceMetrics& device = impl_->device;
  device.limit.Set(static_cast<double>(gauges.limit_bytes));
  device.total.Set(static_cast<double>(gauges.total_bytes));
  device.free.Set(static_cast<double>(gauges.free_bytes));
  device.pooled.Set(static_cast<double>(gauges.pooled_bytes));
  device.others.Set(static_cast<double>(gauges.others_bytes));
  RaiseTo(device.by_limit, static_cast<double>(gauges.refused_by_limit));
  RaiseTo(device.by_reserve, static_cast<double>(gauges.refused_by_reserve));
}

void Metrics::MemoryReleased(const std::string& from, int64_t bytes) {
  impl_->device.given_back.Of({from}).Increment(static_cast<double>(bytes));
}

void Metrics::KvMemoryGrown(int64_t bytes) {
  impl_->device.taken_back.Increment(static_cast<double>(bytes));
}

void Metrics::SetSleeping(const std::string& tag, bool asleep) {
  impl_->sleeping.Of({tag}).Set(asleep ? 1 : 0);
}

void Metrics::ConfigReloaded(const std::string& result) { impl_->reloads.Of({result}).Increment(); }

void Metrics::RpcStarted(const std::string& method) { impl_->rpc.started.Of({method}).Increment(); }

void Metrics::RpcHandled(const std::string& method, const std::string& code, absl::Duration time) {
  impl_->rpc.handled.Of({method, code}).Increment();
  impl_->rpc.seconds.Of({method}).Observe(Seconds(time));
}

void Metrics::CallDenied(const std::string& reason) {
  impl_->security.denied.Of({reason}).Increment();
}

void Metrics::SetSecurity(const SecurityGauges& gauges) {
  SecurityMetrics& security = impl_->security;
  RaiseTo(security.tokens_reload_failures, static_cast<double>(gauges.tokens_reload_failures));
  RaiseTo(security.tls_reload_failures, static_cast<double>(gauges.tls_reload_failures));
  if (gauges.tls_expiry)
    security.tls_expiry.Add({}).Set(absl::ToDoubleSeconds(*gauges.tls_expiry - absl::UnixEpoch()));
}

std::string Metrics::Render() {
  impl_->process.Refresh();
  std::vector<prometheus::MetricFamily> families = impl_->registry.Collect();
  const auto add = [&families](std::vector<prometheus::MetricFamily> more) {
    families.insert(families.end(), std::make_move_iterator(more.begin()),
                    std::make_move_iterator(more.end()));
  };
  if (impl_->aliases) add(impl_->aliases->Of(families));
  add(impl_->top_adapters.Collect());
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace dorad
