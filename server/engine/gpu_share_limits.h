// The callers' limits on the share of GPU time. Each has an id and ends by EndGpuShareLimit or at
// its time to live, so that a dead trainer does not keep the server slow. Confined to the engine
// thread; owned by EngineLoop.
#pragma once

#include <cstddef>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "server/engine/request.h"

namespace dorad::engine {

class GpuShareLimits {
 public:
  static constexpr size_t kMost = 64;

  // Begins a limit or replaces the one of that id. RESOURCE_EXHAUSTED (TOO_MANY_GPU_SHARE_LIMITS).
  // REQUIRES: 0 < share <= 1.
  absl::Status Set(const std::string& id, double share, Instant until);
  // False: no such limit.
  bool End(const std::string& id) { return limits_.erase(id) > 0; }
  void EndOverdue(Instant now);

  bool empty() const { return limits_.empty(); }
  // The smallest share; 1 without limits.
  double share() const;
  // The earliest end of a limit. REQUIRES: !empty().
  Instant next_end() const;

 private:
  struct LimitGpuShare {
    double share;
    Instant until;
  };
  std::map<std::string, LimitGpuShare> limits_;
};

}  // namespace dorad::engine
