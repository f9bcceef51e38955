#include "server/platform/net/tcp_peers.h"

#include <arpa/inet.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cstddef>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dorad {
namespace {

// "" for anything but a connected TCP socket.
std::string PeerOf(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return "";
  char text[INET6_ADDRSTRLEN] = "";
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    inet_ntop(AF_INET, &v4.sin_addr, text, sizeof(text));
    return absl::StrCat("ipv4:", text, ":", ntohs(v4.sin_port));
  }
  if (address.ss_family != AF_INET6) return "";
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
  if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
    inet_ntop(AF_INET, &v6.sin6_addr.s6_addr[12], text, sizeof(text));
    return absl::StrCat("ipv4:", text, ":", ntohs(v6.sin6_port));
  }
  inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof(text));
  return absl::StrCat("ipv6:%5B", text, "%5D:", ntohs(v6.sin6_port));
}

}  // namespace

std::map<std::string, int> TcpPeers() {
  std::map<std::string, int> peers;
  std::error_code error;
  std::filesystem::directory_iterator entry("/proc/self/fd", error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const int fd = atoi(entry->path().filename().c_str());
    if (std::string peer = PeerOf(fd); !peer.empty()) peers[std::move(peer)] = fd;
  }
  return peers;
}

std::optional<int64_t> BytesReadFromPeer(int fd, const std::string& peer) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return std::nullopt;
  constexpr size_t kNeeded =
      offsetof(tcp_info, tcpi_bytes_received) + sizeof(info.tcpi_bytes_received);
  // The descriptor may belong to another connection by now.
  if (size < kNeeded || PeerOf(fd) != peer) return std::nullopt;
  int unread = 0;
  if (ioctl(fd, SIOCINQ, &unread) != 0) return std::nullopt;
  return static_cast<int64_t>(info.tcpi_bytes_received) - unread;
}

}  // namespace dorad
