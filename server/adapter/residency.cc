#include "server/adapter/residency.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/adapter/residency_state.h"
#include "server/adapter/version.h"
#include "server/base/check.h"
#include "server/base/error.h"

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
    std::shared_ptr<const AdapterWeights> built, int64_t bytes, Recall recall, bool pinned) {
  auto weights = std::make_shared<Entry::Weights>();
  weights->here = std::move(built);
  weights->bytes = bytes;
  if (state_->options.images) weights->image_bytes = state_->options.images->BytesFor(bytes);
  weights->recall = std::move(recall);
  weights->pinned = pinned;
  {
    absl::MutexLock lock(&state_->mu);
    weights->came = weights->last_use = ++state_->clock;
    if (!state_->CanTakeTurns(*weights)) return state_->NoRoomFor(bytes);
    const bool stays = !state_->asleep || !state_->HasWayBack(*weights);
    if (stays && state_->MakeRoom(bytes)) {
      weights->place = State::Place::kResident;
      state_->bytes += bytes;
    } else if (state_->HasWayBack(*weights) && (!pinned || state_->asleep)) {
      state_->SendAway({&weights, 1});
    } else {
      return state_->NoRoomFor(bytes);
    }
    state_->all.push_back(weights);
  }
  state_->LeaveAll();
  return std::unique_ptr<Entry>(new Entry(state_, std::move(weights)));
}

absl::Status Residency::WithRoom(absl::FunctionRef<absl::Status()> attempt) {
  return state_->WithRoom(attempt);
}

int64_t Residency::GiveBack(int64_t wanted_bytes) { return state_->GiveBack(wanted_bytes); }

int64_t Residency::Sleep() { return state_->Sleep(); }

absl::Status Residency::Wake() { return state_->Wake(); }

void Residency::HoldRecalls() {
  absl::MutexLock lock(&state_->mu);
  state_->held = true;
  state_->TakeBackRecalls();
}

void Residency::ReleaseRecalls() {
  absl::MutexLock lock(&state_->mu);
  state_->held = false;
  state_->BringWanted();
}

Residency::Stats Residency::stats() const {
  absl::MutexLock lock(&state_->mu);
  Stats stats;
  stats.bytes = state_->bytes;
  stats.idle_bytes = state_->IdleBytes();
  stats.host_bytes = state_->host_bytes;
  stats.evictions = state_->evictions;
  stats.recalls_from_host = state_->recalls_from_host;
  stats.recalls_from_store = state_->recalls_from_store;
  for (const auto& weights : state_->all) {
    ++(weights->place == State::Place::kResident ? stats.resident : stats.away);
    stats.images += weights->image != nullptr;
  }
  return stats;
}

Residency::Entry::~Entry() {
  std::shared_ptr<const AdapterWeights> gone;  // freed under no lock
  {
    absl::MutexLock lock(&state_->mu);
    DORAD_CHECK(weights_->uses == 0);
    weights_->destroyed = true;
    state_->Unwant(weights_.get());
    if (weights_->place == Weights::Place::kResident) {
      gone = std::move(weights_->here);
      state_->bytes -= weights_->bytes;
      weights_->place = Weights::Place::kAway;
    }
    // Whoever saves or restores it drops what comes of it.
    if (weights_->place == Weights::Place::kAway) state_->DropImage(weights_.get());
    state_->all.erase(std::find(state_->all.begin(), state_->all.end(), weights_));
    state_->BringWanted();
  }
  state_->FreeDropped();
}

absl::StatusOr<std::optional<Residency::Uses>> Residency::UseAll(absl::Span<Entry* const> entries) {
  if (entries.empty()) return Uses();
  State& state = *entries.front()->state_;
  absl::MutexLock lock(&state.mu);
  bool are_here = true;
  std::vector<Entry::Weights*> together;
  for (const Entry* entry : entries) {
    Entry::Weights& weights = *entry->weights_;
    are_here = are_here && weights.takes_users();
    together.push_back(&weights);
    if (!weights.failure.ok()) return std::exchange(weights.failure, absl::OkStatus());
  }
  if (are_here) {
    Uses uses;
    for (Entry* entry : entries) {
      Entry::Weights& weights = *entry->weights_;
      ++weights.uses;
      weights.last_use = ++state.clock;
      weights.kept_until = absl::InfinitePast();
      uses.emplace_back(entry);
    }
    return uses;
  }
  if (state.NeverFit(together)) {
    int64_t bytes = 0;
    for (const Entry::Weights* weights : together) bytes += weights->bytes;
    return state.NoRoomFor(bytes);
  }
  bool is_next = false;  // one of those that are missing
  for (Entry::Weights* weights : together) {
    const bool is_coming = weights->place == Entry::Weights::Place::kComing;
    if (!weights->takes_users() && !is_coming) state.Want(weights);
    is_next = is_next || is_coming || (!state.wanted.empty() && state.wanted.front() == weights);
  }
  for (Entry::Weights* weights : together) {
    if (is_next) weights->kept_until = state.options.now() + state.options.patience;
  }
  state.BringWanted();
  return std::nullopt;
}

const AdapterWeights& Residency::Entry::weights() const { return *weights_->here; }

bool Residency::Entry::pinned() const { return weights_->pinned; }

bool Residency::Entry::resident() const {
  absl::MutexLock lock(&state_->mu);
  return weights_->place == Weights::Place::kResident;
}

bool Residency::Entry::in_host_memory() const {
  absl::MutexLock lock(&state_->mu);
  return weights_->image != nullptr;
}

WeightsUse::~WeightsUse() {
  if (entry_ == nullptr) return;
  absl::MutexLock lock(&entry_->state_->mu);
  Residency::Entry::Weights& weights = *entry_->weights_;
  DORAD_CHECK(weights.uses > 0);
  if (--weights.uses == 0) entry_->state_->BringWanted();
}

}  // namespace dorad::adapter
