#include "server/colocation/housekeeper.h"

#include <algorithm>
#include <optional>

#include "server/platform/log.h"

namespace dorad {
Housekeeper::Housekeeper(Governor::Marks marks, Backend* backend, adapter::Residency* residency,
                         engine::Engine* engine, KvShrinker* kv_shrinker, Metrics* metrics)
    : governor_(marks),
      backend_(*backend),
      residency_(*residency),
      engine_(*engine),
      kv_shrinker_(*kv_shrinker),
      metrics_(*metrics),
      poller_([this] { Turn(); }) {}

Governor::Snapshot Housekeeper::Look(const Backend::Device& device) {
  Governor::Snapshot snapshot;
  snapshot.total = device.total;
  snapshot.free = device.free;
  snapshot.pooled = pool_.Trimmable(device.pooled);
  snapshot.idle_adapters = residency_.stats().idle_bytes;
  const engine::EngineStats engine = engine_.stats();
  snapshot.idle_kv = engine.kv_shrinkable_bytes;
  snapshot.kv_wanted = engine.kv_short;
  return snapshot;
}

void Housekeeper::Turn() {
  const std::optional<Backend::Device> before = backend_.device();
  if (!before) return;
  const Governor::Snapshot snapshot = Look(*before);
  const Governor::Plan plan = governor_.Decide(snapshot);
  if (!plan.empty() && GiveBack(plan, *before)) return;
  if (!governor_.IsHigh(snapshot)) {
    has_warned_ = false;
  } else if (!std::exchange(has_warned_, true)) {
    LogWarning("the device's memory is above memory.high_water, and the server has none to release",
               {{"free_bytes", before->free}, {"total_bytes", before->total}});
  }
}

bool Housekeeper::GiveBack(const Governor::Plan& plan, const Backend::Device& before) {
  const int64_t adapters = plan.adapters > 0 ? residency_.GiveBack(plan.adapters) : 0;
  const int64_t pooled = plan.trim ? Trim(before.pooled) : 0;
  const int64_t kv = plan.kv > 0 ? kv_shrinker_.Shrink(plan.kv) : 0;
  if (adapters + pooled + kv == 0) return false;
  metrics_.MemoryReleased("adapters", adapters);
  metrics_.MemoryReleased("pool", pooled);
  LogInfo("released device memory", {{"free_bytes", before.free},
                                     {"total_bytes", before.total},
                                     {"adapter_bytes", adapters},
                                     {"kv_bytes", kv},
                                     {"pooled_bytes", pooled}});
  return true;
}

int64_t Housekeeper::Trim(int64_t pooled) {
  backend_.ReturnFreedMemory();
  const std::optional<Backend::Device> after = backend_.device();
  if (!after) return 0;
  pool_.NoteTrimmed(after->pooled);
  return std::max<int64_t>(0, pooled - after->pooled);
}

}  // namespace dorad
