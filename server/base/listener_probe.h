// Whether a listener still takes connections. Pure functions, hence thread-safe.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace dorad {

// Connects to `address` (host:port, [v6]:port or unix:PATH), sends `greeting` and waits for any
// sign that the process at the other end has taken the connection: an answer, or its end. Whatever
// the listener makes of the greeting is one, so the same greeting does with and without TLS. What
// the kernel does alone, such as finishing the handshake into the backlog, is none. UNAVAILABLE
// (LISTENER_SILENT) when there is no sign within `timeout`, as when no descriptor is left.
absl::Status ProbeListener(const std::string& address, const std::string& greeting,
                           absl::Duration timeout);

// What an HTTP/2 client says first: the preface and an empty SETTINGS frame.
std::string Http2Greeting();

}  // namespace dorad
