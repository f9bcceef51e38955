// The books of a Residency: what is where, what makes room, what comes next. Part of residency.cc
// alone. Thread-safe where a function does not require the lock.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
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
#include "server/adapter/residency.h"

namespace dorad::adapter {

// Guarded by State::mu, but for `here` while a use is held.
struct Residency::Entry::Weights {
  enum class Place { kResident, kLeaving, kAway, kComing };

  std::shared_ptr<const AdapterWeights> here;  // while kResident and kLeaving
  int64_t bytes = 0;
  std::unique_ptr<const WeightsImage> image;
  int64_t image_bytes = std::numeric_limits<int64_t>::max();  // there is no room for images
  bool has_image_room = false;  // of image_bytes, for `image` or for one that is to be saved
  Recall recall;                // nullptr: the store does not have it
  bool pinned = false;
  Place place = Place::kAway;
  int uses = 0;
  uint64_t last_use = 0;   // a count that rises
  uint64_t came = 0;       // likewise
  bool draining = false;   // gets no new users
  bool wanted = false;     // is in State::wanted
  bool destroyed = false;  // the entry is gone
  bool begun = false;      // of kComing: the recall has begun
  absl::Time wanted_since;
  // Recalled for somebody who has not come for it yet: until then it stays.
  absl::Time kept_until = absl::InfinitePast();
  absl::Status failure;  // of the last recall, until somebody was told

  bool takes_users() const { return place == Place::kResident && !draining; }
};

struct Residency::State : std::enable_shared_from_this<Residency::State> {
  using Weights = Entry::Weights;
  using Place = Weights::Place;
  using WeightsPtr = std::shared_ptr<Weights>;

  explicit State(Options opts);

  // --- Room where weights are used.

  bool Fits(int64_t more) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Makes what is idle leave until so much more fits; false, and nothing leaves, when that is not
  // enough. What leaves has gone after LeaveAll.
  bool MakeRoom(int64_t more) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Whether there can be no room for these together, whatever leaves.
  bool NeverFit(absl::Span<Weights* const> together) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Whether, with these, each of those that only images bring back can still be resident at some
  // time: two change places through the room of a third image.
  bool CanTakeTurns(const Weights& added) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // OUT_OF_MEMORY for weights of so many bytes.
  absl::Status NoRoomFor(int64_t wanted_bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Counts weights in that are leaving as soon as they came.
  void SendAway(absl::Span<const WeightsPtr> weights) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // As Residency's.
  int64_t Sleep() ABSL_LOCKS_EXCLUDED(mu);
  absl::Status Wake() ABSL_LOCKS_EXCLUDED(mu);
  // Recalls that have not begun are wanted again; waits for the others. REQUIRES: asleep or held.
  void TakeBackRecalls() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Saves and frees, on this thread, all that is to leave.
  void LeaveAll() ABSL_LOCKS_EXCLUDED(mu);
  absl::Status WithRoom(absl::FunctionRef<absl::Status()> attempt) ABSL_LOCKS_EXCLUDED(mu);
  int64_t GiveBack(int64_t wanted_bytes) ABSL_LOCKS_EXCLUDED(mu);
  // What could leave now.
  int64_t IdleBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  // --- Room for images.

  // From the store, or through an image that it has or that there is room for.
  bool HasWayBack(const Weights& weights) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  bool ReserveImage(Weights* weights) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Its memory is free after FreeDropped.
  void DropImage(Weights* weights) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void FreeDropped() ABSL_LOCKS_EXCLUDED(mu);

  // --- The way back.

  void Want(Weights* weights) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void Unwant(Weights* weights) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Brings what is wanted, in order, while there is room for it.
  void BringWanted() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  const Options options;
  const int64_t host_capacity;
  mutable absl::Mutex mu;
  std::vector<WeightsPtr> all ABSL_GUARDED_BY(mu);
  std::deque<Weights*> wanted ABSL_GUARDED_BY(mu);
  std::deque<WeightsPtr> leaving ABSL_GUARDED_BY(mu);  // nobody has begun with it
  int64_t bytes ABSL_GUARDED_BY(mu) = 0;
  int64_t host_bytes ABSL_GUARDED_BY(mu) = 0;
  uint64_t clock ABSL_GUARDED_BY(mu) = 0;
  int64_t evictions ABSL_GUARDED_BY(mu) = 0;
  int64_t recalls_from_host ABSL_GUARDED_BY(mu) = 0;
  int64_t recalls_from_store ABSL_GUARDED_BY(mu) = 0;
  int under_way ABSL_GUARDED_BY(mu) = 0;  // recalls that the executor has
  bool closed ABSL_GUARDED_BY(mu) = false;
  bool asleep ABSL_GUARDED_BY(mu) = false;
  bool held ABSL_GUARDED_BY(mu) = false;  // as HoldRecalls says

 private:
  bool IsIdle(const Weights& weights) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Those that would leave for so many bytes, the least recently used first; fewer, if no more can.
  std::vector<WeightsPtr> Idle(int64_t wanted_bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // The same; nullopt: not enough.
  std::optional<std::vector<WeightsPtr>> Victims(int64_t missing) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Of weights that were sent away: what could not be saved is back.
  int64_t BytesThatLeft(absl::Span<const WeightsPtr> sent) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void Evict(absl::Span<const WeightsPtr> victims) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  bool IsDroppable(const Weights& weights) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // For images, were all dropped that can be.
  int64_t HostRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void ReturnImageRoom(Weights* weights) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // False: nothing can leave, and nothing is leaving.
  bool MakeSomeRoom() ABSL_LOCKS_EXCLUDED(mu);
  void Leave(const WeightsPtr& weights) ABSL_LOCKS_EXCLUDED(mu);
  void Bring(Weights* weights) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  absl::StatusOr<std::shared_ptr<const AdapterWeights>> Recalled(const Weights& weights,
                                                                 bool from_host)
      ABSL_LOCKS_EXCLUDED(mu);
  void Arrive(const WeightsPtr& weights, bool from_host,
              absl::StatusOr<std::shared_ptr<const AdapterWeights>> recalled)
      ABSL_LOCKS_EXCLUDED(mu);
  // When the first of those wanted has waited for too long: stops the use of the longest resident
  // ones, until what they leave is room enough.
  void Drain() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Whether nothing that could make room is going to happen by itself.
  bool IsStuck() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  int recalling_ ABSL_GUARDED_BY(mu) = 0;  // recalls that have begun
  int saving_ ABSL_GUARDED_BY(mu) = 0;     // threads that are about to free weights
  int freeing_ ABSL_GUARDED_BY(mu) = 0;    // threads that are about to free images
  std::vector<std::unique_ptr<const WeightsImage>> dropped_ ABSL_GUARDED_BY(mu);
};

}  // namespace dorad::adapter
