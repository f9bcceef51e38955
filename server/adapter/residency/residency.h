// Which versions' weights lie where the model is computed (RAM, or a GPU's memory), and which of
// them make room for others.
//
// A version's weights are resident, leaving, away, or on their way back. Sequences use them from
// their first row to their end; what is in use stays. When room is needed the least recently used
// ones of the others go, if they can come back: from an image in host memory, which is made when
// they leave, or else from the store. Images are kept as long as there is room for them, also of
// weights that have come back (they need not be saved again); those go first, then the least
// recently used ones of what the store has.
//
// Who wants weights that are away asks again, and again, until they are back; they come in the
// order in which they were first asked for. Weights that are wanted for longer than `patience`
// starve: then as many of those in use as must go, the longest resident ones first, get no new
// users until they have gone. What has come back stays for the one who wanted it, for `patience` at
// most.
//
// Owned by App; entries may outlive it. Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/adapter/residency/adapter_weights.h"
#include "server/adapter/residency/host_copies.h"

namespace dorad::adapter {

class WeightsPin;
struct ResidencyRecord;

class Residency {
 public:
  // Builds a version's weights once more, the same ones. Runs on the executor.
  using Reload = std::function<absl::StatusOr<std::shared_ptr<const AdapterWeights>>()>;
  struct Options {
    int64_t max_bytes = 0;  // of weights that are resident or on their way; 0: no limit
    // Borrowed, outlives the entries. nullptr: there is no host memory for weights.
    HostCopies* images = nullptr;
    absl::Duration patience = absl::Seconds(2);
    // Makes room elsewhere when no idle weights can: is asked for so many bytes, returns how many
    // it gave. Called on any thread that brings or adds weights, under no lock. Null: there is
    // none.
    std::function<int64_t(int64_t)> shrink_kv;
    // Runs a task elsewhere (a loader thread): weights leave and come back there.
    std::function<void(std::function<void()>)> executor;
    // Of a clock that never jumps.
    std::function<absl::Time()> now = [] {
      return absl::UnixEpoch() +
             absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
    };
  };
  explicit Residency(Options options);
  ~Residency();
  // From now on nothing comes back. Waits for the reloads that are under way.
  void Close();

  class Entry;
  using Pins = std::vector<WeightsPin>;
  // Pins of all of these, which are entries of one Residency, or nullopt while some of the weights
  // are away or held back for others that starve; those are wanted then, and while they are the
  // next to come the rest stays. The error of a reload that has failed, once; the next call wants
  // the weights again. RESOURCE_EXHAUSTED (OUT_OF_MEMORY) for weights that would not fit together
  // beside those that never go.
  static absl::StatusOr<std::optional<Pins>> PinAll(absl::Span<Entry* const> entries);
  // Takes weights that were just built and that nobody uses yet. reload: null where only an image
  // can bring them back. pinned: they never go. Without room beside what is in use they leave at
  // once; if they cannot, RESOURCE_EXHAUSTED (OUT_OF_MEMORY). To be called on a thread on which
  // weights may be saved.
  absl::StatusOr<std::unique_ptr<Entry>> Add(std::shared_ptr<const AdapterWeights> weights,
                                             int64_t bytes, Reload reload, bool pinned = false);
  // Tries something that needs memory where weights lie, and again while it is OUT_OF_MEMORY and
  // idle weights can leave, which they do on this thread, or else the shrink_kv gives; but not when
  // it says that it never fits (kNeverFits).
  absl::Status WithRoom(absl::FunctionRef<absl::Status()> attempt);

  // Idle weights leave, the least recently used first, until so many bytes have gone or no more
  // can; returns how many have. To be called on a thread on which weights may be saved.
  int64_t GiveBack(int64_t wanted_bytes);

  // Everything leaves that has a way back, pinned weights too, and what comes anew leaves at once;
  // nothing comes back until Wake. Returns when they have gone, with their bytes. To be called on a
  // thread on which weights may be saved. REQUIRES: nobody uses weights until Wake.
  int64_t Sleep();
  // Returns when the pinned weights are back; with the failure of one that could not be brought,
  // and then all sleep on. While reloads are held they come later.
  absl::Status Wake();
  // Nothing is reloaded until ReleaseReloads, nor is any reload under way on return: a backend that
  // cannot build weights for a time needs that.
  void HoldReloads();
  void ReleaseReloads();

  struct Stats {
    int64_t bytes = 0;       // of what is resident or on its way
    int64_t idle_bytes = 0;  // of what GiveBack could make leave
    int64_t host_bytes = 0;  // of images
    int resident = 0;
    int away = 0;    // all others
    int images = 0;  // of resident weights, too
    int64_t evictions = 0;
    int64_t reloads_from_host = 0;
    int64_t reloads_from_store = 0;
  };
  Stats stats() const;

 private:
  friend class Entry;
  struct State;
  std::shared_ptr<State> state_;
};

// The right to compute with one version's weights. Move-only. Thread-compatible.
class WeightsPin {
 public:
  explicit WeightsPin(Residency::Entry* entry) : entry_(entry) {}
  WeightsPin(WeightsPin&& other) noexcept : entry_(std::exchange(other.entry_, nullptr)) {}
  WeightsPin& operator=(WeightsPin&& other) noexcept {
    std::swap(entry_, other.entry_);
    return *this;
  }
  WeightsPin(const WeightsPin&) = delete;
  WeightsPin& operator=(const WeightsPin&) = delete;
  ~WeightsPin();

 private:
  Residency::Entry* entry_;
};

// One version's weights. To be destroyed when nobody uses them any more.
class Residency::Entry {
 public:
  ~Entry();
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

  // REQUIRES: a use is held.
  const AdapterWeights& weights() const;
  bool resident() const;
  // Whether there is an image.
  bool in_host_memory() const;
  bool pinned() const;

 private:
  friend class Residency;
  friend class WeightsPin;
  Entry(std::shared_ptr<State> state, std::shared_ptr<ResidencyRecord> record)
      : state_(std::move(state)), record_(std::move(record)) {}

  const std::shared_ptr<State> state_;
  const std::shared_ptr<ResidencyRecord> record_;
};

}  // namespace dorad::adapter
