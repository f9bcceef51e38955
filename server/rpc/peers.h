// Other servers: which of them may be asked for adapters and how, and the transfers to and from
// them.
//
// A transfer runs on a thread of its own and may wait: for the disk, for the network, for bytes
// that have not arrived yet. There are few of them, each moves gigabytes, and none may hold up a
// stream of tokens. Owned by App; outlives the gRPC server. Thread-safe.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/platform/instant.h"
#include "server/platform/net/listen_address.h"
#include "server/platform/net/network.h"
#include "server/platform/thread_pool.h"
#include "server/security/tls_files.h"

namespace dorad::rpc {

// UNAVAILABLE (PEER_UNAVAILABLE): another peer may do.
absl::Status PeerUnavailable(const std::string& message);

class Peers {
 public:
  struct Options {
    std::vector<std::string> allowed;             // as peers.allowed
    std::string token_file;                       // "": no token
    std::string ca_file;                          // "": no TLS
    const security::TlsFiles* own = nullptr;      // its certificate is shown to peers; borrowed
    bool allow_insecure = false;                  // a token may go to other hosts in plain text
    int max_transfers = 4;                        // in each direction
    int64_t bytes_per_second = 0;                 // of all transfers from here; 0: no limit
    absl::Duration patience = absl::Seconds(60);  // for the next byte
  };
  explicit Peers(const Options& options);

  absl::Duration patience() const { return options_.patience; }

  enum class Direction { kIn, kOut };
  // Runs a transfer on a thread. RESOURCE_EXHAUSTED (PEER_BUSY) with a retry hint when there are
  // enough in that direction.
  absl::Status Start(Direction direction, std::function<void()> transfer) ABSL_LOCKS_EXCLUDED(mu_);

  // Waits until so many bytes may be sent.
  void Pace(int64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);

  // A connection to a peer, with the token in `context`. Resolves the name and connects to an
  // address in `allowed` only, so that no caller can use this server to reach other hosts.
  // PERMISSION_DENIED (PEER_NOT_ALLOWED), UNAVAILABLE (PEER_UNAVAILABLE: the name does not
  // resolve), statuses of security::FileWatcher::Read. REQUIRES: `peer` has a host and a port.
  absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const ListenAddress& peer,
                                                         grpc::ClientContext* context) const;

 private:
  const Options options_;
  std::vector<Network> allowed_;
  absl::Mutex mu_;
  int running_[2] ABSL_GUARDED_BY(mu_) = {0, 0};  // by direction
  Instant next_send_ ABSL_GUARDED_BY(mu_);
  ThreadPool threads_;  // last: transfers use the others
};

}  // namespace dorad::rpc
