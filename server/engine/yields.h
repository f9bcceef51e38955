// Who has asked the server to yield its device, to which share of the time and how long. Each asks
// under an id of its own and ends alone, by word or when its time is over: a trainer that died does
// not leave the server slow. Confined to the engine thread; owned by EngineLoop.
#pragma once

#include <cstddef>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "server/engine/request.h"

namespace dorad::engine {

class Yields {
 public:
  static constexpr size_t kMost = 64;

  // Begins the yield, or changes the one of that id. RESOURCE_EXHAUSTED (TOO_MANY_YIELDS).
  // REQUIRES: 0 < share <= 1.
  absl::Status Set(const std::string& id, double share, Instant until);
  // Whether there was one.
  bool End(const std::string& id) { return yields_.erase(id) > 0; }
  void EndOverdue(Instant now);

  bool empty() const { return yields_.empty(); }
  // The smallest of all shares; 1 without any.
  double share() const;
  // When the first of them is over. REQUIRES: !empty().
  Instant next_end() const;

 private:
  struct Yield {
    double share;
    Instant until;
  };
  std::map<std::string, Yield> yields_;
};

}  // namespace dorad::engine
