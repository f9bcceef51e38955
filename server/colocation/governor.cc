#include "server/colocation/governor.h"

#include <algorithm>

namespace dorad {

Governor::Plan Governor::Decide(const Snapshot& snapshot) const {
  Plan plan;
  if (!IsHigh(snapshot)) {
    // The KV cache cannot use pooled memory.
    plan.trim = snapshot.kv_wanted && snapshot.pooled > 0;
    return plan;
  }
  const int64_t excess = snapshot.total - snapshot.free - marks_.low;
  const int64_t of_others = excess - std::min(excess, snapshot.pooled);
  plan.adapters = std::min(of_others, snapshot.idle_adapters);
  plan.trim = snapshot.pooled > 0 || plan.adapters > 0;
  plan.kv = std::min(of_others - plan.adapters, snapshot.idle_kv);
  return plan;
}

}  // namespace dorad
