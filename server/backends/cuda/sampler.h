// Turns rows of logits on the device into the engine's requested outputs. Only results are copied
// to the host, once a step. Owned by the runner; confined to the engine thread.
//
// A step is Begin, any number of Sample and Score for its rows in order, End; then Finish, possibly
// after the End of the next step.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/isa/isa.h"
#include "kernels/sampling/sampling.h"
#include "server/backends/cuda/batch.h"
#include "server/backends/cuda/device.h"
#include "server/engine/model_runner.h"
#include "server/engine/step_batch.h"

namespace dorad::cuda {

class Sampler {
 public:
  // max_rows: of a call of Sample or Score. ledger and stream are borrowed.
  static absl::StatusOr<Sampler> Create(int64_t vocab_size, int64_t max_rows,
                                        kernels::KernelIsa isa, MemoryLedger* ledger,
                                        const Stream* stream);

  // Sends the parameters of the batch's samples and scores to the device, beside the stream's work:
  // the counts of penalties are up to 8 MB a step. Replaces a step that has begun and not ended.
  // REQUIRES: fewer than kStepsInFlight steps have ended and not finished; no launched work of a
  // replaced step is left.
  absl::Status Begin(const engine::StepBatch& batch,
                     absl::Span<const engine::StepSequence> sequences);
  // Launches the sampling of the next `rows` samples. logits: device, [rows, vocabulary] fp32, made
  // by earlier work of the stream.
  absl::Status Sample(int64_t rows, const float* logits);
  // The same for scores, which follow all samples.
  absl::Status Score(int64_t rows, const float* logits);
  // Starts the copy of the results. REQUIRES: all rows have been launched.
  absl::Status End();
  // The tokens of the last ended step, for later work of the stream.
  const SampledTokens& sampled() const { return steps_[(ended_ + 1) % kStepsInFlight].sampled; }

  // Waits for the oldest ended step. One output for each sequence, in the caller's order.
  absl::StatusOr<std::vector<engine::StepOutput>> Finish();

 private:
  // The requested output of a row.
  struct Row {
    size_t sequence = 0;
    bool token = false;  // else a score
    bool logprob = false;
    int32_t top = 0;
    int32_t chosen_begin = 0;
    int32_t chosen_count = 0;
  };
  // Offsets of a step's arrays: of its inputs, then of its results. Samples, then scores.
  struct Places {
    int64_t samples, scores, chosen, banned;
    int64_t conditional_bans, adjustments, allowed, biases, uses;
    int64_t tokens, logprobs, finite, top_ids, top_logprobs, chosen_logprobs;
  };
  // The same bytes on both sides.
  struct Buffers {
    int64_t bytes = 0;  // in use
    PinnedBuffer host;
    DeviceBuffer device;
  };
  struct Step {
    static absl::StatusOr<Step> Create();
    Event sent;  // the inputs have arrived
    Event done;  // and the results
    Buffers inputs;
    // Apart from the inputs: the next step reads the tokens while the inputs of the one after it
    // arrive.
    Buffers results;
    Places at{};
    std::vector<Row> rows;
    int32_t max_top = 0;
    bool adjusts = false;  // a row has adjustments or conditional bans
    kernels::SampleRows samples_are = kernels::SampleRows::kMixed;
    kernels::SampleRows scores_are = kernels::SampleRows::kMixed;
    size_t sequences = 0;
    int64_t samples = 0;   // of the rows; the others are scores
    int64_t launched = 0;  // of the rows
    SampledTokens sampled;

   private:
    Step(Event sent, Event done) : sent(std::move(sent)), done(std::move(done)) {}
  };
  struct Specs;

  Sampler(int64_t vocab_size, kernels::KernelIsa isa, DeviceBuffer workspace, MemoryLedger* ledger,
          const Stream* stream, Stream inputs, Step first, Step second)
      : vocab_size_(vocab_size),
        isa_(isa),
        workspace_(std::move(workspace)),
        ledger_(ledger),
        stream_(*stream),
        inputs_(std::move(inputs)),
        steps_{std::move(first), std::move(second)} {}

  // Makes room for `bytes`. Waits for the stream if there is too little: it may use the old ones.
  absl::Status Resize(Buffers* buffers, int64_t bytes) const;
  Step& begun() { return steps_[ended_ % kStepsInFlight]; }
  template <typename Params>
  absl::StatusOr<Params> NextRows(int64_t rows, const float* logits);

  const int64_t vocab_size_;
  const kernels::KernelIsa isa_;
  DeviceBuffer workspace_;
  MemoryLedger* const ledger_;
  const Stream& stream_;
  Stream inputs_;  // of their copies
  std::array<Step, kStepsInFlight> steps_;
  // Steps so far.
  uint64_t ended_ = 0;
  uint64_t finished_ = 0;
};

}  // namespace dorad::cuda
