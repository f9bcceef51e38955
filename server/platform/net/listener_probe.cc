#include "server/platform/net/listener_probe.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "server/platform/error.h"
#include "server/platform/instant.h"
#include "server/platform/net/listen_address.h"
#include "server/platform/net/unique_fd.h"

namespace dorad {
namespace {

absl::Status Silent(const std::string& address, const std::string& why) {
  return MakeError(absl::StatusCode::kUnavailable, "LISTENER_SILENT",
                   absl::StrCat(address, ": ", why));
}

std::string ErrnoText() { return std::strerror(errno); }

// Waits until the socket is ready for `events`; false after the deadline.
bool Await(int fd, short events, Instant deadline) {
  while (true) {
    const absl::Duration left = std::max(absl::ZeroDuration(), Between(SteadyNow(), deadline));
    pollfd polled{fd, events, 0};
    const int ready = poll(&polled, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1);
    if (ready > 0) return true;
    if (ready == 0) return false;
    if (errno != EINTR) return false;
  }
}

// A connected or connecting socket; not ok() with errno set.
UniqueFd StartConnect(const sockaddr* to, socklen_t length) {
  UniqueFd fd(socket(to->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.ok()) return fd;
  if (connect(fd.get(), to, length) == 0 || errno == EINPROGRESS) return fd;
  const int error = errno;
  fd = UniqueFd();
  errno = error;
  return fd;
}

UniqueFd StartConnect(const ListenAddress& address) {
  if (!address.unix_path.empty()) {
    sockaddr_un to{};
    to.sun_family = AF_UNIX;
    std::memcpy(to.sun_path, address.unix_path.data(),
                std::min(address.unix_path.size(), sizeof(to.sun_path) - 1));
    return StartConnect(reinterpret_cast<const sockaddr*>(&to), sizeof(to));
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  // connect() takes a wildcard address for this host.
  const int failed =
      getaddrinfo(address.host.c_str(), absl::StrCat(address.port).c_str(), &hints, &found);
  if (failed != 0) {
    errno = failed == EAI_SYSTEM ? errno : EADDRNOTAVAIL;
    return UniqueFd();
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(found, freeaddrinfo);
  return StartConnect(found->ai_addr, found->ai_addrlen);
}

}  // namespace

std::string Http2Greeting() {
  // Length 0, type SETTINGS, no flags, stream 0.
  return std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") + std::string("\0\0\0\4\0\0\0\0\0", 9);
}

absl::Status ProbeListener(const std::string& address, const std::string& greeting,
                           absl::Duration timeout) {
  DORAD_ASSIGN_OR_RETURN(const ListenAddress parsed, ParseListenAddress(address));
  const Instant deadline = FromNow(timeout);
  const UniqueFd fd = StartConnect(parsed);
  if (!fd.ok()) return Silent(address, ErrnoText());
  if (!Await(fd.get(), POLLOUT, deadline)) return Silent(address, "no connection in time");
  int error = 0;
  socklen_t length = sizeof(error);
  getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) return Silent(address, std::strerror(error));
  // Fits into an empty socket's buffer. An end of the connection counts as an answer, too.
  const ssize_t sent = send(fd.get(), greeting.data(), greeting.size(), MSG_NOSIGNAL);
  if (sent < 0 && errno != EPIPE && errno != ECONNRESET) return Silent(address, ErrnoText());
  if (!Await(fd.get(), POLLIN, deadline)) return Silent(address, "no answer in time");
  return absl::OkStatus();
}

}  // namespace dorad
