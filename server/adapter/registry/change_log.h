// The registry's durable changes, and the state that they add up to. Plain values; ChangeLog states
// its own thread-safety.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace dorad::adapter {

// A durable version. Its content is an object of the store.
struct StoredVersion {
  std::string object;
  std::string digest;  // as AdapterSummary's
  absl::Time create_time;
  std::map<std::string, std::string> tags;
  bool pinned = false;  // its weights stay resident

  bool operator==(const StoredVersion&) const = default;
};

struct Change {
  enum class Type {
    kStarted,    // the server has started; ephemeral versions are gone
    kReserved,   // the number is taken, even if the load fails
    kServed,     // an ephemeral version is READY
    kPublished,  // a durable version is READY, and active if `activate`
    kActivated,  // also of an ephemeral version that becomes READY with it
    kRetired,
  };
  Type type = Type::kStarted;
  // The registry uses no greater generation until the next record is written.
  int64_t generation = 0;
  // Only kStarted.
  std::string base;   // digest of the base model
  int64_t floor = 0;  // StoredState's
  // All other types.
  std::string name;
  int64_t version = 0;
  // Only kPublished.
  StoredVersion stored;
  bool activate = false;

  bool operator==(const Change&) const = default;
};

// One line of JSON. REQUIRES: names and tags are UTF-8.
std::string ToJson(const Change& change);
// DATA_LOSS (STORE_DAMAGED) for text that neither ToJson nor its previous format writes. `format`:
// of the record's run; kept from one record to the next.
absl::StatusOr<Change> ParseChange(std::string_view json, int64_t* format);

// Above this number of names, names without a version are dropped.
inline constexpr size_t kMaxNames = 65536;

// The sum of the changes of all runs.
struct StoredState {
  struct Name {
    int64_t last_version = 0;
    int64_t last_served = 0;  // the highest number of a version that was READY
    int64_t active = 0;       // may be an ephemeral version
    std::map<int64_t, StoredVersion> versions;

    bool operator==(const Name&) const = default;
  };
  std::string base;
  int64_t generation = 0;
  // The highest last_served of dropped names.
  int64_t floor = 0;
  std::map<std::string, Name> names;

  bool operator==(const StoredState&) const = default;

  void Apply(const Change& change);
  // Drops names without a served version, and with more than kMaxNames all names without a version.
  // Failed loads leave no name behind and do not raise the floor.
  void ForgetIdleNames();
  // The fewest changes that add up to this state.
  std::vector<Change> ToChanges() const;
};

// Makes changes durable. Implemented by Store.
class ChangeLog {
 public:
  virtual ~ChangeLog() = default;
  // Returns when the change survives a crash. After a failure it has not happened.
  // RESOURCE_EXHAUSTED (STORE_FULL), UNAVAILABLE (STORE_UNAVAILABLE). Thread-safe.
  virtual absl::Status Append(const Change& change) = 0;
  // Call when a version with that object is GONE. May wait for the disk. Thread-safe.
  virtual void Drop(const std::string& object) = 0;
};

}  // namespace dorad::adapter
