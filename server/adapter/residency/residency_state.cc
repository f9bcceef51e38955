#include "server/adapter/residency/residency_state.h"

#include <algorithm>
#include <utility>

#include "server/platform/exception.h"

namespace dorad::adapter {
namespace {

constexpr absl::Duration kAskAgain = absl::Milliseconds(20);

}  // namespace

Residency::State::State(Options opts)
    : options(std::move(opts)),
      host_capacity(options.host_copies == nullptr ? 0 : options.host_copies->capacity_bytes()) {}

void Residency::State::Want(Record* record) {
  if (record->wanted) return;
  record->wanted = true;
  record->wanted_since = options.now();
  wanted.push_back(record);
}

void Residency::State::Unwant(Record* record) {
  if (!std::exchange(record->wanted, false)) return;
  wanted.erase(std::find(wanted.begin(), wanted.end(), record));
}

void Residency::State::StopDraining(Record* record) {
  if (!std::exchange(record->draining, false)) return;
  draining.erase(std::find(draining.begin(), draining.end(), record));
}

void Residency::State::LoadWanted() {
  if (asleep || suspended) return;
  for (auto it = wanted.begin(); it != wanted.end() && !closed;) {
    Record* const record = *it;
    if (NeverFit({&record, 1})) {
      record->wanted = false;  // there will be no room; who asks is told
      it = wanted.erase(it);
      continue;
    }
    if (record->place != Place::kAway) {  // draining or evicting: it goes before it comes again
      ++it;
      continue;
    }
    // Others take the room of its host copy only if there is no other way.
    if (MakeRoom(record->bytes, /*spared=*/record) || MakeRoom(record->bytes)) {
      BeginLoad(record);
    } else {
      if (!IsStuck()) break;
      record->failure = NoRoomFor(record->bytes);
    }
    record->wanted = false;
    it = wanted.erase(it);
  }
  Drain();
}

void Residency::State::BeginLoad(Record* record) {
  record->place = Place::kLoading;
  lists.Update(record);
  ++under_way;
  options.executor([state = shared_from_this(), target = record->shared_from_this()] {
    state->EvictQueued();
    bool from_host = false;
    {
      absl::MutexLock lock(&state->mu);
      // Taken back since, and perhaps sent for once more.
      if (target->place != Place::kLoading || target->load_begun) {
        --state->under_way;
        return;
      }
      target->load_begun = true;
      ++state->loading_;
      from_host = target->host_copy != nullptr;
    }
    state->EndLoad(target, from_host, state->Load(*target, from_host));
  });
}

// Weights that are being loaded keep their host copy and their reload. The callers that want them
// are owed an answer, so an exception becomes a status.
absl::StatusOr<std::shared_ptr<const AdapterWeights>> Residency::State::Load(const Record& record,
                                                                             bool from_host) {
  try {
    if (!from_host) return record.reload();
    absl::StatusOr<std::shared_ptr<const AdapterWeights>> restored = nullptr;
    (void)WithRoom([&] {
      restored = options.host_copies->Restore(*record.host_copy);
      return restored.status();
    });
    return restored;
  } catch (...) {
    return StatusOfException("the load of an adapter's weights", "INTERNAL_ERROR");
  }
}

void Residency::State::EndLoad(const RecordPtr& record, bool from_host,
                               absl::StatusOr<std::shared_ptr<const AdapterWeights>> loaded) {
  std::shared_ptr<const AdapterWeights> unwanted;  // freed under no lock
  {
    absl::MutexLock lock(&mu);
    record->load_begun = false;
    --loading_;
    if (loaded.ok() && !record->destroyed) {
      record->weights = *std::move(loaded);
      record->place = Place::kResident;
      record->loaded = record->last_use = ++clock;
      record->kept_until = options.now() + options.patience;
      ++(from_host ? loads_from_host : loads_from_store);
    } else {
      if (loaded.ok()) unwanted = *std::move(loaded);
      record->failure = loaded.status();
      record->place = Place::kAway;
      if (record->destroyed) DropCopy(record.get());
    }
    lists.Update(record.get());
    LoadWanted();
  }
  FreeDropped();
  unwanted = nullptr;
  absl::MutexLock lock(&mu);
  --under_way;
}

absl::Status Residency::State::Wake() {
  absl::MutexLock lock(&mu);
  asleep = false;
  std::vector<RecordPtr> permanent;
  for (const RecordList* list : {&lists.loading(), &lists.evicting(), &lists.away()}) {
    for (Record* record : list->all()) {
      if (!record->permanent || record->destroyed) continue;
      permanent.push_back(record->shared_from_this());
      record->failure = absl::OkStatus();
      Want(record);
    }
  }
  LoadWanted();
  if (suspended) return absl::OkStatus();
  const auto are_settled = [&permanent]() {
    return std::none_of(permanent.begin(), permanent.end(), [](const RecordPtr& record) {
      return !record->destroyed && (record->wanted || record->place == Place::kLoading);
    });
  };
  // Others that were wanted before them may have come first and are kept for a while, and nobody
  // asks again while the engine sleeps.
  while (!mu.AwaitWithTimeout(absl::Condition(&are_settled), kAskAgain)) LoadWanted();
  absl::Status status;
  for (const RecordPtr& record : permanent) {
    if (record->destroyed || record->place == Place::kResident) continue;
    status.Update(record->failure.ok() ? NoRoomFor(record->bytes) : record->failure);
    record->failure = absl::OkStatus();
  }
  if (!status.ok()) asleep = true;
  return status;
}

void Residency::State::TakeBackLoads() {
  for (Record* record : lists.loading().all()) {
    if (record->load_begun) continue;
    record->place = Place::kAway;
    lists.Update(record);
    if (!record->destroyed) Want(record);
  }
  const auto none_runs = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) { return loading_ == 0; };
  mu.Await(absl::Condition(&none_runs));
}

// Those in use that drain, and what is idle; what only host copies bring back with `with_hosted`.
int64_t Residency::State::BytesOnTheirWay(bool with_hosted) const {
  int64_t bytes = lists.idle_stored().bytes() + lists.kept().stored_bytes();
  for (const Record* record : draining) {
    if (record->pins > 0 && HasWayBack(*record)) bytes += record->bytes;
  }
  if (!with_hosted) return bytes;
  for (const RecordList* list : {&lists.kept(), &lists.idle_hosted()}) {
    for (const Record* record = list->first(); record != nullptr; record = list->After(record)) {
      if (record->reload == nullptr && HasWayBack(*record)) bytes += record->bytes;
    }
  }
  return bytes;
}

void Residency::State::Drain() {
  const auto first = std::find_if(wanted.begin(), wanted.end(), [](const Record* record) {
    return record->place == Place::kAway;
  });
  if (first == wanted.end()) {
    for (Record* record : std::exchange(draining, {})) {
      record->draining = false;
      Unwant(record);
    }
    return;
  }
  if (options.now() - (*first)->wanted_since < options.patience) return;
  if (Fits((*first)->bytes - BytesOnTheirWay(/*with_hosted=*/false))) return;
  std::vector<Record*> staying = lists.in_use().all();
  std::erase_if(staying,
                [this](const Record* record) { return record->draining || !HasWayBack(*record); });
  if (staying.empty()) return;
  std::sort(staying.begin(), staying.end(),
            [](const Record* a, const Record* b) { return a->loaded < b->loaded; });
  int64_t going = BytesOnTheirWay(/*with_hosted=*/true);
  for (Record* record : staying) {
    if (Fits((*first)->bytes - going)) return;
    record->draining = true;
    draining.push_back(record);
    going += record->bytes;
  }
}

bool Residency::State::IsStuck() {
  lists.ExpireKept(options.now(), &clock);
  if (lists.in_use().count() > 0 || lists.kept().count() > 0) return false;
  return lists.evicting().count() == lists.evicting().permanent() &&
         lists.loading().count() == lists.loading().permanent();
}

}  // namespace dorad::adapter
