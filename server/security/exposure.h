// Whether a configuration may be served: nothing that listens beyond this host may be without
// encryption or without asking who calls. Pure function, hence thread-safe.
#pragma once

#include "absl/status/status.h"
#include "server/base/config.h"

namespace dorad::security {

// INVALID_ARGUMENT listing every problem: TLS_INCOMPLETE (a certificate without its key, or a
// client CA without either), LISTENER_NOT_ENCRYPTED, LISTENER_NOT_AUTHENTICATED (a listener of gRPC
// that is neither a socket file nor on a loopback address; security.allow_insecure allows both).
absl::Status CheckExposure(const ServerConfig& server, const SecurityConfig& security);

}  // namespace dorad::security
