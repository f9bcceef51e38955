// The gRPC listeners: our services, health, reflection and channelz. Owned by App. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "server/rpc/services.h"
#include "server/security/tls_files.h"

namespace dorad::rpc {

class Server {
 public:
  struct Options {
    std::string listen;        // host:port, [v6]:port or unix:PATH; port 0 picks one
    std::string admin_listen;  // for AdapterService, ControlService and channelz; "": the same
    int64_t max_message_bytes = 64 << 20;
    int64_t max_concurrent_streams = 1024;
    // Borrowed; of TCP listeners. nullptr: no TLS.
    const security::TlsFiles* tls = nullptr;
    // Callers must authenticate. gRPC's own reflection and channelz do not authenticate, read any
    // caller's request, and channelz lists the connections: they are then served at admin_listen
    // only.
    bool asks_callers = false;
  };
  // Starts to serve. services is borrowed. UNAVAILABLE (PORT_IN_USE, LISTEN_FAILED),
  // INVALID_ARGUMENT (LISTEN_ADDRESS).
  static absl::StatusOr<std::unique_ptr<Server>> Start(const Options& options, Services* services);
  // Cancels all running calls.
  ~Server();

  // The address with the port in effect.
  const std::string& address() const;
  // "" without an admin listener.
  const std::string& admin_address() const;

  // Health of "", of the listener's own services and of "readiness" ("liveness" stays).
  void SetServing(bool serving);
  // Health of "liveness".
  void SetAlive(bool alive);

  struct DrainTimes {
    absl::Duration delay;  // health is NOT_SERVING, but requests are still accepted
    absl::Duration timeout;
    absl::Duration grace;
  };
  // Health turns NOT_SERVING; after `delay` new requests are refused. Running requests, loads of
  // adapters and other changes of the registry continue at full speed until their answers have been
  // sent or `timeout` has passed; loads that wait for sleeping weights are not waited for. The
  // rest, and requests frozen by a pause, are aborted and have `grace` to reach the clients. A
  // notification of `hurry` skips delay and timeout. Once.
  void Drain(const DrainTimes& times, const absl::Notification& hurry);
  // Closes the listeners; calls that have not ended within `grace` are cancelled. Once.
  void Shutdown(absl::Duration grace);

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dorad::rpc
