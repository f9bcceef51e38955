#include "server/adapter/residency/residency.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "server/adapter/residency/residency_lists.h"
#include "server/adapter/residency/residency_record.h"
#include "server/adapter/residency/residency_state.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::adapter {

Residency::Residency(Options options) : state_(std::make_shared<State>(std::move(options))) {
  DORAD_CHECK(state_->options.executor != nullptr);
}

Residency::~Residency() { Close(); }

void Residency::Close() {
  State* const state = state_.get();
  absl::MutexLock lock(&state->mu);
  state->closed = true;
  const auto is_done = [state]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state->mu) {
    return state->under_way == 0;
  };
  state->mu.Await(absl::Condition(&is_done));
}

absl::StatusOr<std::unique_ptr<Residency::Entry>> Residency::Add(
    std::shared_ptr<const AdapterWeights> built, int64_t bytes, Reload reload, bool pinned) {
  auto record = std::make_shared<ResidencyRecord>();
  record->weights = std::move(built);
  record->bytes = bytes;
  if (state_->options.host_copies)
    record->host_copy_bytes = state_->options.host_copies->BytesFor(bytes);
  record->reload = std::move(reload);
  record->permanent = pinned;
  {
    absl::MutexLock lock(&state_->mu);
    record->loaded = record->last_use = ++state_->clock;
    if (!state_->CanTakeTurns(*record)) return state_->NoRoomFor(bytes);
    const bool stays = !state_->asleep || !state_->HasWayBack(*record);
    if (stays && state_->MakeRoom(bytes)) {
      record->place = State::Place::kResident;
      state_->lists.Add(record.get());
    } else if (state_->HasWayBack(*record) && (!pinned || state_->asleep)) {
      state_->lists.Add(record.get());
      state_->QueueEviction({&record, 1});
    } else {
      return state_->NoRoomFor(bytes);
    }
  }
  state_->EvictQueued();
  return std::unique_ptr<Entry>(new Entry(state_, std::move(record)));
}

absl::Status Residency::WithRoom(absl::FunctionRef<absl::Status()> attempt) {
  return state_->WithRoom(attempt);
}

int64_t Residency::GiveBack(int64_t wanted_bytes) { return state_->GiveBack(wanted_bytes); }

int64_t Residency::Sleep() { return state_->Sleep(); }

absl::Status Residency::Wake() { return state_->Wake(); }

void Residency::Suspend() {
  absl::MutexLock lock(&state_->mu);
  state_->suspended = true;
  state_->TakeBackLoads();
}

void Residency::Resume() {
  absl::MutexLock lock(&state_->mu);
  state_->suspended = false;
  state_->LoadWanted();
}

Residency::Stats Residency::stats() const {
  absl::MutexLock lock(&state_->mu);
  const ResidencyLists& lists = state_->lists;
  Stats stats;
  stats.bytes = lists.bytes();
  stats.idle_bytes = state_->IdleBytes();
  stats.host_bytes = state_->host_bytes;
  stats.evictions = state_->evictions;
  stats.reloads_from_host = state_->loads_from_host;
  stats.reloads_from_store = state_->loads_from_store;
  stats.resident = static_cast<int>(lists.resident());
  stats.away =
      static_cast<int>(lists.away().count() + lists.evicting().count() + lists.loading().count());
  stats.host_copies = state_->host_copies;
  return stats;
}

Residency::Entry::~Entry() {
  std::shared_ptr<const AdapterWeights> gone;  // freed under no lock
  {
    absl::MutexLock lock(&state_->mu);
    ResidencyRecord* const record = record_.get();
    DORAD_CHECK(record->pins == 0);
    state_->Unwant(record);
    state_->StopDraining(record);
    if (record->place == State::Place::kResident) {
      gone = std::move(record->weights);
      record->place = State::Place::kAway;
    }
    state_->lists.Destroy(record);
    // Whoever saves or restores it drops what comes of it.
    if (record->place == State::Place::kAway) state_->DropCopy(record);
    state_->LoadWanted();
  }
  state_->FreeDropped();
}

absl::StatusOr<std::optional<Residency::Pins>> Residency::PinAll(absl::Span<Entry* const> entries) {
  if (entries.empty()) return Pins();
  State& state = *entries.front()->state_;
  absl::MutexLock lock(&state.mu);
  bool are_here = true;
  std::vector<ResidencyRecord*> together;
  for (const Entry* entry : entries) {
    ResidencyRecord& record = *entry->record_;
    are_here = are_here && record.takes_users();
    together.push_back(&record);
    if (!record.failure.ok()) return std::exchange(record.failure, absl::OkStatus());
  }
  if (are_here) {
    Pins uses;
    for (Entry* entry : entries) {
      ResidencyRecord* const record = entry->record_.get();
      ++record->pins;
      record->last_use = ++state.clock;
      record->kept_until = absl::InfinitePast();
      state.lists.Update(record);
      uses.emplace_back(entry);
    }
    return uses;
  }
  if (state.NeverFit(together)) {
    int64_t bytes = 0;
    for (const ResidencyRecord* record : together) bytes += record->bytes;
    return state.NoRoomFor(bytes);
  }
  bool is_next = false;  // one of those that are missing
  for (ResidencyRecord* record : together) {
    const bool is_loading = record->place == State::Place::kLoading;
    if (!record->takes_users() && !is_loading) state.Want(record);
    is_next = is_next || is_loading || (!state.wanted.empty() && state.wanted.front() == record);
  }
  for (ResidencyRecord* record : together) {
    if (!is_next) break;
    record->kept_until = state.options.now() + state.options.patience;
    state.lists.Update(record);
  }
  state.LoadWanted();
  return std::nullopt;
}

const AdapterWeights& Residency::Entry::weights() const { return *record_->weights; }

bool Residency::Entry::pinned() const { return record_->permanent; }

bool Residency::Entry::resident() const {
  absl::MutexLock lock(&state_->mu);
  return record_->place == State::Place::kResident;
}

bool Residency::Entry::in_host_memory() const {
  absl::MutexLock lock(&state_->mu);
  return record_->host_copy != nullptr;
}

WeightsPin::~WeightsPin() {
  if (entry_ == nullptr) return;
  auto& state = *entry_->state_;
  absl::MutexLock lock(&state.mu);
  ResidencyRecord* const record = entry_->record_.get();
  DORAD_CHECK(record->pins > 0);
  if (--record->pins > 0) return;
  record->last_use = ++state.clock;
  state.lists.Update(record);
  state.LoadWanted();
}

}  // namespace dorad::adapter
