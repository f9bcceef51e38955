// Copies of a trainer's tensors, made on their GPU.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "server/adapter/peft/device_tensors.h"
#include "server/backends/cuda/device.h"
#include "server/backends/cuda/device_reader.h"

namespace dorad::cuda {

// Waits for the copies. `ledger` (kind "loading") is borrowed and outlives the result.
// RESOURCE_EXHAUSTED (OUT_OF_MEMORY). REQUIRES: adapter::LiesOnDevice(peer), names are different.
absl::StatusOr<std::unique_ptr<adapter::DeviceTensors>> CopyTensors(
    const adapter::PeerTensors& peer, std::shared_ptr<const DeviceReader> reader,
    MemoryLedger* ledger);

}  // namespace dorad::cuda
