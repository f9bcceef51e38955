#include "server/adapter/registry/version_book.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/adapter/registry/change_log.h"
#include "server/adapter/registry/registry_errors.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::adapter {
namespace {

// AdapterRef::Parse reads at most 18 digits.
constexpr int64_t kMaxVersion = 999'999'999'999'999'999;
// The limit for a caller's number; includes microseconds since 1970. Leaves enough numbers above it
// for later versions.
constexpr int64_t kMaxWantedVersion = 10'000'000'000'000'000;
// Candidates for a similar name, before and after an unknown one.
constexpr int kNearbyNames = 64;

// FNV-1a: the same in every process and build.
constexpr uint32_t kFnvOffset = 2166136261;

uint32_t Fnv(uint32_t hash, std::string_view text) {
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash;
}

}  // namespace

AdapterRecord VersionBook::Version::Copy() const {
  AdapterRecord copy = record;
  copy.resident = adapter != nullptr && adapter->resident();
  copy.in_host_memory = adapter != nullptr && adapter->in_host_memory();
  return copy;
}

void VersionBook::Version::MakeReady(std::shared_ptr<const LoadedAdapter> loaded) {
  record.state = AdapterState::kReady;
  record.summary = loaded->summary();
  adapter = std::move(loaded);
}

VersionBook::VersionBook(int max_ended_records)
    : max_ended_records_(static_cast<size_t>(max_ended_records)) {
  DORAD_CHECK(max_ended_records >= 1);
}

const VersionBook::Version* VersionBook::Find(const std::string& name, int64_t version) const {
  const auto it = names_.find(name);
  if (it == names_.end()) return nullptr;
  const auto found = it->second.versions.find(version);
  return found == it->second.versions.end() ? nullptr : &found->second;
}

VersionBook::Version* VersionBook::Find(const std::string& name, int64_t version) {
  return const_cast<Version*>(std::as_const(*this).Find(name, version));
}

// Ascending, at most kListedVersions.
std::vector<int64_t> VersionBook::NewestReady(const Name& name) {
  std::vector<int64_t> ready;
  for (auto it = name.versions.rbegin(); it != name.versions.rend(); ++it) {
    if (ready.size() >= kListedVersions) break;
    if (it->second.record.state == AdapterState::kReady) ready.push_back(it->first);
  }
  std::reverse(ready.begin(), ready.end());
  return ready;
}

// Names with a READY version around an unknown one in alphabetical order.
std::vector<std::string> VersionBook::NamesAround(const std::string& unknown) const {
  auto it = names_.lower_bound(unknown);
  for (int i = 0; i < kNearbyNames && it != names_.begin(); ++i) --it;
  std::vector<std::string> around;
  for (int i = 0; i < 2 * kNearbyNames && it != names_.end(); ++i, ++it) {
    if (!NewestReady(it->second).empty()) around.push_back(it->first);
  }
  return around;
}

absl::StatusOr<VersionBook::Version*> VersionBook::Resolve(const AdapterRef& ref) {
  const auto it = names_.find(ref.name);
  if (it == names_.end() || it->second.versions.empty()) {
    return UnknownAdapter(ref.name, NamesAround(ref.name));
  }
  const int64_t number = ref.version == 0 ? it->second.active : ref.version;
  if (number == 0) {
    return NoActiveVersion(ref.name, NewestReady(it->second));
  }
  const auto found = it->second.versions.find(number);
  if (found == it->second.versions.end()) {
    return UnknownVersion(ref.name, number, NewestReady(it->second));
  }
  const AdapterRecord& record = found->second.record;
  if (!absl::StartsWith(record.summary.digest, ref.digest)) return OtherDigest(record, ref.digest);
  return &found->second;
}

absl::StatusOr<VersionBook::Version*> VersionBook::ResolveReady(const AdapterRef& ref) {
  DORAD_ASSIGN_OR_RETURN(Version * version, Resolve(ref));
  if (version->record.state != AdapterState::kReady) return NotReady(version->record);
  return version;
}

absl::StatusOr<VersionBook::Version*> VersionBook::ResolveRetirable(const AdapterRef& ref) {
  DORAD_ASSIGN_OR_RETURN(Version * version, Resolve(ref));
  const AdapterRecord& record = version->record;
  if (record.durable && record.state == AdapterState::kFailed) return version;
  return ResolveReady(ref);
}

const VersionBook::Version* VersionBook::OldestBeyond(const std::string& name, int64_t keep) const {
  const auto it = names_.find(name);
  if (it == names_.end()) return nullptr;
  const Version* oldest = nullptr;
  int64_t newer = 0;
  for (auto version = it->second.versions.rbegin(); version != it->second.versions.rend();
       ++version) {
    const AdapterRecord& record = version->second.record;
    if (record.state != AdapterState::kReady || ++newer <= keep) continue;
    if (!record.active) oldest = &version->second;
  }
  return oldest;
}

int64_t VersionBook::ActiveOf(const std::string& name) const {
  const auto it = names_.find(name);
  return it == names_.end() ? 0 : it->second.active;
}

std::vector<AdapterRecord> VersionBook::List(const std::string& name, const std::string& after_name,
                                             int64_t after_version, int limit) const {
  std::vector<AdapterRecord> records;
  for (auto it = names_.lower_bound(std::max(name, after_name));
       it != names_.end() && (name.empty() || it->first == name); ++it) {
    const std::map<int64_t, Version>& versions = it->second.versions;
    auto version = it->first == after_name ? versions.upper_bound(after_version) : versions.begin();
    for (; version != versions.end(); ++version) {
      if (records.size() >= static_cast<size_t>(std::max(limit, 0))) return records;
      records.push_back(version->second.Copy());
    }
  }
  return records;
}

VersionTotals VersionBook::Totals() const {
  VersionTotals totals;
  totals.active_checksum = kFnvOffset;
  for (const auto& [name, held] : names_) {
    for (const auto& [number, version] : held.versions) {
      const AdapterRecord& record = version.record;
      ++totals.by_state[record.state];
      if (record.state == AdapterState::kReady && number > held.active) ++totals.unactivated;
      if (!record.active) continue;
      totals.active_numbers += number;
      totals.active_checksum = Fnv(
          totals.active_checksum, absl::StrCat(name, "@", number, ":", record.summary.digest, " "));
    }
  }
  return totals;
}

absl::StatusOr<int64_t> VersionBook::FreeNumber(const std::string& name,
                                                std::optional<int64_t> wanted, bool of_peer) const {
  const auto known = names_.find(name);
  const int64_t last = known == names_.end() ? forgotten_floor_ : known->second.last_version;
  const int64_t number = wanted.value_or(last + 1);
  const int64_t most = wanted ? kMaxWantedVersion : kMaxVersion;
  if (number < 1 || number > most) {
    return MakeInvalid("version",
                       {{"version", "ADAPTER_VERSION_INVALID",
                         absl::StrCat("version ", number, " is not within [1, ", most, "]")}});
  }
  if (number <= last) {
    const Version* const holder = Find(name, number);
    if (of_peer && (holder == nullptr || holder->ended())) return number;
    return VersionTaken(name, number, last, holder == nullptr ? nullptr : &holder->record);
  }
  return number;
}

void VersionBook::Vacate(const std::string& name, int64_t number) {
  const Version* const holder = Find(name, number);
  if (holder == nullptr || !holder->ended()) return;
  std::erase(ended_, std::pair(name, number));
  names_[name].versions.erase(number);
}

void VersionBook::NoteNumber(const std::string& name, int64_t number) {
  int64_t& last = names_[name].last_version;
  last = std::max(last, number);
}

void VersionBook::NoteServed(const std::string& name, int64_t number) {
  names_[name].last_served = number;
}

void VersionBook::NoteForgotten(int64_t number) { forgotten_floor_ = number; }

void VersionBook::ForgetIdleNames() {
  if (names_.size() < kMaxNames) return;
  for (auto it = names_.begin(); it != names_.end();) {
    if (it->second.versions.empty()) {
      forgotten_floor_ = std::max(forgotten_floor_, it->second.last_served);
      it = names_.erase(it);
    } else {
      ++it;
    }
  }
}

VersionBook::Version& VersionBook::Add(const std::string& name, int64_t version) {
  const auto [it, is_new] = names_[name].versions.try_emplace(version);
  DORAD_CHECK(is_new);
  it->second.record.name = name;
  it->second.record.version = version;
  return it->second;
}

void VersionBook::MakeActive(Version& version) {
  Name& name = names_[version.record.name];
  if (Version* previous = Find(version.record.name, name.active)) previous->record.active = false;
  name.active = version.record.version;
  version.record.active = true;
}

void VersionBook::MakeInactive(Version& version) {
  if (!version.record.active) return;
  version.record.active = false;
  names_[version.record.name].active = 0;
}

void VersionBook::Ended(const Version& version) {
  if (version.record.state == AdapterState::kGone) {
    int64_t& served = names_[version.record.name].last_served;
    served = std::max(served, version.record.version);
  }
  ended_.emplace_back(version.record.name, version.record.version);
  while (ended_.size() > max_ended_records_) {
    names_[ended_.front().first].versions.erase(ended_.front().second);
    ended_.pop_front();
  }
}

}  // namespace dorad::adapter
