#include "server/adapter/registry/registry_state.h"

#include "absl/time/clock.h"
#include "server/adapter/registry/registry_errors.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::adapter {
namespace {

// Generations of one version's life: published or failed, activated with that, retired, gone.
constexpr int64_t kGenerationsOfVersion = 4;
constexpr int64_t kGenerationsOfRetirement = 2;

}  // namespace

AdapterRegistry::State::State(Options options)
    : log(options.log),
      executor(options.executor),
      deferred_deletion(std::move(options.executor), options.log),
      book(options.max_ended_records),
      events(options.max_events) {}

absl::Status AdapterRegistry::State::CheckGeneration(std::optional<int64_t> expected) const {
  if (!expected || *expected == events.generation()) return absl::OkStatus();
  return GenerationMismatch(*expected, events.generation());
}

absl::Status AdapterRegistry::State::Log(Change change, int64_t generations) {
  if (log == nullptr) return absl::OkStatus();
  change.generation = generation_limit + generations;
  DORAD_RETURN_IF_ERROR(log->Append(change));
  generation_limit = change.generation;
  return absl::OkStatus();
}

void AdapterRegistry::State::EndChange(After& after) {
  changing = false;
  for (const auto& [name, number] : released) Gone(*book.Find(name, number), after);
  released.clear();
}

void AdapterRegistry::State::Append(const std::vector<EventType>& types, const Version& version,
                                    After& after) {
  events.Append(types, version.record);
  after.notify = true;
}

void AdapterRegistry::State::FailLoad(Version& version, absl::Status reason, After& after) {
  version.record.state = AdapterState::kFailed;
  version.record.failure = std::move(reason);
  Append({EventType::kFailed}, version, after);
  book.Ended(version);
}

void AdapterRegistry::State::Gone(Version& version, After& after) {
  version.record.state = AdapterState::kGone;
  version.record.summary.resident_bytes = 0;
  after.freed.push_back({std::move(version.adapter), std::move(version.object)});
  Append({EventType::kGone}, version, after);
  book.Ended(version);
}

void AdapterRegistry::State::BeginRetiring(Version& version, After& after) {
  version.record.state = AdapterState::kRetiring;
  book.MakeInactive(version);
  Append({EventType::kRetired}, version, after);
  if (version.record.leases == 0) Gone(version, after);
}

absl::StatusOr<int64_t> AdapterRegistry::State::Reserve(const std::string& name,
                                                        std::optional<int64_t> version,
                                                        std::map<std::string, std::string> tags,
                                                        bool of_peer) {
  int64_t number = 0;
  {
    absl::MutexLock lock(&mu);
    DORAD_ASSIGN_OR_RETURN(number, book.FreeNumber(name, version, of_peer));
  }
  DORAD_RETURN_IF_ERROR(Log({.type = Change::Type::kReserved, .name = name, .version = number},
                            kGenerationsOfVersion));
  absl::MutexLock lock(&mu);
  book.ForgetIdleNames();
  book.NoteNumber(name, number);
  book.Vacate(name, number);
  AdapterRecord& record = book.Add(name, number).record;
  record.create_time = absl::Now();
  record.tags = std::move(tags);
  return number;
}

absl::StatusOr<int64_t> AdapterRegistry::State::Publish(
    std::shared_ptr<const LoadedAdapter> adapter, bool activate,
    std::optional<int64_t> expected_generation, const std::string& object, After& after) {
  Change change = {.name = adapter->name(), .version = adapter->version()};
  absl::Status status;
  {
    absl::MutexLock lock(&mu);
    const Version* version = book.Find(change.name, change.version);
    DORAD_CHECK(version != nullptr && version->record.state == AdapterState::kLoading);
    if (activate) status = CheckGeneration(expected_generation);
    change.stored.create_time = version->record.create_time;
    change.stored.tags = version->record.tags;
    BeginChange();
  }
  if (status.ok() && !object.empty()) {
    change.type = Change::Type::kPublished;
    change.stored.object = object;
    change.stored.digest = adapter->digest();
    change.stored.pinned = adapter->pinned();
    change.activate = activate;
    status = Log(std::move(change), 0);
  } else if (status.ok()) {
    // Durable, so that a restart neither reuses its number nor restores an earlier active version.
    change.type = activate ? Change::Type::kActivated : Change::Type::kServed;
    status = Log(std::move(change), 0);
  }
  absl::MutexLock lock(&mu);
  Version& version = *book.Find(adapter->name(), adapter->version());
  if (status.ok()) {
    version.record.durable = !object.empty();
    version.object = object;
    version.MakeReady(std::move(adapter));
    std::vector<EventType> types = {EventType::kPublished};
    if (activate) {
      book.MakeActive(version);
      types.push_back(EventType::kActivated);
    }
    Append(types, version, after);
  } else {
    FailLoad(version, status, after);
    after.freed.push_back({std::move(adapter), ""});
  }
  const int64_t reached = events.generation();
  EndChange(after);
  if (!status.ok()) return status;
  return reached;
}

absl::StatusOr<AdapterRegistry::Activation> AdapterRegistry::State::Activate(
    const std::string& name, int64_t number, std::optional<int64_t> expected_generation,
    After& after) {
  Activation activation;
  {
    absl::MutexLock lock(&mu);
    DORAD_ASSIGN_OR_RETURN(Version * version, book.ResolveReady({name, number}));
    DORAD_RETURN_IF_ERROR(CheckGeneration(expected_generation));
    activation.previous_version = book.ActiveOf(name);
    activation.adapter = version->record;
    activation.generation = events.generation();
    // With an expected generation it is a change all the same: of two such callers one must fail.
    if (activation.previous_version == number && !expected_generation) return activation;
    BeginChange();
  }
  const absl::Status logged =
      Log({.type = Change::Type::kActivated, .name = name, .version = number}, 1);
  absl::MutexLock lock(&mu);
  if (logged.ok()) {
    Version& version = *book.Find(name, number);
    book.MakeActive(version);
    Append({EventType::kActivated}, version, after);
    activation.adapter = version.record;
    activation.generation = events.generation();
  }
  EndChange(after);
  if (!logged.ok()) return logged;
  return activation;
}

absl::StatusOr<AdapterRegistry::Retirement> AdapterRegistry::State::Retire(const std::string& name,
                                                                           int64_t number,
                                                                           bool force,
                                                                           After& after) {
  bool outlives = false;
  {
    absl::MutexLock lock(&mu);
    DORAD_ASSIGN_OR_RETURN(const Version* version, book.ResolveRetirable({name, number}));
    // A restart drops other versions anyway.
    outlives = version->record.durable || version->record.active;
    BeginChange();
  }
  absl::Status logged;
  if (outlives) {
    logged = Log({.type = Change::Type::kRetired, .name = name, .version = number},
                 kGenerationsOfRetirement);
  }
  absl::MutexLock lock(&mu);
  Retirement retirement;
  if (logged.ok()) {
    Version& version = *book.Find(name, number);
    if (force && version.adapter != nullptr) version.adapter->Revoke();
    BeginRetiring(version, after);
    retirement.adapter = version.record;
    retirement.generation = events.generation();
  }
  EndChange(after);
  if (!logged.ok()) return logged;
  return retirement;
}

void AdapterRegistry::State::Finish(After after) {
  for (Garbage& garbage : after.freed) deferred_deletion.Free(std::move(garbage));
  if (after.notify) subscribers.Notify();
}

void AdapterRegistry::State::Release(const std::string& name, int64_t number) {
  After after;
  {
    absl::MutexLock lock(&mu);
    Version* version = book.Find(name, number);
    DORAD_CHECK(version != nullptr && version->record.leases > 0);
    --version->record.leases;
    --total_leases;
    if (version->record.state == AdapterState::kRetiring && version->record.leases == 0) {
      if (changing) {
        released.emplace_back(name, number);
      } else {
        Gone(*version, after);
      }
    }
  }
  Finish(std::move(after));
}

}  // namespace dorad::adapter
