#include "server/adapter/registry.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/base/check.h"
#include "server/base/error.h"

namespace dorad::adapter {
namespace {

// AdapterRef::Parse reads at most 18 digits.
constexpr int64_t kMaxVersion = 999'999'999'999'999'999;
// Names without any record are forgotten beyond this number of names.
constexpr size_t kMaxNames = 65536;

const char* NameOf(AdapterState state) {
  switch (state) {
    case AdapterState::kLoading:
      return "loading";
    case AdapterState::kReady:
      return "ready";
    case AdapterState::kRetiring:
      return "retiring";
    case AdapterState::kGone:
      return "gone";
    case AdapterState::kFailed:
      return "failed";
  }
  return "unknown";
}

absl::Status NotFound(const std::string& text) {
  return MakeError(absl::StatusCode::kNotFound, "ADAPTER_NOT_FOUND", text);
}

}  // namespace

struct AdapterRegistry::State : std::enable_shared_from_this<AdapterRegistry::State> {
  struct Version {
    AdapterRecord record;
    // From READY to GONE.
    std::shared_ptr<const LoadedAdapter> adapter;
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
  // What a change leaves to be done when the lock is released.
  struct After {
    std::shared_ptr<const LoadedAdapter> freed;
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

  absl::StatusOr<Version*> Resolve(const AdapterRef& ref) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    const auto it = names.find(ref.name);
    if (it == names.end() || it->second.versions.empty()) {
      return NotFound(absl::StrCat("there is no adapter named \"", ref.name, "\""));
    }
    const int64_t number = ref.version == 0 ? it->second.active : ref.version;
    if (number == 0) {
      return MakeError(absl::StatusCode::kNotFound, "ADAPTER_NO_ACTIVE_VERSION",
                       absl::StrCat("adapter \"", ref.name, "\" has no active version"));
    }
    const auto found = it->second.versions.find(number);
    if (found == it->second.versions.end()) {
      return NotFound(absl::StrCat("there is no adapter version ", ref.name, "@", number));
    }
    return &found->second;
  }

  absl::StatusOr<Version*> ResolveReady(const AdapterRef& ref) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    DORAD_ASSIGN_OR_RETURN(Version * version, Resolve(ref));
    const AdapterRecord& record = version->record;
    if (record.state != AdapterState::kReady) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "ADAPTER_NOT_READY",
                       absl::StrCat("adapter version ", record.name, "@", record.version, " is ",
                                    NameOf(record.state), ", not ready"));
    }
    return version;
  }

  absl::Status CheckGeneration(std::optional<int64_t> expected) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (!expected || *expected == generation) return absl::OkStatus();
    return MakeError(
        absl::StatusCode::kAborted, "GENERATION_MISMATCH",
        absl::StrCat("expected generation ", *expected, ", the registry is at ", generation));
  }

  // --- Changes.
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
    resident_bytes -= version.record.summary.resident_bytes;
    version.record.summary.resident_bytes = 0;
    after.freed = std::move(version.adapter);
    ++generation;
    Append(EventType::kGone, version, after);
    Ended(version);
  }

  // Notes a version that has come to its end; older such records are dropped.
  void Ended(const Version& version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    ended.emplace_back(version.record.name, version.record.version);
    while (ended.size() > static_cast<size_t>(options.max_ended_records)) {
      names[ended.front().first].versions.erase(ended.front().second);
      ended.pop_front();
    }
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
    if (after.freed != nullptr) Free(std::move(after.freed));
    if (after.notify) Notify();
  }

  void Free(std::shared_ptr<const LoadedAdapter> adapter) {
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
    auto cell = std::make_shared<std::shared_ptr<const LoadedAdapter>>(std::move(adapter));
    executor([cell] { cell->reset(); });
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
        Gone(*version, after);
      }
    }
    Finish(std::move(after));
  }

  const Options options;
  mutable absl::Mutex mu;
  std::map<std::string, Name> names ABSL_GUARDED_BY(mu);
  int64_t generation ABSL_GUARDED_BY(mu) = 0;
  int64_t forgotten_floor ABSL_GUARDED_BY(mu) = 0;
  std::deque<RegistryEvent> events ABSL_GUARDED_BY(mu);
  // The generation of the newest event that is not kept any more.
  int64_t compacted ABSL_GUARDED_BY(mu) = 0;
  std::deque<std::pair<std::string, int64_t>> ended ABSL_GUARDED_BY(mu);
  int64_t resident_bytes ABSL_GUARDED_BY(mu) = 0;
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

absl::StatusOr<int64_t> AdapterRegistry::Reserve(const std::string& name,
                                                 std::optional<int64_t> version,
                                                 std::map<std::string, std::string> tags) {
  if (!IsValidAdapterName(name)) {
    return MakeInvalid("name", {{"name", "ADAPTER_NAME_INVALID",
                                 "a name is [a-z0-9]([a-z0-9._-]{0,126}[a-z0-9])?"}});
  }
  absl::MutexLock lock(&state_->mu);
  const auto known = state_->names.find(name);
  const int64_t last =
      known == state_->names.end() ? state_->forgotten_floor : known->second.last_version;
  const int64_t number = version.value_or(last + 1);
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
                                                 std::optional<int64_t> expected_generation) {
  State::After after;
  absl::StatusOr<int64_t> result = 0;
  {
    absl::MutexLock lock(&state_->mu);
    State::Version* version = state_->Find(adapter->name(), adapter->version());
    DORAD_CHECK(version != nullptr && version->record.state == AdapterState::kLoading);
    const absl::Status current =
        activate ? state_->CheckGeneration(expected_generation) : absl::OkStatus();
    if (!current.ok()) {
      state_->FailLoad(*version, current, after);
      after.freed = std::move(adapter);
      result = current;
    } else {
      version->record.state = AdapterState::kReady;
      version->record.summary = adapter->summary();
      version->adapter = std::move(adapter);
      state_->resident_bytes += version->record.summary.resident_bytes;
      if (activate) state_->MakeActive(*version);
      result = ++state_->generation;
      state_->Append(EventType::kPublished, *version, after);
      if (activate) state_->Append(EventType::kActivated, *version, after);
    }
  }
  state_->Finish(std::move(after));
  return result;
}

void AdapterRegistry::Fail(const std::string& name, int64_t version, absl::Status reason) {
  DORAD_CHECK(!reason.ok());
  State::After after;
  {
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
  Activation activation;
  {
    absl::MutexLock lock(&state_->mu);
    DORAD_ASSIGN_OR_RETURN(State::Version * found, state_->ResolveReady({name, version}));
    DORAD_RETURN_IF_ERROR(state_->CheckGeneration(expected_generation));
    activation.previous_version = state_->names[name].active;
    if (activation.previous_version != version) {
      state_->MakeActive(*found);
      ++state_->generation;
      state_->Append(EventType::kActivated, *found, after);
    }
    activation.adapter = found->record;
    activation.generation = state_->generation;
  }
  state_->Finish(std::move(after));
  return activation;
}

absl::StatusOr<AdapterRegistry::Retirement> AdapterRegistry::Retire(const std::string& name,
                                                                    int64_t version) {
  if (version < 1) return NotFound(absl::StrCat("there is no version ", version));
  State::After after;
  Retirement retirement;
  {
    absl::MutexLock lock(&state_->mu);
    DORAD_ASSIGN_OR_RETURN(State::Version * found, state_->ResolveReady({name, version}));
    found->record.state = AdapterState::kRetiring;
    if (found->record.active) {
      found->record.active = false;
      state_->names[name].active = 0;
    }
    ++state_->generation;
    state_->Append(EventType::kRetired, *found, after);
    if (found->record.leases == 0) state_->Gone(*found, after);
    retirement.adapter = found->record;
    retirement.generation = state_->generation;
  }
  state_->Finish(std::move(after));
  return retirement;
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
  return version->record;
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
      records.push_back(version->second.record);
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

int64_t AdapterRegistry::resident_bytes() const {
  absl::MutexLock lock(&state_->mu);
  return state_->resident_bytes;
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
