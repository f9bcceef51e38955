// The messages of the shared-memory socket. One message is one packet of a SOCK_SEQPACKET socket,
// whole or not at all. Numbers are little-endian.
//
//   registration, 104 bytes:     "DORADMEM", kind (u32), 0 (u32), size in bytes (u64), CUDA IPC
//                                handle (64 bytes), the GPU's UUID (16 bytes); for a memory file
//                                both are 0 and the packet carries its descriptor (SCM_RIGHTS)
//   weights request, 16 bytes:   "DORADGET", first piece (u64): requests pieces of the base model's
//                                weights; the first request begins the lease
//   answer:                      gRPC status code (u32), index of the memory or, for weights,
//   number
//                                of the packet's descriptors (u32; 0: no more pieces),
//                                session_token of the connection (16 bytes); after a refusal also
//                                its reason, a space and a message, and the connection ends
// Pure functions and therefore thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace dorad::shared_memory {

inline constexpr size_t kRegistrationBytes = 104;
inline constexpr size_t kWeightsRequestBytes = 16;
inline constexpr size_t kMaxPiecesAtOnce = 64;
inline constexpr size_t kSessionTokenBytes = 16;
inline constexpr size_t kMaxAnswerBytes = 512;
inline constexpr size_t kIpcHandleBytes = 64;
inline constexpr size_t kDeviceUuidBytes = 16;

enum class MemoryKind : uint32_t {
  kFile = 1,     // a memory file: memfd_create or shm_open
  kCudaIpc = 2,  // an allocation on a GPU: cudaIpcGetMemHandle
};

struct MemoryRegistration {
  MemoryKind kind = MemoryKind::kFile;
  uint64_t size = 0;
  std::array<std::byte, kIpcHandleBytes> ipc_handle = {};
  std::array<std::byte, kDeviceUuidBytes> device_uuid = {};
};

// num_fds: the number of received descriptors. INVALID_ARGUMENT (SHARED_MEMORY_MESSAGE_INVALID).
absl::StatusOr<MemoryRegistration> ParseRegistration(absl::Span<const std::byte> message,
                                                     size_t num_fds);

// Whether the message requests weights instead of registering memory.
bool IsWeightsRequest(absl::Span<const std::byte> message);
// Returns the first requested piece. INVALID_ARGUMENT (SHARED_MEMORY_MESSAGE_INVALID). REQUIRES:
// IsWeightsRequest(message).
absl::StatusOr<size_t> ParseWeightsRequest(absl::Span<const std::byte> message, size_t num_fds);

// refusal: OK when the memory was registered.
std::string FormatAnswer(uint32_t index, const std::string& session_token,
                         const absl::Status& refusal);

}  // namespace dorad::shared_memory
