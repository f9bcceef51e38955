// Sleep and Wake as the rpc room calls them. Implemented by SleepController; tests put a fake in
// its place. Thread-safe.
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
  // Any of kAllTags ("weights" of the base); none means all.
  using Tags = std::vector<std::string>;
  struct Options {
    bool keep_kv = false;          // copies the KV cache to host memory, from where it comes back
    bool refuse_requests = false;  // new requests, until Wake; otherwise they wait
  };
  virtual ~SleepControl() = default;

  // `done` runs on another thread, with the bytes that were given back, by tag, of tags that did
  // not sleep yet. INVALID_ARGUMENT (SLEEP_TAG_INVALID). After a failure the tags that were done
  // before it sleep.
  using SleepDone = std::function<void(absl::StatusOr<std::map<std::string, int64_t>>)>;
  virtual void Sleep(Tags tags, Options options, SleepDone done) = 0;
  // `done` runs on another thread. INVALID_ARGUMENT (SLEEP_TAG_INVALID). After a failure, as of too
  // little memory (OUT_OF_MEMORY), the tags that are left sleep on.
  virtual void Wake(Tags tags, std::function<void(absl::Status)> done) = 0;
  // Sorted.
  virtual Tags asleep() const = 0;
};

}  // namespace dorad
