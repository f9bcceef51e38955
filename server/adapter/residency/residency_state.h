// The books of a Residency: what makes room (residency_room.cc), and what comes next
// (residency_state.cc). Part of residency.cc alone. Thread-safe where a function does not require
// the lock.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/adapter/residency/residency.h"
#include "server/adapter/residency/residency_lists.h"
#include "server/adapter/residency/residency_record.h"

namespace dorad::adapter {

struct Residency::State : std::enable_shared_from_this<Residency::State> {
  using Record = ResidencyRecord;
  using Place = Record::Place;
  using RecordPtr = std::shared_ptr<Record>;

  explicit State(Options opts);

  // --- Room where weights are used. `spared`: a record whose host copy is not dropped for it;
  // nullptr: none.

  bool Fits(int64_t more) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Makes what is idle leave until so much more fits; false, and nothing leaves, when that is not
  // enough. What leaves has gone after EvictQueued.
  bool MakeRoom(int64_t more, const Record* spared = nullptr) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Whether there can be no room for these together, whatever leaves.
  bool NeverFit(absl::Span<Record* const> together) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Whether, with these, each of those that only host copies bring back can still be resident at
  // some time: two change places through the room of a third copy. Passes all of those.
  bool CanTakeTurns(const Record& added) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // OUT_OF_MEMORY for weights of so many bytes.
  absl::Status NoRoomFor(int64_t wanted_bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // They are to leave.
  void QueueEviction(absl::Span<const RecordPtr> records, const Record* spared = nullptr)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Saves and frees, on this thread, all that is to leave.
  void EvictQueued() ABSL_LOCKS_EXCLUDED(mu);
  absl::Status WithRoom(absl::FunctionRef<absl::Status()> attempt) ABSL_LOCKS_EXCLUDED(mu);
  int64_t GiveBack(int64_t wanted_bytes) ABSL_LOCKS_EXCLUDED(mu);
  // What could leave now. In constant time while there is room for host copies of all that need
  // one.
  int64_t IdleBytes() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  // --- Room for host copies.

  // From the store, or through a host copy that it has or that there is room for.
  bool HasWayBack(const Record& record) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Its memory is free after FreeDropped.
  void DropCopy(Record* record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void FreeDropped() ABSL_LOCKS_EXCLUDED(mu);

  // --- The way back.

  void Want(Record* record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void Unwant(Record* record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Loads what is wanted, in order, while there is room for it.
  void LoadWanted() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // As Residency's.
  int64_t Sleep() ABSL_LOCKS_EXCLUDED(mu);
  absl::Status Wake() ABSL_LOCKS_EXCLUDED(mu);
  // Loads that have not begun are wanted again; waits for the others. REQUIRES: asleep or
  // suspended.
  void TakeBackLoads() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Gets new users again.
  void StopDraining(Record* record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  const Options options;
  const int64_t host_capacity;
  mutable absl::Mutex mu;
  ResidencyLists lists ABSL_GUARDED_BY(mu);
  std::deque<Record*> wanted ABSL_GUARDED_BY(mu);
  std::vector<Record*> draining ABSL_GUARDED_BY(mu);
  std::deque<RecordPtr> evictions_queued ABSL_GUARDED_BY(mu);  // nobody has begun with it
  int64_t host_bytes ABSL_GUARDED_BY(mu) = 0;
  int host_copies ABSL_GUARDED_BY(mu) = 0;
  uint64_t clock ABSL_GUARDED_BY(mu) = 0;
  int64_t evictions ABSL_GUARDED_BY(mu) = 0;
  int64_t loads_from_host ABSL_GUARDED_BY(mu) = 0;
  int64_t loads_from_store ABSL_GUARDED_BY(mu) = 0;
  int under_way ABSL_GUARDED_BY(mu) = 0;  // loads that the executor has
  bool closed ABSL_GUARDED_BY(mu) = false;
  bool asleep ABSL_GUARDED_BY(mu) = false;
  bool suspended ABSL_GUARDED_BY(mu) = false;

 private:
  // For host copies, were all dropped that can be, but for that of `spared`.
  int64_t HostRoom(const Record* spared) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Those that would leave for so many bytes, the least recently used first; fewer, if no more can.
  std::vector<RecordPtr> Idle(int64_t wanted_bytes, const Record* spared)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // The same; nullopt: not enough.
  std::optional<std::vector<RecordPtr>> Victims(int64_t missing, const Record* spared)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Of records that were sent away: what could not be saved is back.
  int64_t BytesThatLeft(absl::Span<const RecordPtr> sent) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  bool ReserveHostRoom(Record* record, const Record* spared) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void ReturnHostRoom(Record* record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // False: nothing can leave, and nothing is leaving.
  bool MakeSomeRoom() ABSL_LOCKS_EXCLUDED(mu);
  void Evict(const RecordPtr& record) ABSL_LOCKS_EXCLUDED(mu);

  void BeginLoad(Record* record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  absl::StatusOr<std::shared_ptr<const AdapterWeights>> Load(const Record& record, bool from_host)
      ABSL_LOCKS_EXCLUDED(mu);
  void EndLoad(const RecordPtr& record, bool from_host,
               absl::StatusOr<std::shared_ptr<const AdapterWeights>> loaded)
      ABSL_LOCKS_EXCLUDED(mu);
  // When the first of those wanted has waited for too long: stops the use of the longest resident
  // ones, until what they leave is room enough.
  void Drain() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Bytes of what has a way back and need not be drained any more.
  int64_t BytesOnTheirWay(bool with_hosted) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Whether nothing that could make room is going to happen by itself.
  bool IsStuck() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  int loading_ ABSL_GUARDED_BY(mu) = 0;  // loads that have begun
  int saving_ ABSL_GUARDED_BY(mu) = 0;   // threads that are about to free weights
  int freeing_ ABSL_GUARDED_BY(mu) = 0;  // threads that are about to free host copies
  std::vector<std::unique_ptr<const HostCopy>> dropped_ ABSL_GUARDED_BY(mu);
};

}  // namespace dorad::adapter
