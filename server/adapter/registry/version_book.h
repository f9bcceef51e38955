// The versions of every name: records, numbers and the active version. Resolves references.
//
// Owned by AdapterRegistry, whose lock guards it. Pointers to versions hold until Ended drops their
// record.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "server/adapter/registry/record.h"
#include "server/adapter/registry/version.h"

namespace dorad::adapter {

class VersionBook {
 public:
  struct Version {
    AdapterRecord record;
    // From READY to GONE.
    std::shared_ptr<const LoadedAdapter> adapter;
    std::string object;  // of a durable version, to GONE

    // GONE, or FAILED without an object to retire.
    bool ended() const {
      return record.state == AdapterState::kGone ||
             (record.state == AdapterState::kFailed && !record.durable);
    }
    // The record as of now.
    AdapterRecord Copy() const;
    void MakeReady(std::shared_ptr<const LoadedAdapter> loaded);
  };

  // The number of ended versions whose records are kept. REQUIRES: >= 1.
  explicit VersionBook(int max_ended_records);

  bool empty() const { return names_.empty(); }

  // --- Lookups. Errors as AdapterRegistry's functions.

  Version* Find(const std::string& name, int64_t version);  // nullptr: no such version
  const Version* Find(const std::string& name, int64_t version) const;
  absl::StatusOr<Version*> Resolve(const AdapterRef& ref);
  absl::StatusOr<Version*> ResolveReady(const AdapterRef& ref);
  // READY, or durable and FAILED at a restore: such a version can only be retired.
  absl::StatusOr<Version*> ResolveRetirable(const AdapterRef& ref);
  // The oldest READY version of the name that is neither active nor among the newest `keep` READY
  // ones; nullptr: none.
  const Version* OldestBeyond(const std::string& name, int64_t keep) const;
  // 0: the name has none.
  int64_t ActiveOf(const std::string& name) const;
  // As AdapterRegistry::List.
  std::vector<AdapterRecord> List(const std::string& name, const std::string& after_name,
                                  int64_t after_version, int limit) const;
  // Copies no record.
  VersionTotals Totals() const;

  // --- Numbers.

  // The number that a load may take: `wanted`, or the next one. Errors as AdapterRegistry::Reserve.
  absl::StatusOr<int64_t> FreeNumber(const std::string& name, std::optional<int64_t> wanted,
                                     bool of_peer) const;
  // Drops the record of an ended version with this number, if there is one.
  void Vacate(const std::string& name, int64_t number);
  // All numbers up to this one are used.
  void NoteNumber(const std::string& name, int64_t number);
  // Versions up to this number served in an earlier run.
  void NoteServed(const std::string& name, int64_t number);
  // As NoteServed, over all dropped names.
  void NoteForgotten(int64_t number);
  // Drops names without a record when there are very many names. A name that is published again
  // starts above every served number of the dropped names. Failed loads do not count: otherwise any
  // publisher could raise the numbers of all.
  void ForgetIdleNames();

  // --- Changes.

  // Adds a version in LOADING. REQUIRES: the number is new.
  Version& Add(const std::string& name, int64_t version);
  void MakeActive(Version& version);
  // If it was active, its name has no active version.
  void MakeInactive(Version& version);
  // Notes an ended version; drops the oldest such records.
  void Ended(const Version& version);

 private:
  struct Name {
    std::map<int64_t, Version> versions;
    int64_t last_version = 0;
    int64_t last_served = 0;  // of the versions that are gone
    int64_t active = 0;
  };

  static std::vector<int64_t> NewestReady(const Name& name);
  std::vector<std::string> NamesAround(const std::string& unknown) const;

  const size_t max_ended_records_;
  std::map<std::string, Name> names_;
  int64_t forgotten_floor_ = 0;
  std::deque<std::pair<std::string, int64_t>> ended_;
};

}  // namespace dorad::adapter
