// Sends and receives packets with descriptors over a UNIX socket. Functions are thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/platform/net/unique_fd.h"

namespace dorad::shared_memory {

// A non-blocking listening SOCK_SEQPACKET socket whose file only its owner may use. Statuses of
// Listener::Start.
absl::StatusOr<UniqueFd> ListenUnix(const std::string& path);

struct Packet {
  enum class State { kNone, kWhole, kTooLong, kEnd };
  State state = State::kNone;
  std::vector<std::byte> bytes;
  std::vector<UniqueFd> fds;
};

// The next packet of a non-blocking socket; kTooLong: it, or its descriptors, were cut.
Packet ReceivePacket(int socket, size_t max_bytes);

// Sends a packet with at most kMaxSentFds descriptors; the receiver gets duplicates. False when the
// packet cannot be sent at once.
inline constexpr size_t kMaxSentFds = 64;
bool SendPacket(int socket, const std::string& bytes, absl::Span<const UniqueFd> fds = {});

}  // namespace dorad::shared_memory
