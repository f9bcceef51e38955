// A listening TCP socket. Pure functions and therefore thread-safe.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "server/platform/net/listen_address.h"
#include "server/platform/net/unique_fd.h"

namespace dorad {

struct ListenSocket {
  UniqueFd fd;          // non-blocking, close-on-exec
  std::string address;  // host:port with the port in effect
};

// UNAVAILABLE (PORT_IN_USE, LISTEN_FAILED), INVALID_ARGUMENT (LISTEN_ADDRESS: an unknown host).
// Never shares a port with another process: a second server on the same port fails.
// REQUIRES: a host (not a socket file).
absl::StatusOr<ListenSocket> ListenTcp(const ListenAddress& address);

}  // namespace dorad
