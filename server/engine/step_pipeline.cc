#include "server/engine/step_pipeline.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "server/platform/check.h"
#include "server/platform/metrics/metrics.h"

namespace dorad::engine {
namespace {

// The rows point into `wants`.
StepSequence RowsOf(const Chunk& chunk, std::vector<Request::Want>* wants) {
  const Sequence& s = *chunk.sequence;
  wants->push_back(s.request->WantOf(chunk));
  const Request::Want& want = wants->back();
  StepSequence rows;
  if (!chunk.draft.empty()) {
    rows.tokens = want.tokens;
  } else if (chunk.follows >= 0) {
    rows.tokens = absl::MakeConstSpan(&StepSequence::kUnknown, 1);
  } else {
    rows.tokens = absl::MakeConstSpan(s.tokens).subspan(chunk.position, chunk.count);
  }
  rows.follows = chunk.follows;
  rows.position = chunk.position;
  rows.pages = s.pages;
  rows.copy_from = chunk.copy_from;
  rows.state = s.recurrent;
  rows.state_from = chunk.state_from;
  if (chunk.row_of != nullptr) rows.row_of = chunk.row_of->chunk_index;
  rows.adapter = s.adapter_at(chunk.position);
  rows.images = s.images.get();
  rows.features = s.features;
  rows.samples = want.samples;
  rows.score = want.score ? &*want.score : nullptr;
  return rows;
}

}  // namespace

StepPipeline::StepPipeline(std::unique_ptr<ModelRunner> runner, Metrics* metrics)
    : runner_(std::move(runner)), metrics_(metrics) {
  // With three steps a token's source would be ambiguous (StepSequence::follows).
  DORAD_CHECK(runner_->max_steps_in_flight() == 1 || runner_->max_steps_in_flight() == 2);
}

ModelRunner& StepPipeline::runner() {
  DORAD_CHECK(empty());
  return *runner_;
}

bool StepPipeline::full() const {
  return static_cast<int>(in_flight_.size()) >= runner_->max_steps_in_flight();
}

absl::Status StepPipeline::Begin(std::vector<Chunk>* chunks, Instant now) {
  std::vector<Request::Want> wants;
  std::vector<StepSequence> rows;
  wants.reserve(chunks->size());  // rows point into it
  rows.reserve(chunks->size());
  for (const Chunk& chunk : *chunks) rows.push_back(RowsOf(chunk, &wants));
  absl::Status status = runner_->Begin(rows);
  // A runner with one step at a time computes it here, on this thread.
  const bool computes = runner_->max_steps_in_flight() == 1;
  metrics_->StepPhaseDone(computes ? StepPhase::kCompute : StepPhase::kLaunch,
                          Between(now, SteadyNow()));
  if (!status.ok()) return status;
  in_flight_.push_back({std::move(*chunks), now});
  ++steps_begun_;
  return status;
}

StepPipeline::Finished StepPipeline::Finish() {
  StepInFlight step = std::move(in_flight_.front());
  in_flight_.pop_front();
  Finished finished;
  const Instant waiting = SteadyNow();
  finished.outputs = runner_->Finish();
  finished.now = SteadyNow();
  metrics_->StepPhaseDone(StepPhase::kCompute, Between(waiting, finished.now));
  ++steps_finished_;
  finished.time = Between(std::max(step.begun, last_finished_), finished.now);
  last_finished_ = finished.now;
  if (finished.outputs.ok()) {
    Record(step.chunks, finished.time);
  } else {
    for (StepInFlight& behind : std::exchange(in_flight_, {})) {
      (void)runner_->Finish();
      step.chunks.insert(step.chunks.end(), behind.chunks.begin(), behind.chunks.end());
    }
  }
  finished.chunks = std::move(step.chunks);
  return finished;
}

void StepPipeline::Drop(const Sequence& sequence) {
  Chunk& chunk = in_flight_.back().chunks[sequence.chunk_index];
  DORAD_CHECK(chunk.sequence == &sequence);
  chunk.samples = false;
}

void StepPipeline::Record(const std::vector<Chunk>& chunks, absl::Duration time) {
  Metrics::Step step;
  step.time = time;
  absl::flat_hash_set<const adapter::LoadedAdapter*> adapters;
  for (const Chunk& chunk : chunks) {
    const Sequence& s = *chunk.sequence;
    const bool decode = chunk.position >= s.prompt_tokens;
    (decode ? step.decode_rows : step.prefill_rows) += chunk.count;
    const adapter::LoadedAdapter* const adapter = s.adapter_at(chunk.position);
    if (adapter != nullptr) adapters.insert(adapter);
  }
  step.distinct_adapters = static_cast<int>(adapters.size());
  metrics_->StepDone(step);
}

}  // namespace dorad::engine
