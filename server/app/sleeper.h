// Sleep and Wake: gives memory back to whoever else uses the device (a trainer's backward pass),
// and takes it again, while addresses, requests and versions stay.
//
// What sleeps has a tag: "weights" (of the base), "kv", "adapters". While anything sleeps no step
// is computed: requests wait, or new ones are refused. Versions can be published and activated, but
// not while the weights sleep, which their norms need: what was in line waits for them. Owned by
// App. Thread-safe; Sleep and Wake wait for each other, and for the device.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/adapter/loader.h"
#include "server/adapter/residency.h"
#include "server/app/backend.h"
#include "server/engine/engine.h"

namespace dorad {

class Sleeper {
 public:
  using Tags = std::set<std::string>;
  using Bytes = std::map<std::string, int64_t>;  // by tag
  struct Options {
    bool keep_kv = false;
    bool refuse_requests = false;
  };

  // All are borrowed.
  Sleeper(Backend* backend, adapter::Residency* residency, adapter::AdapterLoader* loader,
          engine::Engine* engine)
      : backend_(*backend), residency_(*residency), loader_(*loader), engine_(*engine) {}

  static const Tags& AllTags();
  // The tags of a request; none means all. INVALID_ARGUMENT (SLEEP_TAG_INVALID).
  static absl::StatusOr<Tags> ParseTags(const std::vector<std::string>& tags);

  // What was given back, of tags that did not sleep yet. After a failure the tags that were done
  // before it sleep.
  absl::StatusOr<Bytes> Sleep(const Tags& tags, const Options& options);
  // After a failure, as of too little memory (OUT_OF_MEMORY), the tags that are left sleep on.
  absl::Status Wake(const Tags& tags);
  Tags asleep() const;

 private:
  void SetAsleep(const std::string& tag, bool asleep);

  Backend& backend_;
  adapter::Residency& residency_;
  adapter::AdapterLoader& loader_;
  engine::Engine& engine_;
  absl::Mutex turn_;  // one Sleep or Wake at a time
  mutable absl::Mutex mu_;
  Tags asleep_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad
