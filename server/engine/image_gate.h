// Admits sequences to a step if the features of their images are there, and keeps features for
// later sequences. Between steps one image is computed at a time, in the pieces of the runner; if
// no step is in flight, the runner may compute several that wait. Confined to the engine thread;
// owned by EngineLoop.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/images.h"
#include "server/engine/model_runner.h"
#include "server/engine/sequence.h"

namespace dorad {
class Metrics;
}

namespace dorad::engine {

class ImageGate {
 public:
  // max_bytes: of the features that are kept. runner and metrics are borrowed.
  ImageGate(ModelRunner* runner, int64_t max_bytes, Metrics* metrics)
      : runner_(*runner), max_bytes_(max_bytes), metrics_(*metrics) {}

  // Call before each schedule.
  void BeginStep() { missing_.clear(); }
  // Whether the features of all images that the sequence has yet to compute are there; if so, the
  // sequence holds them. Of the sequences that wait, only waiting() holds any.
  bool MayRun(Sequence* sequence);
  // Of the sequences that wait, the one whose image has begun, otherwise the first one in the
  // current schedule; nullptr: none waits.
  Sequence* waiting() const { return missing_.empty() ? nullptr : missing_.front().sequence; }
  // Computes its first missing image, or a piece of it. alone: no step is in flight; then also
  // images behind it, of the same adapter. The runner's statuses; a failure is that of waiting().
  absl::Status Encode(bool alone);
  // Drops all features that no sequence holds.
  void Clear();
  int64_t bytes() const { return bytes_; }

 private:
  using Features = std::shared_ptr<const ImageFeatures>;
  struct Entry {
    Features features;
    std::list<std::string>::iterator place;  // in order_
  };
  struct Missing {
    Sequence* sequence = nullptr;  // waits for it
    std::string name;              // of the features
    const Image* image = nullptr;
    const adapter::LoadedAdapter* adapter = nullptr;
  };

  // Of the image that is being computed.
  struct Pieces {
    std::string name;
    absl::Duration time;
  };

  Features Find(const std::string& name);
  // Keeps them, however many bytes they have, and drops others for them.
  void Store(std::vector<std::pair<std::string, Features>> computed);

  ModelRunner& runner_;
  const int64_t max_bytes_;
  Metrics& metrics_;
  absl::flat_hash_map<std::string, Entry> entries_;
  std::list<std::string> order_;  // least recently used first
  int64_t bytes_ = 0;
  // In the current schedule's order, but for an image that has begun: it is the first.
  std::vector<Missing> missing_;
  Pieces pieces_;
};

}  // namespace dorad::engine
