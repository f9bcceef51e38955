// From rows of logits on the device to what the engine asked of them. Only results cross to the
// host. Confined to the engine thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/cuda/device.h"
#include "server/engine/model_runner.h"
#include "server/engine/step_batch.h"

namespace dorad::cuda {

class Sampler {
 public:
  // ledger and stream are borrowed.
  Sampler(int64_t vocab_size, MemoryLedger* ledger, const Stream* stream)
      : vocab_size_(vocab_size), ledger_(ledger), stream_(*stream) {}

  // logits: device, [rows.size(), vocabulary] fp32, row i of rows[i], made by earlier work of the
  // stream. Fills the rows' sequences' outputs, which are in the caller's order; waits for them.
  absl::Status Sample(absl::Span<const engine::WantedRow> rows, const float* logits,
                      absl::Span<const engine::StepSequence> sequences,
                      std::vector<engine::StepOutput>* outputs);
  // The same for rows whose targets' log-probabilities are wanted. A sequence's rows come in order.
  absl::Status Score(absl::Span<const engine::WantedRow> rows, const float* logits,
                     absl::Span<const engine::StepSequence> sequences,
                     std::vector<engine::StepOutput>* outputs);

 private:
  struct Wanted;  // what is asked of a row
  struct Places;  // where a call's arrays lie

  template <typename Spec, typename Launch>
  absl::Status Run(absl::Span<const engine::WantedRow> rows, const std::vector<Wanted>& wanted,
                   std::vector<Spec>& specs, Launch launch,
                   std::vector<engine::StepOutput>* outputs);

  const int64_t vocab_size_;
  MemoryLedger* const ledger_;
  const Stream& stream_;
  PinnedBuffer host_;
  DeviceBuffer device_;
};

}  // namespace dorad::cuda
