#include "server/security/listener_policy.h"

#include <arpa/inet.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/platform/error.h"
#include "server/platform/net/listen_address.h"

namespace dorad::security {
namespace {

// Names are not resolved: their addresses may change.
bool IsLoopback(const std::string& host) {
  if (host == "localhost") return true;
  in_addr v4;
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6;
  return inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
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
