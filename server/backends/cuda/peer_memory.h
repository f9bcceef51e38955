// Memory that another process of this host has on this server's GPU (CUDA IPC).
// Objects are owned by whoever makes them; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/adapter/peft/peer_tensors.h"
#include "server/backends/cuda/device_reader.h"

namespace dorad::cuda {

class PeerMemories {
 public:
  static absl::StatusOr<std::unique_ptr<PeerMemories>> Create();
  ~PeerMemories();

  // An allocation by what cudaIpcGetMemHandle says of it (64 bytes), its GPU's UUID (16 bytes) and
  // its size. It stays mapped as long as the result lives,. INVALID_ARGUMENT
  // (SHARED_MEMORY_MEMORY_INVALID: no such allocation, or a smaller one), FAILED_PRECONDITION
  // (SHARED_MEMORY_DEVICE_UNSUPPORTED: it lies on another GPU).
  absl::StatusOr<std::shared_ptr<const adapter::PeerMemory>> Open(
      absl::Span<const std::byte> ipc_handle, absl::Span<const std::byte> device_uuid,
      uint64_t size) const;

 private:
  class Memory;
  explicit PeerMemories(std::shared_ptr<const DeviceReader> reader) : reader_(std::move(reader)) {}

  const std::shared_ptr<const DeviceReader> reader_;
};

}  // namespace dorad::cuda
