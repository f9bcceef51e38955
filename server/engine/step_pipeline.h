// The runner's steps in flight. Turns chunks into rows, collects outputs in order and times each
// step. Confined to the engine thread; owned by EngineLoop.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/model_runner.h"
#include "server/engine/request.h"
#include "server/engine/sequence.h"

namespace dorad {
class Metrics;
}

namespace dorad::engine {

class StepPipeline {
 public:
  // metrics is borrowed.
  StepPipeline(std::unique_ptr<ModelRunner> runner, Metrics* metrics);

  bool empty() const { return in_flight_.empty(); }
  bool full() const;
  // For work between steps. REQUIRES: empty().
  ModelRunner& runner();
  uint64_t steps_finished() const { return steps_finished_; }
  // Steps that have begun, and those that have finished or failed.
  uint64_t steps_begun() const { return steps_begun_; }
  uint64_t steps_landed() const { return steps_begun_ - in_flight_.size(); }

  // Begins a step at `now` and takes its chunks. A failure leaves them to the caller. REQUIRES:
  // !full().
  absl::Status Begin(std::vector<Chunk>* chunks, Instant now);

  struct Finished {
    std::vector<Chunk> chunks;
    // One output for each chunk, or the step's failure. A failure also fails the later steps, which
    // depend on it: `chunks` includes theirs.
    absl::StatusOr<std::vector<StepOutput>> outputs;
    absl::Duration time;  // since its begin or the end of the step before
    Instant now;
  };
  // The oldest step. REQUIRES: !empty().
  Finished Finish();
  // The sequence's chunk in the step that began last samples nothing any more.
  void Drop(const Sequence& sequence);

 private:
  struct StepInFlight {
    std::vector<Chunk> chunks;
    Instant begun;
  };
  void Record(const std::vector<Chunk>& chunks, absl::Duration time);

  const std::unique_ptr<ModelRunner> runner_;
  Metrics* const metrics_;
  std::deque<StepInFlight> in_flight_;  // oldest first
  Instant last_finished_;
  uint64_t steps_begun_ = 0;
  uint64_t steps_finished_ = 0;
};

}  // namespace dorad::engine
