// GPU memory of another process on this host (CUDA IPC). The caller owns the objects; thread-safe.
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

  // Maps an allocation by its cudaIpcGetMemHandle (64 bytes), its GPU's UUID (16 bytes) and its
  // size. It stays mapped while the result lives. INVALID_ARGUMENT (SHARED_MEMORY_MEMORY_INVALID:
  // no such allocation, or a smaller one), FAILED_PRECONDITION (SHARED_MEMORY_DEVICE_UNSUPPORTED:
  // it lies on another GPU).
  absl::StatusOr<std::shared_ptr<const adapter::PeerMemory>> Open(
      absl::Span<const std::byte> ipc_handle, absl::Span<const std::byte> device_uuid,
      uint64_t size) const;

 private:
  class Memory;
  explicit PeerMemories(std::shared_ptr<const DeviceReader> reader) : reader_(std::move(reader)) {}

  const std::shared_ptr<const DeviceReader> reader_;
};

}  // namespace dorad::cuda
