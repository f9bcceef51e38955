// What goes over the handover socket (SOCK_SEQPACKET: one message is one packet, whole or not at
// all). Numbers are little-endian.
//
//   offer, 104 bytes:  "DORADMEM", kind (u32), 0 (u32), size in bytes (u64),
//                      CUDA IPC handle (64 bytes), the GPU's UUID (16 bytes);
//                      with a memory file both are 0 and its descriptor comes along (SCM_RIGHTS)
//   answer:            gRPC status code (u32), index of the memory (u32), ticket of the connection
//                      (16 bytes); after a refusal also its reason, a space and a message, and
//                      the connection ends
// Pure functions, hence thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace dorad::handover {

inline constexpr size_t kOfferBytes = 104;
inline constexpr size_t kTicketBytes = 16;
inline constexpr size_t kMaxAnswerBytes = 512;
inline constexpr size_t kIpcHandleBytes = 64;
inline constexpr size_t kDeviceUuidBytes = 16;

enum class MemoryKind : uint32_t {
  kFile = 1,     // a memory file: memfd_create or shm_open
  kCudaIpc = 2,  // an allocation on a GPU: cudaIpcGetMemHandle
};

struct Offer {
  MemoryKind kind = MemoryKind::kFile;
  uint64_t size = 0;
  std::array<std::byte, kIpcHandleBytes> ipc_handle = {};
  std::array<std::byte, kDeviceUuidBytes> device_uuid = {};
};

// `num_fds`: descriptors that came along. INVALID_ARGUMENT (HANDOVER_MESSAGE_INVALID).
absl::StatusOr<Offer> ParseOffer(absl::Span<const std::byte> message, size_t num_fds);

// `refusal`: OK when the memory was taken.
std::string FormatAnswer(uint32_t index, const std::string& ticket, const absl::Status& refusal);

}  // namespace dorad::handover
