#include "server/security/listener_policy.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/platform/error.h"
#include "server/platform/net/listen_address.h"

namespace dorad::security {
namespace {

bool IsLoopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    return (ntohl(v4->sin_addr.s_addr) >> 24) == 127;
  }
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

// Whether all addresses of the host are loopback. "localhost" has the addresses that the resolver
// gives it; other names count as exposed, because their addresses may change.
bool IsLoopback(const std::string& host) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  if (host != "localhost") hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  if (host.empty() || getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return false;
  bool all = true;
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    all = all && IsLoopback(each->ai_addr);
  }
  freeaddrinfo(found);
  return all;
}

bool IsExposed(const std::string& listen) {
  if (listen.empty()) return false;
  const absl::StatusOr<ListenAddress> address = ParseListenAddress(listen);
  return address.ok() && address->unix_path.empty() && !IsLoopback(address->host);
}

}  // namespace

absl::Status CheckListenerPolicy(const ServerConfig& server, const SecurityConfig& security) {
  std::vector<Violation> violations;
  const bool tls = !security.tls_cert.empty();
  if (tls != !security.tls_key.empty()) {
    violations.push_back({tls ? "security.tls_key" : "security.tls_cert", "TLS_INCOMPLETE",
                          "a certificate needs its key, and a key its certificate"});
  }
  if (!security.tls_client_ca.empty() && !tls) {
    violations.push_back({"security.tls_cert", "TLS_INCOMPLETE",
                          "clients show certificates (security.tls_client_ca) only to a server "
                          "that has one"});
  }
  const bool asks = !security.tokens_file.empty() || !security.tls_client_ca.empty();
  for (const auto& [key, listen] : {std::pair{"server.grpc_listen", server.grpc_listen},
                                    std::pair{"server.admin_listen", server.admin_listen}}) {
    if (security.allow_insecure || !IsExposed(listen)) continue;
    if (!tls) {
      violations.push_back(
          {key, "LISTENER_NOT_ENCRYPTED",
           absl::StrCat(listen,
                        " is reached from other hosts: set security.tls_cert and tls_key, "
                        "listen on 127.0.0.1 or a unix: socket behind a proxy, or say "
                        "security.allow_insecure: true")});
    }
    if (!asks) {
      violations.push_back(
          {key, "LISTENER_NOT_AUTHENTICATED",
           absl::StrCat(listen,
                        " is reached from other hosts, and anyone could publish adapters: "
                        "set security.tokens_file or security.tls_client_ca, or say "
                        "security.allow_insecure: true")});
    }
  }
  if (violations.empty()) return absl::OkStatus();
  return MakeInvalid("security", std::move(violations));
}

}  // namespace dorad::security
