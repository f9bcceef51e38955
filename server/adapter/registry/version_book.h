// The versions of every name: their records, the numbers that were given out, and which version is
// active. Says what a caller's reference means.
//
// Owned by AdapterRegistry, whose lock guards it. Pointers to versions hold until Ended forgets
// theirs.
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

    // The record as of now.
    AdapterRecord Copy() const;
    void MakeReady(std::shared_ptr<const LoadedAdapter> loaded);
  };

  // Keeps the records of so many versions that have ended. REQUIRES: >= 1.
  explicit VersionBook(int max_ended_records);

  bool empty() const { return names_.empty(); }

  // --- Lookups. A version that is not there, or not as wanted, is told as AdapterRegistry's
  // functions say.

  Version* Find(const std::string& name, int64_t version);  // nullptr: there is none
  const Version* Find(const std::string& name, int64_t version) const;
  absl::StatusOr<Version*> Resolve(const AdapterRef& ref);
  absl::StatusOr<Version*> ResolveReady(const AdapterRef& ref);
  // READY, or durable and not restored: nothing else can be done with such a one.
  absl::StatusOr<Version*> ResolveRetirable(const AdapterRef& ref);
  // The oldest READY version of the name that is not active and not among the newest `keep` READY
  // ones; nullptr: there is none.
  const Version* OldestBeyond(const std::string& name, int64_t keep) const;
  // 0: the name has none.
  int64_t ActiveOf(const std::string& name) const;
  // As AdapterRegistry::List.
  std::vector<AdapterRecord> List(const std::string& name, const std::string& after_name,
                                  int64_t after_version, int limit) const;
  // How many versions are in each state; copies nothing.
  std::map<AdapterState, int> CountByState() const;

  // --- Numbers.

  // The number that a load may take: `wanted`, or the next one. Errors as AdapterRegistry::Reserve.
  absl::StatusOr<int64_t> FreeNumber(const std::string& name, std::optional<int64_t> wanted) const;
  // All numbers up to this one have been given out.
  void NoteNumber(const std::string& name, int64_t number);
  // In an earlier run versions up to this number served.
  void NoteServed(const std::string& name, int64_t number);
  // And of names that have been forgotten since.
  void NoteForgotten(int64_t number);
  // Drops names without any record when there are very many names. One that comes back starts above
  // every number under which a version of the dropped ones ever served; loads that failed count for
  // nothing, or whoever may publish could drive the numbers of all.
  void ForgetIdleNames();

  // --- Changes.

  // A new version in LOADING. REQUIRES: there is none of that number.
  Version& Add(const std::string& name, int64_t version);
  void MakeActive(Version& version);
  // Its name then has no active version, if that was it.
  void MakeInactive(Version& version);
  // Notes a version that has come to its end; older such records are dropped.
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
