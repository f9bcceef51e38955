#include "server/adapter/residency.h"

#include <algorithm>
#include <deque>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/adapter/version.h"
#include "server/base/check.h"
#include "server/base/error.h"

namespace dorad::adapter {

// Guarded by State::mu, but for `here` while a use is held.
struct Residency::Entry::Weights {
  enum class Place { kResident, kAway, kComing };

  std::shared_ptr<const AdapterWeights> here;  // while kResident
  int64_t bytes = 0;
  Recall recall;
  Place place = Place::kAway;
  int uses = 0;
  uint64_t last_use = 0;   // a count that rises
  uint64_t came = 0;       // likewise
  bool draining = false;   // gets no new users
  bool wanted = false;     // is in State::wanted
  bool destroyed = false;  // the entry is gone
  absl::Time wanted_since;
  // Recalled for somebody who has not come for it yet: until then it stays.
  absl::Time kept_until = absl::InfinitePast();
  absl::Status failure;  // of the last recall, until somebody was told

  bool takes_users() const { return place == Place::kResident && !draining; }
};

struct Residency::State : std::enable_shared_from_this<Residency::State> {
  using Weights = Entry::Weights;
  using Place = Weights::Place;
  using Gone = std::vector<std::shared_ptr<const AdapterWeights>>;

  explicit State(Options opts) : options(std::move(opts)) {}

  bool Fits(int64_t more) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    return options.max_bytes == 0 || bytes + more <= options.max_bytes;
  }

  bool IsIdle(const Weights& weights) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    return weights.place == Place::kResident && weights.uses == 0 && weights.recall != nullptr &&
           options.now() >= weights.kept_until;
  }

  Weights* LeastRecentlyUsed() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    Weights* found = nullptr;
    for (const auto& weights : all) {
      if (!IsIdle(*weights)) continue;
      if (found == nullptr || weights->last_use < found->last_use) found = weights.get();
    }
    return found;
  }

  void Evict(Weights* weights, Gone* gone) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    gone->push_back(std::move(weights->here));
    weights->place = Place::kAway;
    weights->draining = false;
    bytes -= weights->bytes;
    ++evictions;
  }

  // Evicts what is idle until there is room; false, and nothing has gone, when that is not enough.
  bool MakeRoom(int64_t more, Gone* gone) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    int64_t idle = 0;
    for (const auto& weights : all) idle += IsIdle(*weights) ? weights->bytes : 0;
    if (!Fits(more - idle)) return false;
    while (!Fits(more)) Evict(LeastRecentlyUsed(), gone);
    return true;
  }

  // Bytes of what would stay if everything went that can.
  int64_t StayingBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    int64_t staying = 0;
    for (const auto& weights : all) staying += weights->recall == nullptr ? weights->bytes : 0;
    return staying;
  }

  // Whether there can be no room for so many bytes of weights that can go.
  bool NeverFits(int64_t more) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    return options.max_bytes > 0 && StayingBytes() + more > options.max_bytes;
  }

  void Want(Weights* weights) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (weights->wanted) return;
    weights->wanted = true;
    weights->wanted_since = options.now();
    wanted.push_back(weights);
  }

  void Unwant(Weights* weights) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (!std::exchange(weights->wanted, false)) return;
    wanted.erase(std::find(wanted.begin(), wanted.end(), weights));
  }

  // Brings what is wanted, in order, while there is room for it.
  void BringWanted() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    for (auto it = wanted.begin(); it != wanted.end() && !closed;) {
      Weights* const weights = *it;
      if (NeverFits(weights->bytes)) {
        weights->wanted = false;  // there will be no room; who asks is told
        it = wanted.erase(it);
        continue;
      }
      if (weights->place == Place::kResident) {  // draining: it goes before it comes again
        ++it;
        continue;
      }
      Gone gone;
      if (!MakeRoom(weights->bytes, &gone)) break;
      it = wanted.erase(it);
      weights->wanted = false;
      weights->place = Place::kComing;
      bytes += weights->bytes;
      Bring(weights, std::move(gone));
    }
    Drain();
  }

  void Bring(Weights* weights, Gone gone) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    ++under_way;
    const auto owner = std::find_if(all.begin(), all.end(),
                                    [&](const auto& other) { return other.get() == weights; });
    // std::function wants a copyable task; what has gone is freed where it runs.
    auto shared = std::make_shared<Gone>(std::move(gone));
    options.executor([state = shared_from_this(), target = *owner, shared] {
      shared->clear();
      state->Arrive(target, target->recall());
    });
  }

  void Arrive(const std::shared_ptr<Weights>& weights,
              absl::StatusOr<std::shared_ptr<const AdapterWeights>> recalled) {
    std::shared_ptr<const AdapterWeights> unwanted;  // freed under no lock
    absl::MutexLock lock(&mu);
    if (recalled.ok() && !weights->destroyed) {
      weights->here = *std::move(recalled);
      weights->place = Place::kResident;
      weights->came = weights->last_use = ++clock;
      weights->kept_until = options.now() + options.patience;
      ++recalls;
    } else {
      if (recalled.ok()) unwanted = *std::move(recalled);
      weights->failure = recalled.status();
      weights->place = Place::kAway;
      bytes -= weights->bytes;
    }
    BringWanted();
    --under_way;
  }

  // When the first of those wanted has waited for too long: stops the use of the longest resident
  // ones, until what they leave is room enough.
  void Drain() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    const auto first = std::find_if(wanted.begin(), wanted.end(), [](const Weights* weights) {
      return weights->place == Place::kAway;
    });
    if (first == wanted.end()) {
      for (const auto& weights : all) {
        if (std::exchange(weights->draining, false)) Unwant(weights.get());
      }
      return;
    }
    if (options.now() - (*first)->wanted_since < options.patience) return;
    int64_t leaving = 0;
    std::vector<Weights*> staying;
    for (const auto& weights : all) {
      if (weights->place != Place::kResident || weights->recall == nullptr) continue;
      if (weights->draining || weights->uses == 0) {
        leaving += weights->bytes;
      } else {
        staying.push_back(weights.get());
      }
    }
    std::sort(staying.begin(), staying.end(),
              [](const Weights* a, const Weights* b) { return a->came < b->came; });
    for (Weights* weights : staying) {
      if (Fits((*first)->bytes - leaving)) return;
      weights->draining = true;
      leaving += weights->bytes;
    }
  }

  const Options options;
  mutable absl::Mutex mu;
  std::vector<std::shared_ptr<Weights>> all ABSL_GUARDED_BY(mu);
  std::deque<Weights*> wanted ABSL_GUARDED_BY(mu);
  int64_t bytes ABSL_GUARDED_BY(mu) = 0;
  uint64_t clock ABSL_GUARDED_BY(mu) = 0;
  int64_t evictions ABSL_GUARDED_BY(mu) = 0;
  int64_t recalls ABSL_GUARDED_BY(mu) = 0;
  int under_way ABSL_GUARDED_BY(mu) = 0;  // recalls that the executor has
  bool closed ABSL_GUARDED_BY(mu) = false;
};

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
    std::shared_ptr<const AdapterWeights> built, int64_t bytes, Recall recall) {
  auto weights = std::make_shared<Entry::Weights>();
  weights->bytes = bytes;
  weights->recall = std::move(recall);
  State::Gone gone;  // freed under no lock
  absl::MutexLock lock(&state_->mu);
  const bool has_room = state_->MakeRoom(bytes, &gone);
  if (has_room) {
    weights->here = std::move(built);
    weights->place = Entry::Weights::Place::kResident;
    weights->came = weights->last_use = ++state_->clock;
    state_->bytes += bytes;
  } else if (weights->recall == nullptr) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
        absl::StrCat("the adapter takes ", bytes, " bytes; of ", state_->options.max_bytes,
                     " for adapters, ", state_->bytes, " are taken and cannot be freed now"));
  }
  state_->all.push_back(weights);
  return std::unique_ptr<Entry>(new Entry(state_, std::move(weights)));
}

bool Residency::EvictOne() {
  State::Gone gone;  // freed under no lock
  absl::MutexLock lock(&state_->mu);
  Entry::Weights* const weights = state_->LeastRecentlyUsed();
  if (weights == nullptr) return false;
  state_->Evict(weights, &gone);
  return true;
}

Residency::Stats Residency::stats() const {
  absl::MutexLock lock(&state_->mu);
  Stats stats;
  stats.bytes = state_->bytes;
  stats.evictions = state_->evictions;
  stats.recalls = state_->recalls;
  for (const auto& weights : state_->all) {
    ++(weights->place == Entry::Weights::Place::kResident ? stats.resident : stats.away);
  }
  return stats;
}

Residency::Entry::~Entry() {
  State::Gone gone;  // freed under no lock
  absl::MutexLock lock(&state_->mu);
  DORAD_CHECK(weights_->uses == 0);
  weights_->destroyed = true;
  state_->Unwant(weights_.get());
  if (weights_->place == Weights::Place::kResident) {
    gone.push_back(std::move(weights_->here));
    state_->bytes -= weights_->bytes;
    weights_->place = Weights::Place::kAway;
  }
  state_->all.erase(std::find(state_->all.begin(), state_->all.end(), weights_));
  state_->BringWanted();
}

absl::StatusOr<std::optional<Residency::Uses>> Residency::UseAll(absl::Span<Entry* const> entries) {
  if (entries.empty()) return Uses();
  State& state = *entries.front()->state_;
  absl::MutexLock lock(&state.mu);
  bool are_here = true;
  int64_t movable = 0;  // bytes of those that can go
  for (const Entry* entry : entries) {
    Entry::Weights& weights = *entry->weights_;
    are_here = are_here && weights.takes_users();
    movable += weights.recall == nullptr ? 0 : weights.bytes;
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
  if (state.NeverFits(movable)) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
        absl::StrCat("the adapter's weights take ", movable, " bytes; of ", state.options.max_bytes,
                     " for adapters, ", state.StayingBytes(), " are held by others that stay"));
  }
  bool is_next = false;  // one of those that are missing
  for (const Entry* entry : entries) {
    Entry::Weights& weights = *entry->weights_;
    const bool is_coming = weights.place == Entry::Weights::Place::kComing;
    if (!weights.takes_users() && !is_coming) state.Want(&weights);
    is_next = is_next || is_coming || (!state.wanted.empty() && state.wanted.front() == &weights);
  }
  for (const Entry* entry : entries) {
    if (is_next) entry->weights_->kept_until = state.options.now() + state.options.patience;
  }
  state.BringWanted();
  return std::nullopt;
}

const AdapterWeights& Residency::Entry::weights() const { return *weights_->here; }

bool Residency::Entry::can_go() const { return weights_->recall != nullptr; }

bool Residency::Entry::resident() const {
  absl::MutexLock lock(&state_->mu);
  return weights_->place == Weights::Place::kResident;
}

WeightsUse::~WeightsUse() {
  if (entry_ == nullptr) return;
  absl::MutexLock lock(&entry_->state_->mu);
  Residency::Entry::Weights& weights = *entry_->weights_;
  DORAD_CHECK(weights.uses > 0);
  if (--weights.uses == 0) entry_->state_->BringWanted();
}

}  // namespace dorad::adapter
