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
                      .pending_pauses = static_cast<int>(stats.pending_pauses.size()),
                      .running_sequences = stats.running_sequences,
                      .waiting_sequences = stats.waiting_sequences,
                      .queued_requests = stats.queued_requests,
                      .queued_tokens = stats.queued_tokens,
                      .kv_pages_total = stats.kv_pages_total,
                      .kv_pages_used = stats.kv_pages_used,
                      .kv_pages_cached = stats.kv_pages_cached,
                      .kv_pages_released = stats.kv_pages_released,
                      .paused = stats.paused,
                      .gpu_share = stats.gpu_share});
  metrics_.SetAdapters(CountAdapters());
  const engine::AdaptersInUse in_use = from_.engine->adapters_in_use();
  metrics_.SetAdaptersInUse(in_use.running, in_use.waiting);
  const SleepControl::Tags asleep = from_.colocation->sleep()->asleep();
  for (const char* tag : SleepControl::kAllTags) {
    metrics_.SetSleeping(tag, std::find(asleep.begin(), asleep.end(), tag) != asleep.end());
  }
  if (from_.store != nullptr) {
    const adapter::Store::Stats kept = from_.store->stats();
    metrics_.SetStore({kept.journal_bytes, kept.objects, kept.object_bytes, kept.appends,
                       kept.append_time, kept.compactions, kept.failures});
  }
  const security::SecurityManager::Stats security = from_.security_manager->stats();
  metrics_.SetSecurity(
      {security.tokens_reload_failures, security.tls_reload_failures, security.tls_expiry});
  CountMemory();
  return metrics_.Render();
}

Metrics::AdapterGauges Scrape::CountAdapters() const {
  Metrics::AdapterGauges gauges;
  adapter::VersionTotals totals = from_.registry->Totals();
  std::map<adapter::AdapterState, int>& versions = totals.by_state;
  gauges.unactivated = totals.unactivated;
  gauges.active_numbers = totals.active_numbers;
  gauges.active_checksum = totals.active_checksum;
  gauges.ready = versions[adapter::AdapterState::kReady];
  gauges.retiring = versions[adapter::AdapterState::kRetiring];
  gauges.loading = versions[adapter::AdapterState::kLoading];
  const adapter::Residency::Stats resident = from_.residency->stats();
  gauges.resident_bytes = resident.bytes;
  gauges.away = resident.away;
  gauges.evictions = resident.evictions;
  gauges.host_bytes = resident.host_bytes;
  gauges.reloads_from_host = resident.reloads_from_host;
  gauges.reloads_from_store = resident.reloads_from_store;
  gauges.leases = from_.registry->total_leases();
  gauges.generation = from_.registry->generation();
  const rpc::UploadStore::Idle idle = from_.uploads->idle();
  gauges.idle_uploads = idle.uploads;
  gauges.idle_upload_bytes = idle.bytes;
  if (const shared_memory::Listener* listener = from_.colocation->listener()) {
    const shared_memory::Listener::Stats held = listener->stats();
    gauges.shared_memory_connections = held.connections;
    gauges.shared_memory_bytes = held.memory_bytes;
    gauges.shared_weight_bytes = from_.backend->shared_weight_bytes();
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
