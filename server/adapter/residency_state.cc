#include "server/adapter/residency_state.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/adapter/version.h"
#include "server/base/error.h"
#include "server/base/log.h"

namespace dorad::adapter {
namespace {

constexpr absl::Duration kAskAgain = absl::Milliseconds(20);
constexpr int64_t kLeastLoan = 128 << 20;
constexpr int64_t kMostLoan = int64_t{1} << 40;

template <typename WeightsPtr>
int64_t SumOfBytes(const std::vector<WeightsPtr>& weights) {
  int64_t sum = 0;
  for (const WeightsPtr& each : weights) sum += each->bytes;
  return sum;
}

}  // namespace

Residency::State::State(Options opts)
    : options(std::move(opts)),
      host_capacity(options.images == nullptr ? 0 : options.images->capacity_bytes()) {}

bool Residency::State::Fits(int64_t more) const {
  return options.max_bytes == 0 || bytes + more <= options.max_bytes;
}

bool Residency::State::IsIdle(const Weights& weights) const {
  return weights.place == Place::kResident && weights.uses == 0 && !weights.pinned &&
         options.now() >= weights.kept_until;
}

std::vector<Residency::State::WeightsPtr> Residency::State::Idle(int64_t wanted_bytes) const {
  std::vector<WeightsPtr> idle;
  for (const WeightsPtr& weights : all) {
    if (IsIdle(*weights)) idle.push_back(weights);
  }
  std::sort(idle.begin(), idle.end(),
            [](const WeightsPtr& a, const WeightsPtr& b) { return a->last_use < b->last_use; });
  std::vector<WeightsPtr> leaving_first;
  int64_t host_room = HostRoom();
  for (const WeightsPtr& weights : idle) {
    if (wanted_bytes <= 0) break;
    if (weights->recall == nullptr) {
      // The room of an image that it has already is among what could be dropped.
      if (weights->image_bytes > host_room) continue;
      host_room -= weights->image_bytes;
    }
    leaving_first.push_back(weights);
    wanted_bytes -= weights->bytes;
  }
  return leaving_first;
}

std::optional<std::vector<Residency::State::WeightsPtr>> Residency::State::Victims(
    int64_t missing) const {
  std::vector<WeightsPtr> victims = Idle(missing);
  if (SumOfBytes(victims) < missing) return std::nullopt;
  return victims;
}

int64_t Residency::State::IdleBytes() const {
  return SumOfBytes(Idle(std::numeric_limits<int64_t>::max()));
}

bool Residency::State::MakeRoom(int64_t more) {
  if (Fits(more)) return true;
  const auto victims = Victims(bytes + more - options.max_bytes);
  if (!victims) return false;
  Evict(*victims);
  return true;
}

void Residency::State::Evict(absl::Span<const WeightsPtr> victims) {
  for (const WeightsPtr& weights : victims) {
    bytes -= weights->bytes;
    ++evictions;
  }
  SendAway(victims);
}

bool Residency::State::NeverFit(absl::Span<Weights* const> together) const {
  if (options.max_bytes == 0) return false;
  int64_t staying = 0, together_bytes = 0;
  int64_t hosted_only = 0;  // bytes of those that nothing but an image brings back
  for (const WeightsPtr& weights : all) {
    if (std::find(together.begin(), together.end(), weights.get()) != together.end()) {
      together_bytes += weights->bytes;
    } else if (weights->pinned) {
      staying += weights->bytes;
    } else if (weights->recall == nullptr) {
      hosted_only += weights->bytes;
    }
  }
  staying += std::max<int64_t>(0, hosted_only - host_capacity);
  return staying + together_bytes > options.max_bytes;
}

bool Residency::State::CanTakeTurns(const Weights& added) const {
  if (options.max_bytes == 0 || added.pinned || added.recall != nullptr) return true;
  std::vector<const Weights*> hosted_only{&added};
  int64_t room = options.max_bytes;
  for (const WeightsPtr& weights : all) {
    if (weights->pinned) {
      room -= weights->bytes;
    } else if (weights->recall == nullptr) {
      hosted_only.push_back(weights.get());
    }
  }
  std::sort(hosted_only.begin(), hosted_only.end(),
            [](const Weights* a, const Weights* b) { return a->bytes > b->bytes; });
  const int64_t largest_image = hosted_only.front()->image_bytes;
  int64_t host_room = host_capacity;
  bool all_fit = true;
  for (const Weights* weights : hosted_only) {
    if (weights->bytes <= room) {
      room -= weights->bytes;
    } else if (weights->image_bytes <= host_room) {
      host_room -= weights->image_bytes;
      all_fit = false;
    } else {
      return false;
    }
  }
  return all_fit || largest_image <= host_room;
}

absl::Status Residency::State::NoRoomFor(int64_t wanted_bytes) const {
  return MakeError(
      absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
      absl::StrCat("the adapter's weights take ", wanted_bytes, " bytes; of ", options.max_bytes,
                   " for adapters, ", bytes, " are taken, and there is not room enough to be made",
                   host_capacity == 0
                       ? std::string()
                       : absl::StrCat(" (of ", host_capacity, " bytes of host memory for weights, ",
                                      host_bytes, " are taken)")));
}

// Those that need an image get theirs first, and nobody else takes it from them.
void Residency::State::SendAway(absl::Span<const WeightsPtr> weights) {
  for (const WeightsPtr& each : weights) {
    each->place = Place::kLeaving;
    each->draining = false;
    leaving.push_back(each);
  }
  for (const bool needs_image : {true, false}) {
    for (const WeightsPtr& each : weights) {
      if ((each->recall == nullptr) == needs_image) (void)ReserveImage(each.get());
    }
  }
}

int64_t Residency::State::Sleep() {
  std::vector<WeightsPtr> sent;
  {
    absl::MutexLock lock(&mu);
    asleep = true;
    TakeBackRecalls();
    // Those that need an image get theirs first.
    for (const bool is_stored : {false, true}) {
      for (const WeightsPtr& weights : all) {
        if ((weights->recall != nullptr) != is_stored || !HasWayBack(*weights)) continue;
        if (weights->place != Place::kResident || weights->uses > 0) continue;
        SendAway({&weights, 1});
        bytes -= weights->bytes;
        sent.push_back(weights);
      }
    }
  }
  LeaveAll();
  absl::MutexLock lock(&mu);
  // Other threads may have taken some of them on.
  const auto have_gone = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    return leaving.empty() && saving_ == 0;
  };
  mu.Await(absl::Condition(&have_gone));
  return BytesThatLeft(sent);
}

int64_t Residency::State::BytesThatLeft(absl::Span<const WeightsPtr> sent) const {
  int64_t left = 0;
  for (const WeightsPtr& weights : sent) {
    if (weights->place != Place::kResident) left += weights->bytes;
  }
  return left;
}

absl::Status Residency::State::Wake() {
  absl::MutexLock lock(&mu);
  asleep = false;
  std::vector<WeightsPtr> pinned;
  for (const WeightsPtr& weights : all) {
    if (!weights->pinned || weights->place == Place::kResident) continue;
    pinned.push_back(weights);
    weights->failure = absl::OkStatus();
    Want(weights.get());
  }
  BringWanted();
  if (held) return absl::OkStatus();
  const auto are_settled = [&pinned]() {
    return std::none_of(pinned.begin(), pinned.end(), [](const WeightsPtr& weights) {
      return !weights->destroyed && (weights->wanted || weights->place == Place::kComing);
    });
  };
  // Others that were wanted before them may have come first and are kept for a while, and nobody
  // asks again while the engine sleeps.
  while (!mu.AwaitWithTimeout(absl::Condition(&are_settled), kAskAgain)) BringWanted();
  absl::Status status;
  for (const WeightsPtr& weights : pinned) {
    if (weights->destroyed || weights->place == Place::kResident) continue;
    status.Update(weights->failure.ok() ? NoRoomFor(weights->bytes) : weights->failure);
    weights->failure = absl::OkStatus();
  }
  if (!status.ok()) asleep = true;
  return status;
}

void Residency::State::TakeBackRecalls() {
  for (const WeightsPtr& weights : all) {
    if (weights->place != Place::kComing || weights->begun) continue;
    weights->place = Place::kAway;
    bytes -= weights->bytes;
    Want(weights.get());
  }
  const auto none_runs = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) { return recalling_ == 0; };
  mu.Await(absl::Condition(&none_runs));
}

void Residency::State::LeaveAll() {
  while (true) {
    WeightsPtr next;
    {
      absl::MutexLock lock(&mu);
      if (leaving.empty()) return;
      next = std::move(leaving.front());
      leaving.pop_front();
      ++saving_;
    }
    Leave(next);
  }
}

void Residency::State::Leave(const WeightsPtr& weights) {
  FreeDropped();
  std::shared_ptr<const AdapterWeights> here;
  bool saves = false;
  {
    absl::MutexLock lock(&mu);
    const auto all_free = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) { return freeing_ == 0; };
    mu.Await(absl::Condition(&all_free));
    here = weights->here;
    saves = weights->has_image_room && weights->image == nullptr && !weights->destroyed;
  }
  absl::StatusOr<std::unique_ptr<const WeightsImage>> image = nullptr;
  if (saves) image = options.images->Save(here);
  if (!image.ok()) {
    LogError("an adapter's weights cannot be saved in host memory",
             {{"error", std::string(image.status().message())}});
  }
  {
    absl::MutexLock lock(&mu);
    if (image.ok() && saves) weights->image = *std::move(image);
    if (weights->destroyed) DropImage(weights.get());
    if (weights->image == nullptr) ReturnImageRoom(weights.get());
    if (weights->image == nullptr && weights->recall == nullptr && !weights->destroyed) {
      weights->place = Place::kResident;  // beyond the limit rather than lost
      bytes += weights->bytes;
    } else {
      weights->place = Place::kAway;
      weights->here = nullptr;
    }
  }
  here = nullptr;  // freed under no lock
  FreeDropped();
  absl::MutexLock lock(&mu);
  --saving_;
  BringWanted();
}

bool Residency::State::MakeSomeRoom() {
  std::vector<WeightsPtr> victims;
  {
    absl::MutexLock lock(&mu);
    if (leaving.empty() && saving_ > 0) {
      const auto gone = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) { return saving_ == 0; };
      mu.Await(absl::Condition(&gone));
      return true;
    }
    if (leaving.empty()) {
      auto found = Victims(1);
      if (!found) return false;
      victims = *std::move(found);
      Evict(victims);
    }
  }
  LeaveAll();
  absl::MutexLock lock(&mu);
  // What could not be saved is back: there is no room in it.
  return victims.empty() || victims.front()->place != Place::kResident;
}

absl::Status Residency::State::WithRoom(absl::FunctionRef<absl::Status()> attempt) {
  // How much is missing is not known: more each time, so that few attempts do.
  int64_t to_borrow = kLeastLoan;
  while (true) {
    absl::Status status = attempt();
    if (status.ok() || ReasonOf(status) != "OUT_OF_MEMORY") return status;
    if (MetadataOf(status).count(kNeverFits) > 0) return status;
    if (MakeSomeRoom()) continue;
    if (options.lender == nullptr || options.lender(to_borrow) == 0) return status;
    to_borrow = std::min(2 * to_borrow, kMostLoan);
  }
}

int64_t Residency::State::GiveBack(int64_t wanted_bytes) {
  std::vector<WeightsPtr> sent;
  {
    absl::MutexLock lock(&mu);
    sent = Idle(wanted_bytes);
    Evict(sent);
  }
  LeaveAll();
  absl::MutexLock lock(&mu);
  // Other threads may have taken some of them on.
  const auto have_gone = [&sent] {
    return std::none_of(sent.begin(), sent.end(), [](const WeightsPtr& weights) {
      return weights->place == Place::kLeaving;
    });
  };
  mu.Await(absl::Condition(&have_gone));
  return BytesThatLeft(sent);
}

bool Residency::State::IsDroppable(const Weights& weights) const {
  return weights.image != nullptr && weights.place != Place::kComing &&
         (weights.recall != nullptr || weights.place == Place::kResident);
}

int64_t Residency::State::HostRoom() const {
  int64_t room = host_capacity - host_bytes;
  for (const WeightsPtr& weights : all) {
    if (IsDroppable(*weights)) room += weights->image_bytes;
  }
  return room;
}

bool Residency::State::HasWayBack(const Weights& weights) const {
  return weights.recall != nullptr || weights.image != nullptr || weights.image_bytes <= HostRoom();
}

bool Residency::State::ReserveImage(Weights* weights) {
  if (weights->has_image_room) return true;
  if (weights->image_bytes > HostRoom()) return false;
  while (weights->image_bytes > host_capacity - host_bytes) {
    // Of weights that are resident first: they lose nothing by it.
    const auto key = [](const Weights& each) {
      return std::make_pair(each.place != Place::kResident, each.last_use);
    };
    Weights* first = nullptr;
    for (const WeightsPtr& each : all) {
      if (!IsDroppable(*each)) continue;
      if (first == nullptr || key(*each) < key(*first)) first = each.get();
    }
    DropImage(first);
  }
  host_bytes += weights->image_bytes;
  weights->has_image_room = true;
  return true;
}

void Residency::State::ReturnImageRoom(Weights* weights) {
  if (std::exchange(weights->has_image_room, false)) host_bytes -= weights->image_bytes;
}

void Residency::State::DropImage(Weights* weights) {
  if (weights->image == nullptr) return;
  dropped_.push_back(std::move(weights->image));
  ReturnImageRoom(weights);
}

void Residency::State::FreeDropped() {
  std::vector<std::unique_ptr<const WeightsImage>> images;
  {
    absl::MutexLock lock(&mu);
    if (dropped_.empty()) return;
    images.swap(dropped_);
    ++freeing_;
  }
  images.clear();
  absl::MutexLock lock(&mu);
  --freeing_;
}

void Residency::State::Want(Weights* weights) {
  if (weights->wanted) return;
  weights->wanted = true;
  weights->wanted_since = options.now();
  wanted.push_back(weights);
}

void Residency::State::Unwant(Weights* weights) {
  if (!std::exchange(weights->wanted, false)) return;
  wanted.erase(std::find(wanted.begin(), wanted.end(), weights));
}

void Residency::State::BringWanted() {
  if (asleep || held) return;
  for (auto it = wanted.begin(); it != wanted.end() && !closed;) {
    Weights* const weights = *it;
    if (NeverFit({&weights, 1})) {
      weights->wanted = false;  // there will be no room; who asks is told
      it = wanted.erase(it);
      continue;
    }
    if (weights->place != Place::kAway) {  // draining or leaving: it goes before it comes again
      ++it;
      continue;
    }
    weights->place = Place::kComing;  // others do not take the room of its image
    bool has_room = MakeRoom(weights->bytes);
    weights->place = Place::kAway;
    has_room = has_room || MakeRoom(weights->bytes);  // unless there is no other way
    if (!has_room) {
      if (!IsStuck()) break;
      weights->failure = NoRoomFor(weights->bytes);
    } else {
      weights->place = Place::kComing;
      bytes += weights->bytes;
      Bring(weights);
    }
    weights->wanted = false;
    it = wanted.erase(it);
  }
  Drain();
}

void Residency::State::Bring(Weights* weights) {
  ++under_way;
  const auto owner = std::find_if(all.begin(), all.end(),
                                  [&](const WeightsPtr& other) { return other.get() == weights; });
  options.executor([state = shared_from_this(), target = *owner] {
    state->LeaveAll();
    bool from_host = false;
    {
      absl::MutexLock lock(&state->mu);
      // Taken back since, and perhaps sent for once more.
      if (target->place != Place::kComing || target->begun) {
        --state->under_way;
        return;
      }
      target->begun = true;
      ++state->recalling_;
      from_host = target->image != nullptr;
    }
    state->Arrive(target, from_host, state->Recalled(*target, from_host));
  });
}

// What is on its way keeps its image and its recall.
absl::StatusOr<std::shared_ptr<const AdapterWeights>> Residency::State::Recalled(
    const Weights& weights, bool from_host) {
  if (!from_host) return weights.recall();
  absl::StatusOr<std::shared_ptr<const AdapterWeights>> restored = nullptr;
  (void)WithRoom([&] {
    restored = options.images->Restore(*weights.image);
    return restored.status();
  });
  return restored;
}

void Residency::State::Arrive(const WeightsPtr& weights, bool from_host,
                              absl::StatusOr<std::shared_ptr<const AdapterWeights>> recalled) {
  std::shared_ptr<const AdapterWeights> unwanted;  // freed under no lock
  {
    absl::MutexLock lock(&mu);
    weights->begun = false;
    --recalling_;
    if (recalled.ok() && !weights->destroyed) {
      weights->here = *std::move(recalled);
      weights->place = Place::kResident;
      weights->came = weights->last_use = ++clock;
      weights->kept_until = options.now() + options.patience;
      ++(from_host ? recalls_from_host : recalls_from_store);
    } else {
      if (recalled.ok()) unwanted = *std::move(recalled);
      weights->failure = recalled.status();
      weights->place = Place::kAway;
      bytes -= weights->bytes;
      if (weights->destroyed) DropImage(weights.get());
    }
    BringWanted();
  }
  FreeDropped();
  unwanted = nullptr;
  absl::MutexLock lock(&mu);
  --under_way;
}

void Residency::State::Drain() {
  const auto first = std::find_if(wanted.begin(), wanted.end(), [](const Weights* weights) {
    return weights->place == Place::kAway;
  });
  if (first == wanted.end()) {
    for (const WeightsPtr& weights : all) {
      if (std::exchange(weights->draining, false)) Unwant(weights.get());
    }
    return;
  }
  if (options.now() - (*first)->wanted_since < options.patience) return;
  int64_t going = 0;
  std::vector<Weights*> staying;
  for (const WeightsPtr& weights : all) {
    if (weights->place != Place::kResident || weights->pinned || !HasWayBack(*weights)) continue;
    if (weights->draining || weights->uses == 0) {
      going += weights->bytes;
    } else {
      staying.push_back(weights.get());
    }
  }
  std::sort(staying.begin(), staying.end(),
            [](const Weights* a, const Weights* b) { return a->came < b->came; });
  for (Weights* weights : staying) {
    if (Fits((*first)->bytes - going)) return;
    weights->draining = true;
    going += weights->bytes;
  }
}

bool Residency::State::IsStuck() const {
  return std::none_of(all.begin(), all.end(), [this](const WeightsPtr& weights) {
    if (weights->pinned) return false;
    if (weights->place == Place::kLeaving || weights->place == Place::kComing) return true;
    return weights->place == Place::kResident &&
           (weights->uses > 0 || options.now() < weights->kept_until);
  });
}

}  // namespace dorad::adapter
