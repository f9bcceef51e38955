// The limits that callers have set on the share of GPU time. Each has an id and ends by
// EndGpuShareLimit or at its time to live: a trainer that died does not leave the server slow.
// Confined to the engine thread; owned by EngineLoop.
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

  // Begins the limit, or changes the one of that id. RESOURCE_EXHAUSTED
  // (TOO_MANY_GPU_SHARE_LIMITS). REQUIRES: 0 < share <= 1.
  absl::Status Set(const std::string& id, double share, Instant until);
  // Whether there was one.
  bool End(const std::string& id) { return limits_.erase(id) > 0; }
  void EndOverdue(Instant now);

  bool empty() const { return limits_.empty(); }
  // The smallest of all shares; 1 without any.
  double share() const;
  // When the first of them is over. REQUIRES: !empty().
  Instant next_end() const;

 private:
  struct LimitGpuShare {
    double share;
    Instant until;
  };
  std::map<std::string, LimitGpuShare> limits_;
};

}  // namespace dorad::engine
