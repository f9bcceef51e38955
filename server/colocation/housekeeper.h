// Keeps a shared device below the water marks: checks its memory once a second and releases memory
// as Governor decides. Owned by App; its constructor's arguments outlive it. Its thread does no
// computation, waits for copies to host memory, and blocks the engine only to shrink the KV cache,
// between two steps.
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
  // False when nothing was released.
  bool GiveBack(const Governor::Plan& plan, const Backend::Device& before);
  // Returns the released bytes of the pool.
  int64_t Trim(int64_t pooled);

  const Governor governor_;
  TrimmablePool pool_;
  Backend& backend_;
  adapter::Residency& residency_;
  engine::Engine& engine_;
  KvShrinker& kv_shrinker_;
  Metrics& metrics_;
  bool has_warned_ = false;  // of the current pressure
  Poller poller_;            // last: its thread uses the others
};

}  // namespace dorad
