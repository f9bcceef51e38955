// Checks that a listener still accepts connections. Pure functions and therefore thread-safe.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace dorad {

// Connects to `address` (host:port, [v6]:port or unix:PATH), sends `greeting` and waits for a sign
// that the server has accepted the connection: an answer, or a close. A refusal is an answer too,
// so the same greeting works with and without TLS. A connection in the kernel's backlog is no sign.
// UNAVAILABLE (LISTENER_SILENT) when there is no sign within `timeout`, for example because no
// descriptor is left.
absl::Status ProbeListener(const std::string& address, const std::string& greeting,
                           absl::Duration timeout);

// The first bytes of an HTTP/2 client: the preface and an empty SETTINGS frame.
std::string Http2Greeting();

}  // namespace dorad
