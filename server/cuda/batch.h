// Any step's rows on the device: what StepBatch says, as arrays that the kernels read.
// Owned by the runner and reused for every step. Confined to the engine thread.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/decoder/rows.h"
#include "kernels/dora/factors.h"
#include "server/cuda/adapter.h"
#include "server/cuda/adapter_slots.h"
#include "server/cuda/device.h"
#include "server/engine/model_runner.h"
#include "server/engine/step_batch.h"

namespace dorad::cuda {

// Rows [begin, end) of a product use one adapter's factors (null, slot -1: the base model).
struct AdapterRange {
  const CudaAdapterWeights* weights = nullptr;
  int slot = -1;
  int64_t begin = 0;
  int64_t end = 0;
};

// The rows of a product and their adapters, on the host and on the device.
struct LinearRows {
  int64_t rows = 0;
  std::vector<AdapterRange> ranges;
  kernels::AdapterTable table;
  const CUtensorMap* maps = nullptr;  // of the table
  kernels::RowSegments segments;
};

// Rows whose logits are wanted, in pieces that are computed one after another.
struct LogitsBlock {
  absl::Span<const engine::WantedRow> wanted;
  const int32_t* row_indices = nullptr;  // device, of the step's rows; null: all of them, in order
  LinearRows linear;
};

// Gives each adapter its slot; copies that fill slots are in order with the stream's work.
absl::StatusOr<std::vector<AdapterRange>> ToRanges(
    absl::Span<const engine::StepBatch::AdapterRows> rows, AdapterSlots* slots,
    const Stream& stream);

class DeviceBatch {
 public:
  // slots is borrowed. max_logits_rows: of one LogitsBlock.
  DeviceBatch(MemoryLedger* ledger, AdapterSlots* slots, int64_t max_logits_rows)
      : ledger_(ledger), slots_(*slots), max_logits_rows_(max_logits_rows) {}

  // Copies the step's arrays to the device, in order with `stream`'s work. REQUIRES: the work of
  // the upload before has ended. Borrows `batch` until the next upload.
  absl::Status Upload(const engine::StepBatch& batch,
                      absl::Span<const engine::StepSequence> sequences, const Stream& stream);

  const kernels::StepRows& rows() const { return rows_; }
  const LinearRows& linear() const { return linear_; }
  const std::vector<LogitsBlock>& samples() const { return samples_; }
  const std::vector<LogitsBlock>& scores() const { return scores_; }

 private:
  class Writer;

  absl::Status MakeBlocks(absl::Span<const engine::WantedRow> rows,
                          absl::Span<const engine::StepSequence> sequences, const Stream& stream,
                          std::vector<LogitsBlock>* blocks);

  MemoryLedger* const ledger_;
  AdapterSlots& slots_;
  const int64_t max_logits_rows_;
  PinnedBuffer host_;
  DeviceBuffer device_;
  kernels::StepRows rows_;
  LinearRows linear_;
  std::vector<LogitsBlock> samples_;
  std::vector<LogitsBlock> scores_;
};

}  // namespace dorad::cuda
