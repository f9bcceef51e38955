#include "server/platform/net/listen_socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad {
namespace {

constexpr int kBacklog = 128;

absl::Status Failed(const ListenAddress& address, int error) {
  const std::string where = JoinHostPort(address.host, address.port);
  if (error == EADDRINUSE) {
    return MakeError(absl::StatusCode::kUnavailable, "PORT_IN_USE",
                     absl::StrCat("cannot listen on ", where, ": the port is in use"));
  }
  return MakeError(absl::StatusCode::kUnavailable, "LISTEN_FAILED",
                   absl::StrCat("cannot listen on ", where, ": ", std::strerror(error)));
}

int PortOf(int fd) {
  sockaddr_storage name = {};
  socklen_t size = sizeof(name);
  DORAD_CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&name), &size) == 0);
  return ntohs(name.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&name)->sin6_port
                                          : reinterpret_cast<sockaddr_in*>(&name)->sin_port);
}

// 0 or an errno.
int Bind(const addrinfo& info, UniqueFd* out) {
  UniqueFd fd(socket(info.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.ok()) return errno;
  // SO_REUSEADDR lets a restart take a port in TIME_WAIT; SO_REUSEPORT would let two servers share
  // the port, each with half of the scrapes.
  const int on = 1;
  (void)setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (info.ai_family == AF_INET6) {
    (void)setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
  }
  if (bind(fd.get(), info.ai_addr, info.ai_addrlen) != 0) return errno;
  if (listen(fd.get(), kBacklog) != 0) return errno;
  *out = std::move(fd);
  return 0;
}

}  // namespace

absl::StatusOr<ListenSocket> ListenTcp(const ListenAddress& address) {
  DORAD_CHECK(!address.host.empty());
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failure =
      getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (failure != 0) {
    return MakeError(absl::StatusCode::kInvalidArgument, "LISTEN_ADDRESS",
                     absl::StrCat("cannot listen on ", JoinHostPort(address.host, address.port),
                                  ": ", gai_strerror(failure)));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> infos(found, freeaddrinfo);
  // A name may have several addresses, and this machine may lack some of them; reports the first
  // one's error.
  int first_error = 0;
  for (const addrinfo* info = infos.get(); info != nullptr; info = info->ai_next) {
    ListenSocket socket;
    const int error = Bind(*info, &socket.fd);
    if (error == 0) {
      socket.address = JoinHostPort(address.host, PortOf(socket.fd.get()));
      return socket;
    }
    if (first_error == 0 || error == EADDRINUSE) first_error = error;
    if (error == EADDRINUSE) break;
  }
  return Failed(address, first_error);
}

}  // namespace dorad
