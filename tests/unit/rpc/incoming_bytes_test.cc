#include "server/rpc/incoming_bytes.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/platform/net/tcp_peers.h"
#include "server/platform/net/unique_fd.h"
#include "tests/unit/support/test.h"

namespace dorad::rpc {
namespace {

constexpr int64_t kMost = 1000;

// A connection within the process. The server's side reads what arrives and forgets it.
class IncomingBytesTest : public ::testing::Test {
 protected:
  IncomingBytesTest() {
    const UniqueFd listener(socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(listener.get(), generic, size), 0);
    EXPECT_EQ(listen(listener.get(), 1), 0);
    EXPECT_EQ(getsockname(listener.get(), generic, &size), 0);
    client_ = UniqueFd(socket(AF_INET, SOCK_STREAM, 0));
    EXPECT_EQ(connect(client_.get(), generic, size), 0);
    server_ = UniqueFd(accept(listener.get(), nullptr, nullptr));
    EXPECT_EQ(getsockname(client_.get(), generic, &size), 0);
    peer_ = absl::StrCat("ipv4:127.0.0.1:", ntohs(address.sin_port));
  }

  void Send(int64_t bytes) {
    std::vector<char> piece(16 << 10);
    while (bytes > 0) {
      const auto next = static_cast<size_t>(std::min<int64_t>(bytes, std::ssize(piece)));
      ASSERT_EQ(send(client_.get(), piece.data(), next, 0), static_cast<ssize_t>(next));
      ASSERT_EQ(recv(server_.get(), piece.data(), next, MSG_WAITALL), static_cast<ssize_t>(next));
      bytes -= static_cast<int64_t>(next);
    }
  }

  // Sends until the message is told.
  void SendUntil(const absl::Notification& told) {
    while (!told.WaitForNotificationWithTimeout(absl::Milliseconds(1))) Send(256 << 10);
  }

  UniqueFd client_, server_;
  std::string peer_;
  IncomingBytes bytes_;
};

TEST_F(IncomingBytesTest, ThePeersOfTheProcessAreFoundWithWhatTheySent) {
  const std::map<std::string, int> peers = TcpPeers();
  ASSERT_TRUE(peers.contains(peer_));
  EXPECT_EQ(peers.at(peer_), server_.get());
  EXPECT_EQ(BytesReadFromPeer(server_.get(), peer_), 0);
  Send(12345);
  EXPECT_EQ(BytesReadFromPeer(server_.get(), peer_), 12345);
  EXPECT_EQ(BytesReadFromPeer(client_.get(), peer_), std::nullopt) << "its peer is the server";
  EXPECT_EQ(BytesReadFromPeer(-1, peer_), std::nullopt);
}

TEST_F(IncomingBytesTest, AMessageThatGrowsBeyondItsBoundIsTold) {
  absl::Notification told;
  IncomingMessage message(&bytes_, peer_, kMost);
  message.Start([&] { told.Notify(); });
  SendUntil(told);
  message.Stop();
}

TEST_F(IncomingBytesTest, MessagesThatWereHandedOverCountNoMore) {
  absl::Notification told;
  IncomingMessage waiting(&bytes_, peer_, kMost);
  waiting.Start([&] { told.Notify(); });
  IncomingMessage large(&bytes_, peer_, 1 << 20);
  // Each is within its bound, but all of them are not within one bound.
  for (int i = 0; i < 64; ++i) {
    large.Start([] { ADD_FAILURE() << "it was within its bound"; });
    Send(512 << 10);
    large.Take(512 << 10);
  }
  large.Stop();
  EXPECT_FALSE(told.HasBeenNotified());
  SendUntil(told);
}

TEST_F(IncomingBytesTest, AnotherConnectionsBytesDoNotCount) {
  absl::Notification told;
  IncomingMessage other(&bytes_, "ipv4:127.0.0.1:1", kMost);
  other.Start([] { ADD_FAILURE() << "nothing came over this connection"; });
  IncomingMessage message(&bytes_, peer_, kMost);
  message.Start([&] { told.Notify(); });
  SendUntil(told);
}

TEST_F(IncomingBytesTest, LargeMessagesContinueWhileASmallOneIsTold) {
  absl::Notification told;
  IncomingMessage large(&bytes_, peer_, 4 << 20);
  large.Start([] { ADD_FAILURE() << "a small one was there to end"; });
  IncomingMessage small(&bytes_, peer_, kMost);
  small.Start([&] { told.Notify(); });
  SendUntil(told);
  large.Stop();
}

}  // namespace
}  // namespace dorad::rpc
