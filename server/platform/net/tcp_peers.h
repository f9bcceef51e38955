// The bytes that this process received over its TCP connections, by peer. Functions are
// thread-safe; a connection may close meanwhile.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace dorad {

// The descriptors of the connected TCP sockets by the name of their peer in gRPC's form:
// "ipv4:127.0.0.1:1234", "ipv6:%5B::1%5D:1234".
std::map<std::string, int> TcpPeers();

// The bytes that this process has read since the connection began; those that wait in the kernel do
// not count. nullopt: the descriptor is not a connection
// with this peer (any more).
std::optional<int64_t> BytesReadFromPeer(int fd, const std::string& peer);

}  // namespace dorad
