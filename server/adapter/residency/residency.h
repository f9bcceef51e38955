// Which versions' weights lie in the memory of the device that computes the model (RAM for the
// CPU), and which of them make room for others.
//
// A version's weights are resident, being evicted, away, or being loaded. A sequence pins its
// weights from its first row to its end; pinned weights stay. When room is needed the least
// recently used of the others are evicted, if they can come back: from a copy in host memory, made
// when they are evicted, or else from the store. A host copy is kept while there is room for it,
// also of weights that came back (they need not be saved again); such copies are dropped first,
// then the least recently used ones of versions that the store has.
//
// A caller that needs absent weights asks again until they are there; weights are loaded in the
// order of the first requests. Weights that are wanted for longer than `patience` starve: then the
// longest resident ones of those in use get no new users until they are evicted. Loaded weights
// stay for the caller that wanted them, for `patience` at most.
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
    int64_t max_bytes = 0;  // of weights that are resident or being loaded; 0: no limit
    // Borrowed, outlives the entries. nullptr: there is no host memory for weights.
    HostCopies* host_copies = nullptr;
    absl::Duration patience = absl::Seconds(2);
    // Takes so many bytes from the KV cache when no idle weights are left; returns the bytes it
    // gave. Called under no lock, on any thread that loads or adds weights. Null: the KV cache
    // gives nothing.
    std::function<int64_t(int64_t)> shrink_kv;
    // Runs a task on a loader thread: weights are evicted and loaded there.
    std::function<void(std::function<void()>)> executor;
    // Of a clock that never jumps.
    std::function<absl::Time()> now = [] {
      return absl::UnixEpoch() +
             absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
    };
  };
  explicit Residency(Options options);
  ~Residency();
  // Nothing is loaded from now on. Waits for the loads that are under way.
  void Close();

  class Entry;
  using Pins = std::vector<WeightsPin>;
  // Pins all entries; they belong to one Residency. nullopt while some of the weights are away, or
  // make room for others that starve: these are wanted from then on, and while they are the next
  // to be loaded the rest stays. The error of a failed load, once; the next call wants the weights
  // again. RESOURCE_EXHAUSTED (OUT_OF_MEMORY) when the weights do not fit together beside those
  // that are never evicted.
  static absl::StatusOr<std::optional<Pins>> PinAll(absl::Span<Entry* const> entries);
  // Takes new weights that have no user yet. reload: null if only a host copy can bring them back.
  // pinned: they are never evicted. Without room beside the weights in use they are evicted at
  // once; if they cannot be, RESOURCE_EXHAUSTED (OUT_OF_MEMORY). Saves weights on the calling
  // thread.
  absl::StatusOr<std::unique_ptr<Entry>> Add(std::shared_ptr<const AdapterWeights> weights,
                                             int64_t bytes, Reload reload, bool pinned = false);
  // Tries something that needs device memory. After OUT_OF_MEMORY it evicts idle weights on this
  // thread, or else shrinks the KV cache, and tries again; but not after an error that says
  // kNeverFits.
  absl::Status WithRoom(absl::FunctionRef<absl::Status()> attempt);

  // Evicts idle weights, the least recently used first, until so many bytes are free or no more can
  // be; returns the bytes. Saves weights on the calling thread.
  int64_t GiveBack(int64_t wanted_bytes);

  // Evicts all weights that can come back, pinned ones too, and new ones at once; nothing is loaded
  // until Wake. Returns their bytes when they are gone. Saves weights on the calling thread.
  // REQUIRES: no weights are in use until Wake.
  int64_t Sleep();
  // Returns when the pinned weights are back, or with the failure of one of them; then all sleep
  // on. While loads are suspended the pinned weights come later.
  absl::Status Wake();
  // No load begins until Resume, and none is under way on return: while the base weights are gone
  // no adapter's norms can be computed.
  void Suspend();
  void Resume();

  struct Stats {
    int64_t bytes = 0;       // resident or being loaded
    int64_t idle_bytes = 0;  // that GiveBack could free
    int64_t host_bytes = 0;  // of host copies
    int resident = 0;
    int away = 0;         // all others
    int host_copies = 0;  // also of resident weights
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
