// What has to outlive the process when the registry changes, and the state that it adds up to.
// Plain values; ChangeLog says itself what is thread-safe.
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
    kStarted,    // a run of the server begins; versions that are not durable are gone
    kReserved,   // the number is taken, whatever becomes of it
    kServed,     // a version that is not durable is READY
    kPublished,  // a durable version is READY, and active if `activate`
    kActivated,  // also of versions that are not durable, and READY only now
    kRetired,
  };
  Type type = Type::kStarted;
  // No change of the registry has a greater one until the next record is written.
  int64_t generation = 0;
  // kStarted.
  std::string base;   // digest of the base model
  int64_t floor = 0;  // StoredState's
  // All others.
  std::string name;
  int64_t version = 0;
  // kPublished.
  StoredVersion stored;
  bool activate = false;

  bool operator==(const Change&) const = default;
};

// One line of JSON. REQUIRES: names and tags are UTF-8.
std::string ToJson(const Change& change);
// DATA_LOSS (STORE_DAMAGED) for anything that ToJson does not write, nor did in the format before.
// `format`: of the run that the record belongs to; kept from one record to the next.
absl::StatusOr<Change> ParseChange(std::string_view json, int64_t* format);

// Of so many names, those without any version are forgotten.
inline constexpr size_t kMaxNames = 65536;

// What the changes of all runs add up to.
struct StoredState {
  struct Name {
    int64_t last_version = 0;
    int64_t last_served = 0;  // the highest number of a version that was READY
    int64_t active = 0;       // perhaps of a version that was not durable
    std::map<int64_t, StoredVersion> versions;

    bool operator==(const Name&) const = default;
  };
  std::string base;
  int64_t generation = 0;
  // No version of a name that was forgotten had a greater number when it served.
  int64_t floor = 0;
  std::map<std::string, Name> names;

  bool operator==(const StoredState&) const = default;

  void Apply(const Change& change);
  // Drops names under which nothing ever served, and when there are very many, all that have no
  // version now. Loads that failed leave nothing for good, nor do they raise the floor.
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
  // A version with that object is GONE. May wait for the disk. Thread-safe.
  virtual void Drop(const std::string& object) = 0;
};

}  // namespace dorad::adapter
