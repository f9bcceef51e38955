// The address of a listener: host:port, [v6]:port or unix:PATH. Plain values and pure functions and
// therefore thread-safe.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace dorad {

struct ListenAddress {
  std::string host;       // without brackets; empty for a socket file
  int port = 0;           // 0 picks one
  std::string unix_path;  // empty for host and port
};

// INVALID_ARGUMENT (LISTEN_ADDRESS). Does not resolve names.
absl::StatusOr<ListenAddress> ParseListenAddress(const std::string& text);

// Whether one process cannot listen on both. Does not resolve names other than "localhost"; paths
// are made absolute and compared as texts, without following links.
bool Collide(const ListenAddress& a, const ListenAddress& b);

// host:port, with brackets around an IPv6 address.
std::string JoinHostPort(const std::string& host, int port);

}  // namespace dorad
