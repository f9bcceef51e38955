// Sleep and Wake: releases memory for the trainer (for its backward pass) and allocates it again;
// addresses, requests and versions stay. Owned by Colocation. Thread-safe.
//
// A tag ("weights" of the base, "kv", "adapters") has one state. Only this object knows it; it
// stops and resumes the engine, the loader and the residency.
//
//            Sleep: the engine stops computing steps, the memory is released
//   AWAKE ───────────────────────────────────────────────────────────────▶ ASLEEP
//     ▲   the engine cannot release the KV cache: AWAKE as before            │
//     └──────────────────────────────────────────────────────────────────────┘
//            Wake: the memory is allocated; out of memory: ASLEEP as before
//
//   Sleep takes the tags in the order kv, adapters, weights; Wake in the order weights, kv,
//   adapters. While any tag is ASLEEP the engine computes no step: requests wait, or new ones are
//   refused. While weights are ASLEEP nothing is loaded or reloaded, because norms need them:
//   queued loads wait, new publishes are refused. Versions can be activated all the time. One Sleep
//   or Wake runs at a time; the others wait for it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/adapter/publish/loader.h"
#include "server/adapter/residency/residency.h"
#include "server/backends/backend.h"
#include "server/colocation/sleep_control.h"
#include "server/engine/engine.h"

namespace dorad {

class SleepController final : public SleepControl {
 public:
  // The pointers are borrowed. `executor` runs a task on a thread that may wait for the device.
  SleepController(Backend* backend, adapter::Residency* residency, adapter::AdapterLoader* loader,
                  engine::Engine* engine, std::function<void(std::function<void()>)> executor)
      : backend_(*backend),
        residency_(*residency),
        loader_(*loader),
        engine_(*engine),
        executor_(std::move(executor)) {}

  void Sleep(Tags tags, Options options, SleepDone done) override;
  void Wake(Tags tags, std::function<void(absl::Status)> done) override;
  Tags asleep() const override;

 private:
  using TagSet = std::set<std::string>;
  using Bytes = std::map<std::string, int64_t>;  // by tag

  static absl::StatusOr<TagSet> ParseTags(const Tags& tags);
  absl::StatusOr<Bytes> SleepNow(const TagSet& tags, const Options& options);
  absl::StatusOr<int64_t> StopEngine(bool kv, const Options& options);
  absl::Status WakeNow(const TagSet& tags);
  absl::Status WakeEngine(bool kv, bool go_on);
  // Repeats `attempt` after evicting versions that were published meanwhile.
  absl::Status WithRoom(absl::FunctionRef<absl::Status()> attempt);
  bool IsAsleep(const std::string& tag) const;
  void SetAsleep(const std::string& tag, bool asleep);

  Backend& backend_;
  adapter::Residency& residency_;
  adapter::AdapterLoader& loader_;
  engine::Engine& engine_;
  const std::function<void(std::function<void()>)> executor_;
  absl::Mutex turn_;  // one Sleep or Wake at a time
  mutable absl::Mutex mu_;
  TagSet asleep_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad
