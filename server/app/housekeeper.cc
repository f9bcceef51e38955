#include "server/app/housekeeper.h"

#include <algorithm>
#include <optional>

#include "absl/time/time.h"
#include "server/base/log.h"

namespace dorad {
namespace {

constexpr absl::Duration kPeriod = absl::Seconds(1);

}  // namespace

Housekeeper::Housekeeper(Governor::Marks marks, Backend* backend, adapter::Residency* residency,
                         engine::Engine* engine, KvLender* kv_lender, Metrics* metrics)
    : governor_(marks),
      backend_(*backend),
      residency_(*residency),
      engine_(*engine),
      kv_lender_(*kv_lender),
      metrics_(*metrics) {
  thread_ = std::thread([this] {
    while (!stop_.WaitForNotificationWithTimeout(kPeriod)) Turn();
  });
}

Housekeeper::~Housekeeper() {
  stop_.Notify();
  thread_.join();
}

Governor::Snapshot Housekeeper::Look(const Backend::Device& device) const {
  Governor::Snapshot snapshot;
  snapshot.total = device.total;
  snapshot.free = device.free;
  snapshot.pooled = device.pooled;
  snapshot.idle_adapters = residency_.stats().idle_bytes;
  const engine::EngineStats engine = engine_.stats();
  snapshot.idle_kv = engine.kv_lendable_bytes;
  snapshot.kv_wanted = engine.kv_short;
  return snapshot;
}

void Housekeeper::Turn() {
  const std::optional<Backend::Device> before = backend_.device();
  if (!before) return;
  const Governor::Plan plan = governor_.Decide(Look(*before));
  if (plan.empty()) {
    if (!governor_.IsHigh({.total = before->total, .free = before->free})) {
      has_warned_ = false;
    } else if (!std::exchange(has_warned_, true)) {
      LogWarning("the device's memory is above memory.high_water, and all of this server's is used",
                 {{"free_bytes", before->free}, {"total_bytes", before->total}});
    }
    return;
  }
  const int64_t adapters = plan.adapters > 0 ? residency_.GiveBack(plan.adapters) : 0;
  metrics_.MemoryGivenBack("adapters", adapters);
  if (plan.trim) {
    backend_.ReturnFreedMemory();
    metrics_.MemoryGivenBack("pool", before->pooled);
  }
  const int64_t kv = plan.kv > 0 ? kv_lender_.Lend(plan.kv) : 0;
  LogInfo("gave device memory back", {{"free_bytes", before->free},
                                      {"total_bytes", before->total},
                                      {"adapter_bytes", adapters},
                                      {"kv_bytes", kv},
                                      {"pooled_bytes", plan.trim ? before->pooled : 0}});
}

}  // namespace dorad
