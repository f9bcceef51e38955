// The rows of a tower's products: patches or tokens in chunks, all with one adapter, or of the base
// model. Owned by the encoder and uploaded again in every call; confined to the engine thread.
#pragma once

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/backends/cuda/adapter.h"
#include "server/backends/cuda/adapter_slots.h"
#include "server/backends/cuda/batch.h"
#include "server/backends/cuda/device.h"

namespace dorad::cuda {

class VisionRows {
 public:
  // All are borrowed.
  VisionRows(AdapterSlots* slots, MemoryLedger* ledger, const Stream* stream)
      : slots_(*slots), ledger_(ledger), stream_(*stream) {}

  // Of products: so many rows, and whether they are those of a module, which an adapter may change.
  using Sizes = std::set<std::pair<int64_t, bool>>;

  // adapter: nullptr for the base model. Ordered with the stream's work. REQUIRES: the work of the
  // upload before has ended.
  absl::Status Upload(const Sizes& sizes, const CudaAdapterWeights* adapter);

  // REQUIRES: the last Upload's sizes have it.
  const LinearRows& Find(int64_t rows, bool of_module) const;

 private:
  AdapterSlots& slots_;
  MemoryLedger* const ledger_;
  const Stream& stream_;
  bool adapted_ = false;  // in the last upload
  PinnedBuffer host_;
  DeviceBuffer device_;
  std::vector<LinearRows> rows_;
};

}  // namespace dorad::cuda
