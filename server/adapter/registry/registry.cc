#include "server/adapter/registry/registry.h"

#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/adapter/registry/registry_state.h"
#include "server/platform/check.h"
#include "server/platform/error.h"
#include "server/platform/exception.h"

namespace dorad::adapter {
namespace {

absl::Status NotFound(const std::string& text) {
  return MakeError(absl::StatusCode::kNotFound, "ADAPTER_NOT_FOUND", text);
}

}  // namespace

AdapterRegistry::AdapterRegistry(Options options) {
  DORAD_CHECK(options.executor != nullptr);
  state_ = std::make_shared<State>(std::move(options));
}

AdapterRegistry::~AdapterRegistry() {
  state_->subscribers.Clear();
  state_->deferred_deletion.Close();
}

void AdapterRegistry::Restore(const StoredState& stored, const LoadStored& load) {
  struct Load {
    absl::StatusOr<std::shared_ptr<const LoadedAdapter>> adapter = nullptr;
    absl::Notification done;
  };
  absl::MutexLock change(&state_->change_mu);
  DORAD_CHECK(state_->log != nullptr);
  state_->generation_limit = stored.generation;
  {
    absl::MutexLock lock(&state_->mu);
    DORAD_CHECK(state_->book.empty());
    state_->events.ContinueAfter(stored.generation);
    state_->book.NoteForgotten(stored.floor);
  }
  std::deque<Load> loads;  // in the order of `stored`; each outlives its task
  for (const auto& [name, entry] : stored.names) {
    for (const auto& [number, kept] : entry.versions) {
      state_->executor(
          [&load, &to = loads.emplace_back(), &name = name, number = number, &kept = kept] {
            try {
              to.adapter = load(name, number, kept);
            } catch (...) {  // Restore waits for every load
              to.adapter = StatusOfException("the load of adapter " + name, "INTERNAL");
            }
            to.done.Notify();
          });
    }
  }
  auto next = loads.begin();
  for (const auto& [name, entry] : stored.names) {
    {
      absl::MutexLock lock(&state_->mu);
      state_->book.NoteNumber(name, entry.last_version);
      state_->book.NoteServed(name, entry.last_served);
    }
    for (const auto& [number, kept] : entry.versions) {
      // Waits without mu: readers must not wait for a load.
      Load& loaded = *next++;
      loaded.done.WaitForNotification();
      const absl::StatusOr<std::shared_ptr<const LoadedAdapter>> adapter =
          std::move(loaded.adapter);
      absl::MutexLock lock(&state_->mu);
      State::Version& version = state_->book.Add(name, number);
      AdapterRecord& record = version.record;
      record.durable = true;
      record.create_time = kept.create_time;
      record.tags = kept.tags;
      version.object = kept.object;
      if (!adapter.ok()) {
        record.state = AdapterState::kFailed;
        record.failure = adapter.status();
        record.summary.digest = kept.digest;
        continue;
      }
      version.MakeReady(*adapter);
      if (number == entry.active) state_->book.MakeActive(version);
    }
  }
}

absl::StatusOr<int64_t> AdapterRegistry::Reserve(const std::string& name,
                                                 std::optional<int64_t> version,
                                                 std::map<std::string, std::string> tags,
                                                 bool of_peer) {
  DORAD_RETURN_IF_ERROR(CheckAdapterName(name));
  absl::MutexLock change(&state_->change_mu);
  return state_->Reserve(name, version, std::move(tags), of_peer);
}

absl::StatusOr<std::string> AdapterRegistry::ObjectOf(const AdapterRef& ref) const {
  absl::MutexLock lock(&state_->mu);
  DORAD_ASSIGN_OR_RETURN(const State::Version* version, state_->book.ResolveReady(ref));
  return version->object;
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
    State::Version* found = state_->book.Find(name, version);
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
                                                                    int64_t version, bool force) {
  if (version < 1) return NotFound(absl::StrCat("there is no version ", version));
  State::After after;
  absl::StatusOr<Retirement> retirement = Retirement();
  {
    absl::MutexLock change(&state_->change_mu);
    retirement = state_->Retire(name, version, force, after);
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
        const State::Version* const version = state_->book.OldestBeyond(name, keep);
        if (version == nullptr) return retired;
        oldest = version->record.version;
      }
      status = state_->Retire(name, oldest, /*force=*/false, after).status();
    }
    state_->Finish(std::move(after));
    if (!status.ok()) return status;
  }
}

absl::StatusOr<AdapterLease> AdapterRegistry::Acquire(const AdapterRef& ref) {
  if (ref.is_base()) return AdapterLease();
  absl::MutexLock lock(&state_->mu);
  DORAD_ASSIGN_OR_RETURN(State::Version * version, state_->book.ResolveReady(ref));
  ++version->record.leases;
  ++state_->total_leases;
  return AdapterLease(version->adapter,
                      [state = state_, name = ref.name, number = version->record.version] {
                        state->Release(name, number);
                      });
}

absl::StatusOr<AdapterRecord> AdapterRegistry::Get(const AdapterRef& ref) const {
  absl::MutexLock lock(&state_->mu);
  DORAD_ASSIGN_OR_RETURN(State::Version * version, state_->book.Resolve(ref));
  return version->Copy();
}

absl::Status AdapterRegistry::CheckExists(const AdapterRef& ref) const {
  if (ref.is_base()) return absl::OkStatus();
  absl::Status status = Get(ref).status();
  return ReasonOf(status) == "ADAPTER_NOT_FOUND" ? status : absl::OkStatus();
}

std::vector<AdapterRecord> AdapterRegistry::List(const std::string& name,
                                                 const std::string& after_name,
                                                 int64_t after_version, int limit) const {
  absl::MutexLock lock(&state_->mu);
  return state_->book.List(name, after_name, after_version, limit);
}

VersionTotals AdapterRegistry::Totals() const {
  absl::MutexLock lock(&state_->mu);
  return state_->book.Totals();
}

int64_t AdapterRegistry::generation() const {
  absl::MutexLock lock(&state_->mu);
  return state_->events.generation();
}

int AdapterRegistry::total_leases() const {
  absl::MutexLock lock(&state_->mu);
  return state_->total_leases;
}

absl::StatusOr<std::vector<RegistryEvent>> AdapterRegistry::EventsAfter(int64_t generation,
                                                                        int limit) const {
  absl::MutexLock lock(&state_->mu);
  return state_->events.After(generation, limit);
}

int64_t AdapterRegistry::Subscribe(std::function<void()> on_event) {
  return state_->subscribers.Add(std::move(on_event));
}

void AdapterRegistry::Unsubscribe(int64_t id) { state_->subscribers.Remove(id); }

}  // namespace dorad::adapter
