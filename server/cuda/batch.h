// A step's rows on the device: what StepBatch says, as arrays that the kernels read.
// Owned by the runner and reused for every step. Confined to the engine thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/decoder/rows.h"
#include "kernels/dora/factors.h"
#include "server/cuda/adapter.h"
#include "server/cuda/device.h"
#include "server/engine/model_runner.h"
#include "server/engine/step_batch.h"

namespace dorad::cuda {

// Rows [begin, end) of a product use one adapter's factors (null: the base model). On the host: for
// the forms that launch once for each range.
struct AdapterRange {
  const CudaAdapterWeights* weights = nullptr;
  int64_t begin = 0;
  int64_t end = 0;
};

std::vector<AdapterRange> ToRanges(absl::Span<const engine::StepBatch::AdapterRows> rows);

class DeviceBatch {
 public:
  // modules: of the base model.
  DeviceBatch(MemoryLedger* ledger, int modules) : ledger_(ledger), modules_(modules) {}

  // Copies the step's arrays to the device, in order with `stream`'s work. The pages and tokens are
  // read before this returns.
  absl::Status Upload(const engine::StepBatch& batch,
                      absl::Span<const engine::StepSequence> sequences, const Stream& stream);

  const kernels::StepRows& rows() const { return rows_; }
  const kernels::AdapterTable& adapters() const { return adapters_; }
  const kernels::RowSegment* segments() const { return segments_; }
  const int32_t* num_segments() const { return num_segments_; }
  const std::vector<AdapterRange>& ranges() const { return ranges_; }

 private:
  MemoryLedger* const ledger_;
  const int modules_;
  PinnedBuffer host_;
  DeviceBuffer device_;
  kernels::StepRows rows_;
  kernels::AdapterTable adapters_;
  const kernels::RowSegment* segments_ = nullptr;
  const int32_t* num_segments_ = nullptr;
  std::vector<AdapterRange> ranges_;
};

}  // namespace dorad::cuda
