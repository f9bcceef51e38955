// One version's weights in the books of a Residency. Part of the residency alone. Guarded by
// Residency::State::mu, but for `weights` while somebody uses them.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/adapter/residency/residency.h"

namespace dorad::adapter {

struct ResidencyRecord;
class RecordList;

// A record's neighbours in a list.
struct ListLink {
  RecordList* list = nullptr;  // nullptr: it is in none
  ResidencyRecord* before = nullptr;
  ResidencyRecord* after = nullptr;
};

struct ResidencyRecord : std::enable_shared_from_this<ResidencyRecord> {
  enum class Place { kResident, kEvicting, kAway, kLoading };

  // More than any host has.
  static constexpr int64_t kNoHostMemory = int64_t{1} << 44;

  std::shared_ptr<const AdapterWeights> weights;  // while kResident and kEvicting
  int64_t bytes = 0;
  std::unique_ptr<const HostCopy> host_copy;
  int64_t host_copy_bytes = kNoHostMemory;
  bool has_host_room = false;  // of host_copy_bytes, for `host_copy` or for one that is to be saved
  Residency::Reload reload;    // nullptr: the store does not have it
  bool permanent = false;      // Residency::Add's `pinned`
  Place place = Place::kAway;
  int pins = 0;             // WeightsUses
  uint64_t last_use = 0;    // a count that rises: when the last use began or ended, or kept_until
  uint64_t loaded = 0;      // likewise: when it became resident
  bool draining = false;    // gets no new users; is in State::draining
  bool wanted = false;      // is in State::wanted
  bool destroyed = false;   // the entry is gone
  bool load_begun = false;  // of kLoading
  absl::Time wanted_since;
  // Loaded, or held, for somebody who has not come for it yet: until then it stays.
  absl::Time kept_until = absl::InfinitePast();
  absl::Status failure;  // of the last load, until somebody was told

  // Its list by place, and the list of its host copy (residency_lists.h).
  ListLink in_place;
  ListLink in_copies;

  bool takes_users() const { return place == Place::kResident && !draining; }
  // Only a host copy brings it back.
  bool hosted_only() const { return reload == nullptr && !permanent; }
};

}  // namespace dorad::adapter
