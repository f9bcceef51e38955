#include "server/app/scrape.h"

#include <algorithm>
#include <map>
#include <optional>

namespace dorad {

std::string Scrape::Render() {
  const engine::EngineStats stats = from_.engine->stats();
  metrics_.SetEngine({.requests = stats.requests,
                      .frozen_requests = stats.frozen_requests,
                      .paused_adapters = static_cast<int>(stats.paused_adapters.size()),
                      .awaited_pauses = static_cast<int>(stats.awaited_pauses.size()),
                      .running_sequences = stats.running_sequences,
                      .waiting_sequences = stats.waiting_sequences,
                      .queued_requests = stats.queued_requests,
                      .queued_tokens = stats.queued_tokens,
                      .kv_pages_total = stats.kv_pages_total,
                      .kv_pages_used = stats.kv_pages_used,
                      .kv_pages_cached = stats.kv_pages_cached,
                      .kv_pages_lent = stats.kv_pages_lent,
                      .paused = stats.paused,
                      .gpu_share = stats.gpu_share});
  metrics_.SetAdapters(CountAdapters());
  const engine::AdaptersInUse in_use = from_.engine->adapters_in_use();
  metrics_.SetAdaptersInUse(in_use.running, in_use.waiting);
  const Sleeper::Tags asleep = from_.sleeper->asleep();
  for (const std::string& tag : Sleeper::AllTags()) {
    metrics_.SetSleeping(tag, asleep.count(tag) > 0);
  }
  if (from_.store != nullptr) {
    const adapter::Store::Stats kept = from_.store->stats();
    metrics_.SetStore({kept.journal_bytes, kept.objects, kept.object_bytes, kept.appends,
                       kept.append_time, kept.compactions, kept.failures});
  }
  const security::Guard::Stats guarded = from_.guard->stats();
  metrics_.SetSecurity(
      {guarded.tokens_reload_failures, guarded.tls_reload_failures, guarded.tls_expiry});
  CountMemory();
  return metrics_.Render();
}

Metrics::AdapterGauges Scrape::CountAdapters() const {
  Metrics::AdapterGauges gauges;
  std::map<adapter::AdapterState, int> versions = from_.registry->CountByState();
  gauges.ready = versions[adapter::AdapterState::kReady];
  gauges.retiring = versions[adapter::AdapterState::kRetiring];
  gauges.loading = versions[adapter::AdapterState::kLoading];
  const adapter::Residency::Stats resident = from_.residency->stats();
  gauges.resident_bytes = resident.bytes;
  gauges.away = resident.away;
  gauges.evictions = resident.evictions;
  gauges.host_bytes = resident.host_bytes;
  gauges.recalls_from_host = resident.recalls_from_host;
  gauges.recalls_from_store = resident.recalls_from_store;
  gauges.leases = from_.registry->total_leases();
  gauges.generation = from_.registry->generation();
  const rpc::UploadStore::Idle idle = from_.uploads->idle();
  gauges.idle_uploads = idle.uploads;
  gauges.idle_upload_bytes = idle.bytes;
  if (from_.handover != nullptr) {
    const handover::Listener::Stats held = from_.handover->stats();
    gauges.handover_connections = held.connections;
    gauges.handover_bytes = held.memory_bytes;
    gauges.lent_weight_bytes = from_.backend->lent_weight_bytes();
  }
  return gauges;
}

void Scrape::CountMemory() {
  int64_t held = 0;
  for (const auto& [kind, bytes] : from_.memory_by_kind()) {
    metrics_.SetMemory(kind, bytes);
    held += bytes;
  }
  if (const std::optional<Backend::Device> device = from_.backend->device()) {
    const int64_t others = device->total - device->free - device->pooled - held;
    metrics_.SetDevice({device->limit, device->total, device->free, device->pooled,
                        std::max<int64_t>(0, others), device->refused_by_limit,
                        device->refused_by_reserve});
  }
}

}  // namespace dorad
