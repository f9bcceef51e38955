// The registry's public records of versions and changes. Plain values.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/adapter/registry/version.h"

namespace dorad::adapter {

// A copy of one version's record.
struct AdapterRecord {
  std::string name;
  int64_t version = 0;
  AdapterState state = AdapterState::kLoading;
  absl::Status failure;  // set in kFailed
  bool active = false;
  bool durable = false;         // survives a restart
  bool resident = false;        // its weights are in device memory
  bool in_host_memory = false;  // it has a host copy
  AdapterSummary summary;       // from kReady on; of a failed durable version the digest
  int leases = 0;
  absl::Time create_time;
  std::map<std::string, std::string> tags;
};

// Of all versions, for metrics.
struct VersionTotals {
  std::map<AdapterState, int> by_state;  // empty states are left out
  int unactivated = 0;                   // READY versions above their name's active one
  int64_t active_numbers = 0;            // the sum of the active versions' numbers
  uint32_t active_checksum = 0;          // of names, numbers and digests of the active versions
};

enum class EventType { kPublished, kActivated, kRetired, kGone, kFailed };

struct RegistryEvent {
  int64_t generation = 0;
  EventType type = EventType::kPublished;
  AdapterRecord adapter;
};

}  // namespace dorad::adapter
