// The interface of Sleep and Wake for the rpc room. Implemented by SleepController; tests use a
// fake. Thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace dorad {

class SleepControl {
 public:
  static constexpr std::array<const char*, 3> kAllTags = {"adapters", "kv", "weights"};
  // Any of kAllTags ("weights": the base model's); none means all.
  using Tags = std::vector<std::string>;
  struct Options {
    bool keep_kv = false;          // keeps the KV cache in host memory until Wake
    bool refuse_requests = false;  // refuses new requests until Wake; else they wait
  };
  virtual ~SleepControl() = default;

  // `done` runs on another thread, with the released bytes by tag, for tags that were awake.
  // INVALID_ARGUMENT (SLEEP_TAG_INVALID). After a failure the tags that were released before it
  // sleep.
  using SleepDone = std::function<void(absl::StatusOr<std::map<std::string, int64_t>>)>;
  virtual void Sleep(Tags tags, Options options, SleepDone done) = 0;
  // `done` runs on another thread. INVALID_ARGUMENT (SLEEP_TAG_INVALID). After a failure
  // (OUT_OF_MEMORY) the remaining tags still sleep.
  virtual void Wake(Tags tags, std::function<void(absl::Status)> done) = 0;
  // Sorted.
  virtual Tags asleep() const = 0;
};

}  // namespace dorad
