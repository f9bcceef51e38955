#include "server/platform/net/socket_server.h"

#include <poll.h>
#include <sys/socket.h>

#include "server/platform/net/listen_address.h"
#include "server/platform/net/listen_socket.h"
#include "server/platform/net/unique_fd.h"
#include "tests/unit/support/test.h"

namespace dorad {
namespace {

// Sends every byte back; throws at "!".
class Echo final : public SocketServer::Connection {
 public:
  explicit Echo(UniqueFd fd) : fd_(std::move(fd)) {}

  int socket() const override { return fd_.get(); }
  short events() const override { return POLLIN; }
  Instant deadline() const override { return Instant::max(); }
  bool Advance() override {
    char byte = 0;
    if (recv(fd_.get(), &byte, 1, 0) != 1) return false;
    if (byte == '!') throw std::runtime_error("the byte is not wanted");
    return send(fd_.get(), &byte, 1, MSG_NOSIGNAL) == 1;
  }

 private:
  const UniqueFd fd_;
};

class SocketServerTest : public ::testing::Test {
 protected:
  void Serve(SocketServer::Options options) {
    auto listener = ListenTcp(*ParseListenAddress("127.0.0.1:0"));
    ASSERT_TRUE(listener.ok()) << listener.status();
    size_ = sizeof(name_);
    ASSERT_EQ(getsockname(listener->fd.get(), reinterpret_cast<sockaddr*>(&name_), &size_), 0);
    server_ = std::make_unique<SocketServer>(std::move(listener->fd), std::move(options));
  }

  UniqueFd Connect() const {
    UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&name_), size_), 0);
    return fd;
  }

  // The answer to one byte; "" when the server has closed the connection.
  static std::string Exchange(const UniqueFd& fd, char byte) {
    if (send(fd.get(), &byte, 1, MSG_NOSIGNAL) != 1) return "";
    char answer = 0;
    return recv(fd.get(), &answer, 1, 0) == 1 ? std::string(1, answer) : "";
  }

  sockaddr_storage name_ = {};
  socklen_t size_ = 0;
  std::unique_ptr<SocketServer> server_;
};

TEST_F(SocketServerTest, AnExceptionEndsItsConnectionAndNoOther) {
  Serve({.accept = [](UniqueFd fd, bool) { return std::make_unique<Echo>(std::move(fd)); }});
  const UniqueFd first = Connect(), second = Connect();
  EXPECT_EQ(Exchange(first, 'a'), "a");
  EXPECT_EQ(Exchange(second, '!'), "");
  EXPECT_EQ(Exchange(first, 'b'), "b");
  EXPECT_EQ(Exchange(Connect(), 'c'), "c");
}

TEST_F(SocketServerTest, AnExceptionWhileAcceptingClosesThatConnection) {
  bool throws = true;
  Serve({.accept = [&throws](UniqueFd fd, bool) -> std::unique_ptr<SocketServer::Connection> {
    if (std::exchange(throws, false)) throw std::runtime_error("no");
    return std::make_unique<Echo>(std::move(fd));
  }});
  EXPECT_EQ(Exchange(Connect(), 'a'), "");
  EXPECT_EQ(Exchange(Connect(), 'b'), "b");
}

TEST_F(SocketServerTest, WhenFullTheOldestMakesRoom) {
  Serve({.max_connections = 1, .accept = [](UniqueFd fd, bool has_room) {
           EXPECT_TRUE(has_room);
           return std::make_unique<Echo>(std::move(fd));
         }});
  const UniqueFd first = Connect();
  EXPECT_EQ(Exchange(first, 'a'), "a");
  const UniqueFd second = Connect();
  EXPECT_EQ(Exchange(second, 'b'), "b");
  EXPECT_EQ(Exchange(first, 'c'), "");
}

TEST_F(SocketServerTest, WhenFullAServerThatRefusesClosesTheNewConnection) {
  Serve({.max_connections = 1,
         .when_full = SocketServer::WhenFull::kRefuse,
         .accept = [](UniqueFd fd, bool has_room) -> std::unique_ptr<SocketServer::Connection> {
           if (!has_room) return nullptr;
           return std::make_unique<Echo>(std::move(fd));
         }});
  const UniqueFd first = Connect();
  EXPECT_EQ(Exchange(first, 'a'), "a");
  EXPECT_EQ(Exchange(Connect(), 'b'), "");
  EXPECT_EQ(Exchange(first, 'c'), "c");
}

}  // namespace
}  // namespace dorad
