// Keeps a device that others use, too, below the water marks: looks at its memory once a second and
// lets go what Governor says. Owned by App; what it is given outlives it. Its thread computes
// nothing, waits for copies to host memory, and holds the engine up only for what goes of the KV
// cache, between two steps.
#pragma once

#include "server/adapter/residency/residency.h"
#include "server/backends/backend.h"
#include "server/colocation/governor.h"
#include "server/colocation/kv_shrinker.h"
#include "server/engine/engine.h"
#include "server/platform/metrics/metrics.h"
#include "server/platform/net/poller.h"

namespace dorad {

class Housekeeper {
 public:
  // REQUIRES: the backend has a device.
  Housekeeper(Governor::Marks marks, Backend* backend, adapter::Residency* residency,
              engine::Engine* engine, KvShrinker* kv_shrinker, Metrics* metrics);

 private:
  void Turn();
  Governor::Snapshot Look(const Backend::Device& device);
  // False when nothing went.
  bool GiveBack(const Governor::Plan& plan, const Backend::Device& before);
  // Returns how many bytes of what was pooled went.
  int64_t Trim(int64_t pooled);

  const Governor governor_;
  TrimmablePool pool_;
  Backend& backend_;
  adapter::Residency& residency_;
  engine::Engine& engine_;
  KvShrinker& kv_shrinker_;
  Metrics& metrics_;
  bool has_warned_ = false;  // of pressure that nothing relieves, since it began
  Poller poller_;            // of all this: its end waits for what is leaving
};

}  // namespace dorad
