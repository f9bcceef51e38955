// What goes over the handover socket (SOCK_SEQPACKET: one message is one packet, whole or not at
// all). Numbers are little-endian.
//
//   offer, 104 bytes:  "DORADMEM", kind (u32), 0 (u32), size in bytes (u64),
//                      CUDA IPC handle (64 bytes), the GPU's UUID (16 bytes);
//                      with a memory file both are 0 and its descriptor comes along (SCM_RIGHTS)
//   weights, 16 bytes: "DORADGET", first piece (u64): asks for the base model's weights, which are
//                      lent from the first of these on
//   answer:            gRPC status code (u32), index of the memory or, for weights, how many
//                      descriptors of pieces come along (u32; 0: there are no more), ticket of the
//                      connection (16 bytes); after a refusal also its reason, a space and a
//                      message, and the connection ends
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
inline constexpr size_t kWeightsRequestBytes = 16;
inline constexpr size_t kMaxPiecesAtOnce = 64;
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

// Whether the message asks for weights: then it is none of an offer.
bool IsWeightsRequest(absl::Span<const std::byte> message);
// The first piece that is wanted. INVALID_ARGUMENT (HANDOVER_MESSAGE_INVALID).
// REQUIRES: IsWeightsRequest(message).
absl::StatusOr<size_t> ParseWeightsRequest(absl::Span<const std::byte> message, size_t num_fds);

// `refusal`: OK when the memory was taken.
std::string FormatAnswer(uint32_t index, const std::string& ticket, const absl::Status& refusal);

}  // namespace dorad::handover
