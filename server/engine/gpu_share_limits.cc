#include "server/engine/gpu_share_limits.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::engine {

absl::Status GpuShareLimits::Set(const std::string& id, double share, Instant until) {
  DORAD_CHECK(share > 0 && share <= 1);
  const auto found = limits_.find(id);
  if (found == limits_.end() && limits_.size() >= kMost) {
    return MakeError(absl::StatusCode::kResourceExhausted, "TOO_MANY_GPU_SHARE_LIMITS",
                     absl::StrCat(kMost, " limits are in effect; end one first"));
  }
  limits_.insert_or_assign(id, LimitGpuShare{share, until});
  return absl::OkStatus();
}

void GpuShareLimits::EndOverdue(Instant now) {
  std::erase_if(limits_, [now](const auto& entry) { return entry.second.until <= now; });
}

double GpuShareLimits::share() const {
  double share = 1;
  for (const auto& [id, limit] : limits_) share = std::min(share, limit.share);
  return share;
}

Instant GpuShareLimits::next_end() const {
  DORAD_CHECK(!empty());
  Instant next = Instant::max();
  for (const auto& [id, limit] : limits_) next = std::min(next, limit.until);
  return next;
}

}  // namespace dorad::engine
