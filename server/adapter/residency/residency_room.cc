// Room for weights and for their copies in host memory: what leaves, and how.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/adapter/residency/residency_state.h"
#include "server/platform/check.h"
#include "server/platform/error.h"
#include "server/platform/exception.h"
#include "server/platform/log.h"

namespace dorad::adapter {
namespace {

constexpr int64_t kMinShrinkBytes = 128 << 20;
constexpr int64_t kMaxShrinkBytes = int64_t{1} << 40;

template <typename RecordPtr>
int64_t SumOfBytes(const std::vector<RecordPtr>& records) {
  int64_t sum = 0;
  for (const RecordPtr& each : records) sum += each->bytes;
  return sum;
}

}  // namespace

bool Residency::State::Fits(int64_t more) const {
  return options.max_bytes == 0 || lists.bytes() + more <= options.max_bytes;
}

std::vector<Residency::State::RecordPtr> Residency::State::Idle(int64_t wanted_bytes,
                                                                const Record* spared) {
  lists.ExpireKept(options.now(), &clock);
  std::vector<RecordPtr> leaving_first;
  int64_t host_room = HostRoom(spared);
  const RecordList &stored = lists.idle_stored(), &hosted = lists.idle_hosted();
  Record* next_stored = stored.first();
  Record* next_hosted = hosted.first();
  while (wanted_bytes > 0) {
    // None of those that follow has a smaller copy.
    if (host_room < lists.least_hosted_copy()) next_hosted = nullptr;
    if (next_stored == nullptr && next_hosted == nullptr) break;
    Record* next = next_stored;
    if (next_stored == nullptr ||
        (next_hosted != nullptr && next_hosted->last_use < next_stored->last_use)) {
      next = next_hosted;
      next_hosted = hosted.After(next);
      // The room of a copy that it has already is among what could be dropped.
      if (next->host_copy_bytes > host_room) continue;
      host_room -= next->host_copy_bytes;
    } else {
      next_stored = stored.After(next);
    }
    leaving_first.push_back(next->shared_from_this());
    wanted_bytes -= next->bytes;
  }
  return leaving_first;
}

std::optional<std::vector<Residency::State::RecordPtr>> Residency::State::Victims(
    int64_t missing, const Record* spared) {
  lists.ExpireKept(options.now(), &clock);
  if (lists.idle_stored().bytes() + lists.idle_hosted().bytes() < missing) return std::nullopt;
  std::vector<RecordPtr> victims = Idle(missing, spared);
  if (SumOfBytes(victims) < missing) return std::nullopt;
  return victims;
}

int64_t Residency::State::IdleBytes() {
  lists.ExpireKept(options.now(), &clock);
  const RecordList &stored = lists.idle_stored(), &hosted = lists.idle_hosted();
  if (hosted.host_copy_bytes() <= HostRoom(nullptr)) return stored.bytes() + hosted.bytes();
  return SumOfBytes(Idle(std::numeric_limits<int64_t>::max(), nullptr));
}

bool Residency::State::MakeRoom(int64_t more, const Record* spared) {
  if (Fits(more)) return true;
  const auto victims = Victims(lists.bytes() + more - options.max_bytes, spared);
  if (!victims) return false;
  evictions += static_cast<int64_t>(victims->size());
  QueueEviction(*victims, spared);
  return true;
}

bool Residency::State::NeverFit(absl::Span<Record* const> together) const {
  if (options.max_bytes == 0) return false;
  int64_t together_bytes = 0;
  int64_t staying = lists.permanent_bytes();
  int64_t hosted_only = lists.hosted_only_bytes();
  for (const Record* record : together) {
    together_bytes += record->bytes;
    if (record->permanent) staying -= record->bytes;
    if (record->hosted_only()) hosted_only -= record->bytes;
  }
  staying += std::max<int64_t>(0, hosted_only - host_capacity);
  return staying + together_bytes > options.max_bytes;
}

bool Residency::State::CanTakeTurns(const Record& added) const {
  if (options.max_bytes == 0 || !added.hosted_only()) return true;
  std::vector<const Record*> hosted_only(lists.hosted_only().begin(), lists.hosted_only().end());
  hosted_only.insert(std::upper_bound(hosted_only.begin(), hosted_only.end(), &added,
                                      ResidencyLists::LargerFirst()),
                     &added);
  int64_t room = options.max_bytes - lists.permanent_bytes();
  const int64_t largest_copy = hosted_only.front()->host_copy_bytes;
  int64_t host_room = host_capacity;
  bool all_fit = true;
  for (const Record* record : hosted_only) {
    if (record->bytes <= room) {
      room -= record->bytes;
    } else if (record->host_copy_bytes <= host_room) {
      host_room -= record->host_copy_bytes;
      all_fit = false;
    } else {
      return false;
    }
  }
  return all_fit || largest_copy <= host_room;
}

absl::Status Residency::State::NoRoomFor(int64_t wanted_bytes) const {
  return MakeError(
      absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
      absl::StrCat("the adapter's weights take ", wanted_bytes, " bytes; of ", options.max_bytes,
                   " for adapters, ", lists.bytes(),
                   " are taken, and there is not room enough to be made",
                   host_capacity == 0
                       ? std::string()
                       : absl::StrCat(" (of ", host_capacity, " bytes of host memory for weights, ",
                                      host_bytes, " are taken)")));
}

// Those that need a host copy get its room first, and nobody else takes it from them.
void Residency::State::QueueEviction(absl::Span<const RecordPtr> records, const Record* spared) {
  for (const RecordPtr& record : records) {
    record->place = Place::kEvicting;
    StopDraining(record.get());
    lists.Update(record.get());
    evictions_queued.push_back(record);
  }
  for (const bool needs_copy : {true, false}) {
    for (const RecordPtr& record : records) {
      if ((record->reload == nullptr) == needs_copy) (void)ReserveHostRoom(record.get(), spared);
    }
  }
}

void Residency::State::EvictQueued() {
  while (true) {
    RecordPtr next;
    {
      absl::MutexLock lock(&mu);
      if (evictions_queued.empty()) return;
      next = std::move(evictions_queued.front());
      evictions_queued.pop_front();
      ++saving_;
    }
    Evict(next);
  }
}

void Residency::State::Evict(const RecordPtr& record) {
  FreeDropped();
  std::shared_ptr<const AdapterWeights> weights;
  bool saves = false;
  {
    absl::MutexLock lock(&mu);
    const auto all_free = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) { return freeing_ == 0; };
    mu.Await(absl::Condition(&all_free));
    weights = record->weights;
    saves = record->has_host_room && record->host_copy == nullptr && !record->destroyed;
  }
  absl::StatusOr<std::unique_ptr<const HostCopy>> copy = nullptr;
  try {
    if (saves) copy = options.host_copies->Save(weights);
  } catch (...) {
    copy = StatusOfException("the copy to host memory", "INTERNAL_ERROR");
  }
  if (!copy.ok()) {
    LogError("an adapter's weights cannot be saved in host memory",
             {{"error", std::string(copy.status().message())}});
  }
  {
    absl::MutexLock lock(&mu);
    if (copy.ok() && saves) {
      record->host_copy = *std::move(copy);
      ++host_copies;
    }
    if (record->destroyed) DropCopy(record.get());
    if (record->host_copy == nullptr) ReturnHostRoom(record.get());
    if (record->host_copy == nullptr && record->reload == nullptr && !record->destroyed) {
      record->place = Place::kResident;  // beyond the limit rather than lost
    } else {
      record->place = Place::kAway;
      record->weights = nullptr;
    }
    lists.Update(record.get());
  }
  weights = nullptr;  // freed under no lock
  FreeDropped();
  absl::MutexLock lock(&mu);
  --saving_;
  LoadWanted();
}

bool Residency::State::MakeSomeRoom() {
  std::vector<RecordPtr> victims;
  {
    absl::MutexLock lock(&mu);
    if (evictions_queued.empty() && saving_ > 0) {
      const auto gone = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) { return saving_ == 0; };
      mu.Await(absl::Condition(&gone));
      return true;
    }
    if (evictions_queued.empty()) {
      auto found = Victims(1, nullptr);
      if (!found) return false;
      victims = *std::move(found);
      evictions += static_cast<int64_t>(victims.size());
      QueueEviction(victims);
    }
  }
  EvictQueued();
  absl::MutexLock lock(&mu);
  // What could not be saved is back: there is no room in it.
  return victims.empty() || victims.front()->place != Place::kResident;
}

absl::Status Residency::State::WithRoom(absl::FunctionRef<absl::Status()> attempt) {
  // How much is missing is not known: more each time, so that few attempts do.
  int64_t to_borrow = kMinShrinkBytes;
  while (true) {
    absl::Status status = attempt();
    if (status.ok() || ReasonOf(status) != "OUT_OF_MEMORY") return status;
    if (MetadataOf(status).count(kNeverFits) > 0) return status;
    if (MakeSomeRoom()) continue;
    if (options.shrink_kv == nullptr || options.shrink_kv(to_borrow) == 0) return status;
    to_borrow = std::min(2 * to_borrow, kMaxShrinkBytes);
  }
}

int64_t Residency::State::GiveBack(int64_t wanted_bytes) {
  std::vector<RecordPtr> sent;
  {
    absl::MutexLock lock(&mu);
    sent = Idle(wanted_bytes, nullptr);
    evictions += static_cast<int64_t>(sent.size());
    QueueEviction(sent);
  }
  EvictQueued();
  absl::MutexLock lock(&mu);
  // Other threads may have taken some of them on.
  const auto have_gone = [&sent] {
    return std::none_of(sent.begin(), sent.end(),
                        [](const RecordPtr& record) { return record->place == Place::kEvicting; });
  };
  mu.Await(absl::Condition(&have_gone));
  return BytesThatLeft(sent);
}

int64_t Residency::State::Sleep() {
  std::vector<RecordPtr> sent;
  {
    absl::MutexLock lock(&mu);
    asleep = true;
    TakeBackLoads();
    std::vector<Record*> unused;
    for (const RecordList* list :
         {&lists.permanent(), &lists.kept(), &lists.idle_stored(), &lists.idle_hosted()}) {
      for (Record* record : list->all()) {
        if (record->pins == 0) unused.push_back(record);
      }
    }
    // Those that need a host copy get its room first.
    for (const bool is_stored : {false, true}) {
      for (Record* record : unused) {
        if ((record->reload != nullptr) != is_stored || !HasWayBack(*record)) continue;
        sent.push_back(record->shared_from_this());
        QueueEviction({&sent.back(), 1});
      }
    }
  }
  EvictQueued();
  absl::MutexLock lock(&mu);
  // Other threads may have taken some of them on.
  const auto have_gone = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    return evictions_queued.empty() && saving_ == 0;
  };
  mu.Await(absl::Condition(&have_gone));
  return BytesThatLeft(sent);
}

int64_t Residency::State::BytesThatLeft(absl::Span<const RecordPtr> sent) const {
  int64_t left = 0;
  for (const RecordPtr& record : sent) {
    if (record->place != Place::kResident) left += record->bytes;
  }
  return left;
}

int64_t Residency::State::HostRoom(const Record* spared) const {
  const bool spares = spared != nullptr && spared->in_copies.list != nullptr;
  return host_capacity - host_bytes + lists.droppable_bytes() -
         (spares ? spared->host_copy_bytes : 0);
}

bool Residency::State::HasWayBack(const Record& record) const {
  return record.reload != nullptr || record.host_copy != nullptr ||
         record.host_copy_bytes <= HostRoom(nullptr);
}

bool Residency::State::ReserveHostRoom(Record* record, const Record* spared) {
  if (record->has_host_room) return true;
  if (record->host_copy_bytes > HostRoom(spared)) return false;
  while (record->host_copy_bytes > host_capacity - host_bytes) {
    Record* const first = lists.FirstDroppable(spared);
    DORAD_CHECK(first != nullptr);
    DropCopy(first);
  }
  host_bytes += record->host_copy_bytes;
  record->has_host_room = true;
  return true;
}

void Residency::State::ReturnHostRoom(Record* record) {
  if (std::exchange(record->has_host_room, false)) host_bytes -= record->host_copy_bytes;
}

void Residency::State::DropCopy(Record* record) {
  if (record->host_copy == nullptr) return;
  dropped_.push_back(std::move(record->host_copy));
  --host_copies;
  lists.Update(record);
  ReturnHostRoom(record);
}

void Residency::State::FreeDropped() {
  std::vector<std::unique_ptr<const HostCopy>> copies;
  {
    absl::MutexLock lock(&mu);
    if (dropped_.empty()) return;
    copies.swap(dropped_);
    ++freeing_;
  }
  copies.clear();
  absl::MutexLock lock(&mu);
  --freeing_;
}

}  // namespace dorad::adapter
