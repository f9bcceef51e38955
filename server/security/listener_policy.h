// The listener policy: a listener that other hosts can reach must be encrypted and authenticate its
// callers. A socket file is exempt: its mode (0660) restricts it. Asks the resolver for localhost;
// thread-safe.
#pragma once

#include "absl/status/status.h"
#include "server/platform/config/config.h"

namespace dorad::security {

// INVALID_ARGUMENT listing every problem: TLS_INCOMPLETE (a certificate without its key, or a
// client CA without either), LISTENER_NOT_ENCRYPTED, LISTENER_NOT_AUTHENTICATED (a listener of gRPC
// that is neither a socket file nor on a loopback address; security.allow_insecure allows both).
absl::Status CheckListenerPolicy(const ServerConfig& server, const SecurityConfig& security);

}  // namespace dorad::security
