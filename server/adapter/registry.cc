#include "server/adapter/registry.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/adapter/registry_errors.h"
#include "server/base/check.h"
#include "server/base/error.h"

namespace dorad::adapter {
namespace {

// AdapterRef::Parse reads at most 18 digits.
constexpr int64_t kMaxVersion = 999'999'999'999'999'999;
// Names without any record are forgotten beyond this number of names.
constexpr size_t kMaxNames = 65536;
// Generations that a version's own life can take: published or failed, retired, gone.
constexpr int64_t kGenerationsOfVersion = 3;
constexpr int64_t kGenerationsOfRetirement = 2;

// Names before and after an unknown one that are looked at for what was meant.
constexpr int kNearbyNames = 64;

absl::Status NotFound(const std::string& text) {
  return MakeError(absl::StatusCode::kNotFound, "ADAPTER_NOT_FOUND", text);
}

}  // namespace

struct AdapterRegistry::State : std::enable_shared_from_this<AdapterRegistry::State> {
  struct Version {
    AdapterRecord record;
    // From READY to GONE.
    std::shared_ptr<const LoadedAdapter> adapter;
    std::string object;  // of a durable version, to GONE

    AdapterRecord Copy() const {
      AdapterRecord copy = record;
      copy.resident = adapter != nullptr && adapter->resident();
      copy.in_host_memory = adapter != nullptr && adapter->in_host_memory();
      return copy;
    }
  };
  struct Name {
    std::map<int64_t, Version> versions;
    int64_t last_version = 0;
    int64_t active = 0;
  };
  struct Subscriber {
    std::function<void()> on_event;
    int running = 0;
  };
  // What a version leaves at its end.
  struct Remains {
    std::shared_ptr<const LoadedAdapter> adapter;
    std::string object;
  };
  // What a change leaves to be done when the locks are released.
  struct After {
    std::vector<Remains> freed;
    bool notify = false;
  };

  explicit State(Options opts) : options(std::move(opts)) {}

  // --- Lookups.
  Version* Find(const std::string& name, int64_t version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    const auto it = names.find(name);
    if (it == names.end()) return nullptr;
    const auto found = it->second.versions.find(version);
    return found == it->second.versions.end() ? nullptr : &found->second;
  }

  // Ascending, at most kListedVersions.
  static std::vector<int64_t> NewestReady(const Name& name) {
    std::vector<int64_t> ready;
    for (auto it = name.versions.rbegin(); it != name.versions.rend(); ++it) {
      if (ready.size() >= kListedVersions) break;
      if (it->second.record.state == AdapterState::kReady) ready.push_back(it->first);
    }
    std::reverse(ready.begin(), ready.end());
    return ready;
  }

  // Names with a READY version, next to an unknown one in their order.
  std::vector<std::string> NamesAround(const std::string& unknown) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    auto it = names.lower_bound(unknown);
    for (int i = 0; i < kNearbyNames && it != names.begin(); ++i) --it;
    std::vector<std::string> around;
    for (int i = 0; i < 2 * kNearbyNames && it != names.end(); ++i, ++it) {
      if (!NewestReady(it->second).empty()) around.push_back(it->first);
    }
    return around;
  }

  absl::StatusOr<Version*> Resolve(const AdapterRef& ref) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    const auto it = names.find(ref.name);
    if (it == names.end() || it->second.versions.empty()) {
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
    return &found->second;
  }

  absl::StatusOr<Version*> ResolveReady(const AdapterRef& ref) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    DORAD_ASSIGN_OR_RETURN(Version * version, Resolve(ref));
    if (version->record.state != AdapterState::kReady) return NotReady(version->record);
    return version;
  }

  // READY, or not restored: nothing else can be done with such a one.
  absl::StatusOr<Version*> ResolveRetirable(const AdapterRef& ref)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    DORAD_ASSIGN_OR_RETURN(Version * version, Resolve(ref));
    const AdapterRecord& record = version->record;
    if (record.durable && record.state == AdapterState::kFailed) return version;
    return ResolveReady(ref);
  }

  absl::Status CheckGeneration(std::optional<int64_t> expected) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (!expected || *expected == generation) return absl::OkStatus();
    return GenerationMismatch(*expected, generation);
  }

  // --- Changes. Each checks, becomes durable (under change_mu alone, so that readers do not wait
  // for the disk) and is applied; what has been checked still holds then, because nobody else
  // changes anything and generations stand still meanwhile.

  void BeginChange() ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu, mu) { changing = true; }

  // Takes up to `generations` more of them.
  absl::Status Log(Change change, int64_t generations) ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu) {
    if (options.log == nullptr) return absl::OkStatus();
    change.generation = generation_limit + generations;
    DORAD_RETURN_IF_ERROR(options.log->Append(change));
    generation_limit = change.generation;
    return absl::OkStatus();
  }

  void EndChange(After& after) ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu, mu) {
    changing = false;
    for (const auto& [name, number] : released) Gone(*Find(name, number), after);
    released.clear();
  }

  void Append(EventType type, const Version& version, After& after)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    events.push_back({generation, type, version.record});
    while (events.size() > static_cast<size_t>(options.max_events)) {
      compacted = events.front().generation;
      events.pop_front();
    }
    after.notify = true;
  }

  void MakeActive(Version& version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    Name& name = names[version.record.name];
    if (Version* previous = Find(version.record.name, name.active)) previous->record.active = false;
    name.active = version.record.version;
    version.record.active = true;
  }

  void MakeReady(Version& version, std::shared_ptr<const LoadedAdapter> adapter)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    version.record.state = AdapterState::kReady;
    version.record.summary = adapter->summary();
    version.adapter = std::move(adapter);
  }

  void FailLoad(Version& version, absl::Status reason, After& after)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    version.record.state = AdapterState::kFailed;
    version.record.failure = std::move(reason);
    ++generation;
    Append(EventType::kFailed, version, after);
    Ended(version);
  }

  void Gone(Version& version, After& after) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    version.record.state = AdapterState::kGone;
    version.record.summary.resident_bytes = 0;
    after.freed.push_back({std::move(version.adapter), std::move(version.object)});
    ++generation;
    Append(EventType::kGone, version, after);
    Ended(version);
  }

  // READY -> RETIRING, -> GONE without leases.
  void Withdraw(Version& version, After& after) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    version.record.state = AdapterState::kRetiring;
    if (version.record.active) {
      version.record.active = false;
      names[version.record.name].active = 0;
    }
    ++generation;
    Append(EventType::kRetired, version, after);
    if (version.record.leases == 0) Gone(version, after);
  }

  // The oldest READY version of the name that is not active and not among the newest `keep` READY
  // ones; nullptr: there is none.
  Version* OldestBeyond(const std::string& name, int64_t keep) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    const auto it = names.find(name);
    if (it == names.end()) return nullptr;
    Version* oldest = nullptr;
    int64_t newer = 0;
    for (auto version = it->second.versions.rbegin(); version != it->second.versions.rend();
         ++version) {
      const AdapterRecord& record = version->second.record;
      if (record.state != AdapterState::kReady || ++newer <= keep) continue;
      if (!record.active) oldest = &version->second;
    }
    return oldest;
  }

  // Notes a version that has come to its end; older such records are dropped.
  void Ended(const Version& version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    ended.emplace_back(version.record.name, version.record.version);
    while (ended.size() > static_cast<size_t>(options.max_ended_records)) {
      names[ended.front().first].versions.erase(ended.front().second);
      ended.pop_front();
    }
  }

  // The number that a load may take: `wanted`, or the next one.
  absl::StatusOr<int64_t> FreeNumber(const std::string& name, std::optional<int64_t> wanted)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    const auto known = names.find(name);
    const int64_t last = known == names.end() ? forgotten_floor : known->second.last_version;
    const int64_t number = wanted.value_or(last + 1);
    if (number < 1 || number > kMaxVersion) {
      return MakeInvalid(
          "version", {{"version", "ADAPTER_VERSION_INVALID",
                       absl::StrCat("version ", number, " is not within [1, ", kMaxVersion, "]")}});
    }
    if (number <= last) {
      return MakeError(absl::StatusCode::kAborted, "ADAPTER_VERSION_TAKEN",
                       absl::StrCat("version ", number, " of \"", name, "\" is not above ", last,
                                    ", the highest one so far"));
    }
    return number;
  }

  absl::StatusOr<int64_t> Publish(std::shared_ptr<const LoadedAdapter> adapter, bool activate,
                                  std::optional<int64_t> expected_generation,
                                  const std::string& object, After& after)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu) ABSL_LOCKS_EXCLUDED(mu) {
    Change change = {.name = adapter->name(), .version = adapter->version()};
    absl::Status status;
    {
      absl::MutexLock lock(&mu);
      const Version* version = Find(change.name, change.version);
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
    } else if (status.ok() && activate) {
      // An earlier version must not be active again after a restart.
      status = Log({.type = Change::Type::kActivated,
                    .name = adapter->name(),
                    .version = adapter->version()},
                   0);
    }
    absl::MutexLock lock(&mu);
    Version& version = *Find(adapter->name(), adapter->version());
    if (status.ok()) {
      version.record.durable = !object.empty();
      version.object = object;
      MakeReady(version, std::move(adapter));
      if (activate) MakeActive(version);
      ++generation;
      Append(EventType::kPublished, version, after);
      if (activate) Append(EventType::kActivated, version, after);
    } else {
      FailLoad(version, status, after);
      after.freed.push_back({std::move(adapter), ""});
    }
    const int64_t reached = generation;
    EndChange(after);
    if (!status.ok()) return status;
    return reached;
  }

  absl::StatusOr<Activation> Activate(const std::string& name, int64_t number,
                                      std::optional<int64_t> expected_generation, After& after)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu) ABSL_LOCKS_EXCLUDED(mu) {
    Activation activation;
    {
      absl::MutexLock lock(&mu);
      DORAD_ASSIGN_OR_RETURN(Version * version, ResolveReady({name, number}));
      DORAD_RETURN_IF_ERROR(CheckGeneration(expected_generation));
      activation.previous_version = names[name].active;
      activation.adapter = version->record;
      activation.generation = generation;
      if (activation.previous_version == number) return activation;
      BeginChange();
    }
    const absl::Status logged =
        Log({.type = Change::Type::kActivated, .name = name, .version = number}, 1);
    absl::MutexLock lock(&mu);
    if (logged.ok()) {
      Version& version = *Find(name, number);
      MakeActive(version);
      ++generation;
      Append(EventType::kActivated, version, after);
      activation.adapter = version.record;
      activation.generation = generation;
    }
    EndChange(after);
    if (!logged.ok()) return logged;
    return activation;
  }

  absl::StatusOr<Retirement> Retire(const std::string& name, int64_t number, After& after)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu) ABSL_LOCKS_EXCLUDED(mu) {
    bool outlives = false;
    {
      absl::MutexLock lock(&mu);
      DORAD_ASSIGN_OR_RETURN(const Version* version, ResolveRetirable({name, number}));
      // Of others a restart leaves nothing anyway.
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
      Version& version = *Find(name, number);
      Withdraw(version, after);
      retirement.adapter = version.record;
      retirement.generation = generation;
    }
    EndChange(after);
    if (!logged.ok()) return logged;
    return retirement;
  }

  // A forgotten name may come back; it then starts above every number that was ever forgotten.
  void ForgetIdleNames() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (names.size() < kMaxNames) return;
    for (auto it = names.begin(); it != names.end();) {
      if (it->second.versions.empty()) {
        forgotten_floor = std::max(forgotten_floor, it->second.last_version);
        it = names.erase(it);
      } else {
        ++it;
      }
    }
  }

  // Hands memory to the executor and wakes subscribers, under no lock.
  void Finish(After after) {
    for (Remains& remains : after.freed) Free(std::move(remains));
    if (after.notify) Notify();
  }

  void Free(Remains remains) {
    std::function<void(std::function<void()>)> executor;
    {
      absl::MutexLock lock(&mu);
      if (!closed) {
        executor = options.executor;
        ++posting;
      }
    }
    if (!executor) return;  // the registry is gone, and with it perhaps the executor's threads
    // std::function wants a copyable task, and a copy that outlives the run would free on the wrong
    // thread: the task empties a shared cell instead.
    auto cell = std::make_shared<Remains>(std::move(remains));
    executor([cell, log = options.log] {
      cell->adapter.reset();
      if (!cell->object.empty()) log->Drop(cell->object);
    });
    absl::MutexLock lock(&mu);
    --posting;
  }

  void Notify() {
    std::vector<std::shared_ptr<Subscriber>> called;
    {
      absl::MutexLock lock(&mu);
      for (const auto& [id, subscriber] : subscribers) {
        ++subscriber->running;
        called.push_back(subscriber);
      }
    }
    for (const auto& subscriber : called) subscriber->on_event();
    absl::MutexLock lock(&mu);
    for (const auto& subscriber : called) --subscriber->running;
  }

  void Release(const std::string& name, int64_t number) {
    After after;
    {
      absl::MutexLock lock(&mu);
      Version* version = Find(name, number);
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

  const Options options;
  // Held through a whole change; taken before mu.
  absl::Mutex change_mu;
  // No greater one is given out before another change is durable.
  int64_t generation_limit ABSL_GUARDED_BY(change_mu) = 0;
  mutable absl::Mutex mu;
  bool changing ABSL_GUARDED_BY(mu) = false;
  // RETIRING versions whose last lease ended during a change.
  std::vector<std::pair<std::string, int64_t>> released ABSL_GUARDED_BY(mu);
  std::map<std::string, Name> names ABSL_GUARDED_BY(mu);
  int64_t generation ABSL_GUARDED_BY(mu) = 0;
  int64_t forgotten_floor ABSL_GUARDED_BY(mu) = 0;
  std::deque<RegistryEvent> events ABSL_GUARDED_BY(mu);
  // The generation of the newest event that is not kept any more.
  int64_t compacted ABSL_GUARDED_BY(mu) = 0;
  std::deque<std::pair<std::string, int64_t>> ended ABSL_GUARDED_BY(mu);
  int total_leases ABSL_GUARDED_BY(mu) = 0;
  std::map<int64_t, std::shared_ptr<Subscriber>> subscribers ABSL_GUARDED_BY(mu);
  int64_t next_subscriber ABSL_GUARDED_BY(mu) = 1;
  int posting ABSL_GUARDED_BY(mu) = 0;  // calls of the executor that are running
  bool closed ABSL_GUARDED_BY(mu) = false;
};

AdapterRegistry::AdapterRegistry(Options options)
    : state_(std::make_shared<State>(std::move(options))) {
  DORAD_CHECK(state_->options.executor != nullptr);
  DORAD_CHECK(state_->options.max_events >= 1 && state_->options.max_ended_records >= 1);
}

AdapterRegistry::~AdapterRegistry() {
  absl::MutexLock lock(&state_->mu);
  state_->closed = true;
  state_->subscribers.clear();
  State* state = state_.get();
  const auto idle = [state]()
                        ABSL_EXCLUSIVE_LOCKS_REQUIRED(state->mu) { return state->posting == 0; };
  state_->mu.Await(absl::Condition(&idle));
}

void AdapterRegistry::Restore(const StoredState& stored, const LoadStored& load) {
  absl::MutexLock change(&state_->change_mu);
  DORAD_CHECK(state_->options.log != nullptr);
  state_->generation_limit = stored.generation;
  {
    absl::MutexLock lock(&state_->mu);
    DORAD_CHECK(state_->names.empty() && state_->generation == 0);
    state_->generation = state_->compacted = stored.generation;
  }
  for (const auto& [name, entry] : stored.names) {
    {
      absl::MutexLock lock(&state_->mu);
      state_->names[name].last_version = entry.last_version;
    }
    for (const auto& [number, kept] : entry.versions) {
      // Takes its time: others may look at the registry meanwhile.
      const absl::StatusOr<std::shared_ptr<const LoadedAdapter>> adapter = load(name, number, kept);
      absl::MutexLock lock(&state_->mu);
      State::Version& version = state_->names[name].versions[number];
      AdapterRecord& record = version.record;
      record.name = name;
      record.version = number;
      record.durable = true;
      record.create_time = kept.create_time;
      record.tags = kept.tags;
      version.object = kept.object;
      if (!adapter.ok()) {
        record.state = AdapterState::kFailed;
        record.failure = adapter.status();
        continue;
      }
      state_->MakeReady(version, *adapter);
      if (number == entry.active) state_->MakeActive(version);
    }
  }
}

absl::StatusOr<int64_t> AdapterRegistry::Reserve(const std::string& name,
                                                 std::optional<int64_t> version,
                                                 std::map<std::string, std::string> tags) {
  if (!IsValidAdapterName(name)) {
    return MakeInvalid("name", {{"name", "ADAPTER_NAME_INVALID",
                                 "a name is [a-z0-9]([a-z0-9._-]{0,126}[a-z0-9])?"}});
  }
  absl::MutexLock change(&state_->change_mu);
  int64_t number = 0;
  {
    absl::MutexLock lock(&state_->mu);
    DORAD_ASSIGN_OR_RETURN(number, state_->FreeNumber(name, version));
  }
  DORAD_RETURN_IF_ERROR(state_->Log(
      {.type = Change::Type::kReserved, .name = name, .version = number}, kGenerationsOfVersion));
  absl::MutexLock lock(&state_->mu);
  state_->ForgetIdleNames();
  State::Name& entry = state_->names[name];
  entry.last_version = number;
  AdapterRecord& record = entry.versions[number].record;
  record.name = name;
  record.version = number;
  record.create_time = absl::Now();
  record.tags = std::move(tags);
  return number;
}

absl::StatusOr<int64_t> AdapterRegistry::Publish(std::shared_ptr<const LoadedAdapter> adapter,
                                                 bool activate,
                                                 std::optional<int64_t> expected_generation,
                                                 const std::string& object) {
  State::After after;
  absl::StatusOr<int64_t> generation = 0;
  {
    absl::MutexLock change(&state_->change_mu);
    generation = state_->Publish(std::move(adapter), activate, expected_generation, object, after);
  }
  state_->Finish(std::move(after));
  return generation;
}

void AdapterRegistry::Fail(const std::string& name, int64_t version, absl::Status reason) {
  DORAD_CHECK(!reason.ok());
  State::After after;
  {
    absl::MutexLock change(&state_->change_mu);
    absl::MutexLock lock(&state_->mu);
    State::Version* found = state_->Find(name, version);
    DORAD_CHECK(found != nullptr && found->record.state == AdapterState::kLoading);
    state_->FailLoad(*found, std::move(reason), after);
  }
  state_->Finish(std::move(after));
}

absl::StatusOr<AdapterRegistry::Activation> AdapterRegistry::Activate(
    const std::string& name, int64_t version, std::optional<int64_t> expected_generation) {
  if (version < 1) return NotFound(absl::StrCat("there is no version ", version));
  State::After after;
  absl::StatusOr<Activation> activation = Activation();
  {
    absl::MutexLock change(&state_->change_mu);
    activation = state_->Activate(name, version, expected_generation, after);
  }
  state_->Finish(std::move(after));
  return activation;
}

absl::StatusOr<AdapterRegistry::Retirement> AdapterRegistry::Retire(const std::string& name,
                                                                    int64_t version) {
  if (version < 1) return NotFound(absl::StrCat("there is no version ", version));
  State::After after;
  absl::StatusOr<Retirement> retirement = Retirement();
  {
    absl::MutexLock change(&state_->change_mu);
    retirement = state_->Retire(name, version, after);
  }
  state_->Finish(std::move(after));
  return retirement;
}

absl::StatusOr<int> AdapterRegistry::RetireOlder(const std::string& name, int64_t keep) {
  for (int retired = 0;; ++retired) {
    State::After after;
    absl::Status status;
    {
      absl::MutexLock change(&state_->change_mu);
      int64_t oldest = 0;
      {
        absl::MutexLock lock(&state_->mu);
        const State::Version* const version = state_->OldestBeyond(name, keep);
        if (version == nullptr) return retired;
        oldest = version->record.version;
      }
      status = state_->Retire(name, oldest, after).status();
    }
    state_->Finish(std::move(after));
    if (!status.ok()) return status;
  }
}

absl::StatusOr<AdapterLease> AdapterRegistry::Acquire(const AdapterRef& ref) {
  if (ref.is_base()) return AdapterLease();
  absl::MutexLock lock(&state_->mu);
  DORAD_ASSIGN_OR_RETURN(State::Version * version, state_->ResolveReady(ref));
  ++version->record.leases;
  ++state_->total_leases;
  return AdapterLease(version->adapter,
                      [state = state_, name = ref.name, number = version->record.version] {
                        state->Release(name, number);
                      });
}

absl::StatusOr<AdapterRecord> AdapterRegistry::Get(const AdapterRef& ref) const {
  absl::MutexLock lock(&state_->mu);
  DORAD_ASSIGN_OR_RETURN(State::Version * version, state_->Resolve(ref));
  return version->Copy();
}

std::vector<AdapterRecord> AdapterRegistry::List(const std::string& name,
                                                 const std::string& after_name,
                                                 int64_t after_version, int limit) const {
  std::vector<AdapterRecord> records;
  absl::MutexLock lock(&state_->mu);
  for (auto it = state_->names.lower_bound(std::max(name, after_name));
       it != state_->names.end() && (name.empty() || it->first == name); ++it) {
    const std::map<int64_t, State::Version>& versions = it->second.versions;
    auto version = it->first == after_name ? versions.upper_bound(after_version) : versions.begin();
    for (; version != versions.end(); ++version) {
      if (records.size() >= static_cast<size_t>(std::max(limit, 0))) return records;
      records.push_back(version->second.Copy());
    }
  }
  return records;
}

int64_t AdapterRegistry::generation() const {
  absl::MutexLock lock(&state_->mu);
  return state_->generation;
}

int AdapterRegistry::total_leases() const {
  absl::MutexLock lock(&state_->mu);
  return state_->total_leases;
}

absl::StatusOr<std::vector<RegistryEvent>> AdapterRegistry::EventsAfter(int64_t generation,
                                                                        int limit) const {
  absl::MutexLock lock(&state_->mu);
  if (generation > state_->generation) {
    return MakeError(absl::StatusCode::kOutOfRange, "GENERATION_UNKNOWN",
                     absl::StrCat("generation ", generation,
                                  " has not been reached; the registry "
                                  "is at ",
                                  state_->generation));
  }
  if (generation < state_->compacted) {
    return MakeError(
        absl::StatusCode::kOutOfRange, "GENERATION_COMPACTED",
        absl::StrCat("events after generation ", generation,
                     " are no longer kept; the oldest can be read after ", state_->compacted));
  }
  std::vector<RegistryEvent> events;
  const auto first = std::partition_point(
      state_->events.begin(), state_->events.end(),
      [generation](const RegistryEvent& event) { return event.generation <= generation; });
  for (auto it = first; it != state_->events.end(); ++it) {
    const bool full = events.size() >= static_cast<size_t>(std::max(limit, 1));
    if (full && events.back().generation != it->generation) break;
    events.push_back(*it);
  }
  return events;
}

int64_t AdapterRegistry::Subscribe(std::function<void()> on_event) {
  absl::MutexLock lock(&state_->mu);
  auto subscriber = std::make_shared<State::Subscriber>();
  subscriber->on_event = std::move(on_event);
  state_->subscribers[state_->next_subscriber] = std::move(subscriber);
  return state_->next_subscriber++;
}

void AdapterRegistry::Unsubscribe(int64_t id) {
  absl::MutexLock lock(&state_->mu);
  const auto it = state_->subscribers.find(id);
  if (it == state_->subscribers.end()) return;
  const std::shared_ptr<State::Subscriber> subscriber = it->second;
  state_->subscribers.erase(it);
  const auto idle = [&subscriber]() { return subscriber->running == 0; };
  state_->mu.Await(absl::Condition(&idle));
}

}  // namespace dorad::adapter
