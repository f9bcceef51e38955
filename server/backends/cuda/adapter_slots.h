// The table of adapters on the device: a slot holds the kernels' data on one adapter's factors. It
// is filled when a step first uses the adapter and kept while there is room. Confined to the engine
// thread.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/dora/factors.h"
#include "server/backends/cuda/adapter.h"
#include "server/backends/cuda/device.h"

namespace dorad::cuda {

class AdapterSlots {
 public:
  // slots: at least the number of distinct adapters in one step.
  static absl::StatusOr<AdapterSlots> Create(int slots, int modules, MemoryLedger* ledger);

  // Begins a step: slots without an Assign in it may be refilled.
  void BeginStep() { ++step_; }
  // The adapter's slot in this step. A copy that fills it is ordered with `stream`'s work.
  absl::StatusOr<int> Assign(const CudaAdapterWeights& weights, const Stream& stream);

  kernels::AdapterTable table() const { return {memory_.as<kernels::DoraFactors>(), modules_}; }
  // Two for each element of the table.
  const CUtensorMap* maps() const { return memory_.as<CUtensorMap>(maps_at_); }

 private:
  struct Slot {
    uint64_t adapter = 0;  // CudaAdapterWeights::id; 0: empty
    uint64_t step = 0;     // of the last use
  };

  AdapterSlots(int slots, int modules) : modules_(modules), slots_(slots) {}

  int modules_;
  std::vector<Slot> slots_;
  DeviceBuffer memory_;
  int64_t maps_at_ = 0;
  uint64_t step_ = 0;
};

}  // namespace dorad::cuda
