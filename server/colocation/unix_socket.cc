#include "server/colocation/unix_socket.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::shared_memory {
namespace {

constexpr int kBacklog = 16;
// One is valid; more are received only to be closed.
constexpr size_t kMaxFds = 4;

absl::Status Failed(const std::string& path, int error) {
  return MakeError(absl::StatusCode::kUnavailable, "LISTEN_FAILED",
                   absl::StrCat("cannot listen on ", path, ": ", std::strerror(error)));
}

UniqueFd NewSocket() {
  return UniqueFd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

// Whether the file is the socket of a dead process.
bool IsLeftOver(const sockaddr_un& address) {
  struct stat info;
  if (lstat(address.sun_path, &info) != 0 || !S_ISSOCK(info.st_mode)) return false;
  const UniqueFd probe = NewSocket();
  return probe.ok() &&
         connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 &&
         errno == ECONNREFUSED;
}

}  // namespace

absl::StatusOr<UniqueFd> ListenUnix(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path) ||
      path.find('\0') != std::string::npos) {
    return MakeError(absl::StatusCode::kInvalidArgument, "LISTEN_ADDRESS",
                     absl::StrCat("a socket's path has 1 to ", sizeof(address.sun_path) - 1,
                                  " bytes, not ", path.size()));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  UniqueFd fd = NewSocket();
  // The file gets the mode of the socket: at no moment can other users connect.
  if (!fd.ok() || fchmod(fd.get(), 0600) != 0) return Failed(path, errno);
  const auto* name = reinterpret_cast<const sockaddr*>(&address);
  int error = bind(fd.get(), name, sizeof(address)) == 0 ? 0 : errno;
  if (error == EADDRINUSE && IsLeftOver(address) && unlink(path.c_str()) == 0) {
    error = bind(fd.get(), name, sizeof(address)) == 0 ? 0 : errno;
  }
  if (error == EADDRINUSE) {
    return MakeError(absl::StatusCode::kUnavailable, "SHARED_MEMORY_SOCKET_IN_USE",
                     absl::StrCat("cannot listen on ", path, ": the file is in use"));
  }
  if (error != 0) return Failed(path, error);
  if (listen(fd.get(), kBacklog) != 0) return Failed(path, errno);
  return fd;
}

Packet ReceivePacket(int socket, size_t max_bytes) {
  Packet packet;
  packet.bytes.resize(max_bytes);
  iovec into = {packet.bytes.data(), packet.bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))];
  msghdr message = {};
  message.msg_iov = &into;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return packet;
  packet.state = n <= 0 ? Packet::State::kEnd : Packet::State::kWhole;
  if (n < 0) return packet;
  packet.bytes.resize(static_cast<size_t>(n));
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      packet.fds.emplace_back(fd);
    }
  }
  if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) packet.state = Packet::State::kTooLong;
  return packet;
}

bool SendPacket(int socket, const std::string& bytes, absl::Span<const UniqueFd> fds) {
  DORAD_CHECK(fds.size() <= kMaxSentFds);
  iovec from = {const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxSentFds * sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &from;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    for (size_t i = 0; i < fds.size(); ++i) {
      const int fd = fds[i].get();
      std::memcpy(CMSG_DATA(part) + i * sizeof(int), &fd, sizeof(int));
    }
  }
  ssize_t n = -1;
  do {
    n = sendmsg(socket, &message, MSG_NOSIGNAL);
  } while (n < 0 && errno == EINTR);
  return n == static_cast<ssize_t>(bytes.size());
}

}  // namespace dorad::shared_memory
