// The shared-memory socket: processes of the server's own user on the same host share their memory
// with the server.
//
// gRPC carries neither descriptors nor the process's user, so this socket is separate. A process
// connects, registers memory (message.h) and gets a session_token; its publishes over gRPC name the
// memory by the session_token. A process can also lease the base model's weights while its
// connection is open. The socket file has mode 0600, and the kernel reports the user of each
// connection. One thread (SocketServer); connections, memories and time are bounded. Owned by
// Colocation. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/adapter/peft/peer_tensors.h"
#include "server/backends/weights_lease.h"
#include "server/colocation/message.h"
#include "server/colocation/session.h"

namespace dorad::shared_memory {

class Listener {
 public:
  struct Options {
    std::string path;
    size_t max_connections = 64;
    size_t max_files = 16;       // memory files of a connection: each is a descriptor of the server
    size_t max_memories = 1024;  // of a connection, of all kinds
    absl::Duration first_registration_time = absl::Seconds(5);
    // The user at the other end of a socket; nullopt: unknown.
    std::function<std::optional<uint32_t>(int socket)> peer_user = PeerUser;
    // Opens memory on a GPU; nullptr: no GPU. Runs on the listener's thread.
    std::function<absl::StatusOr<std::shared_ptr<const adapter::PeerMemory>>(
        const MemoryRegistration&)>
        open_device;
    // Leases the base model's weights; nullptr: not supported. It and the lease's deleter run on
    // the listener's thread and must not wait. UNAVAILABLE (SERVER_SLEEPING).
    std::function<absl::StatusOr<std::shared_ptr<const WeightsLease>>()> lease_weights;
  };

  // UNAVAILABLE (SHARED_MEMORY_SOCKET_IN_USE: another process listens there; LISTEN_FAILED),
  // INVALID_ARGUMENT (LISTEN_ADDRESS). Replaces a stale socket file.
  static absl::StatusOr<std::unique_ptr<Listener>> Start(Options options);
  // Ends every connection, joins the thread and removes the file.
  ~Listener();

  // The connection of a session_token, while it is open. NOT_FOUND (SHARED_MEMORY_SESSION_UNKNOWN).
  absl::StatusOr<std::shared_ptr<const Session>> Find(const std::string& session_token) const;

  struct Stats {
    int64_t connections = 0;
    int64_t memory_bytes = 0;  // registered by them
  };
  Stats stats() const;

  // By SO_PEERCRED.
  static std::optional<uint32_t> PeerUser(int socket);

 private:
  struct Impl;
  explicit Listener(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dorad::shared_memory
