#include "server/platform/net/listener_probe.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "server/platform/net/listen_address.h"
#include "server/platform/net/listen_socket.h"
#include "tests/unit/support/test.h"

namespace dorad {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(20);

ListenSocket ListenSomewhere() {
  const auto address = ParseListenAddress("127.0.0.1:0");
  auto socket = ListenTcp(*address);
  EXPECT_TRUE(socket.ok()) << socket.status();
  return *std::move(socket);
}

// Probes a listener that does `serve` with the connection it takes.
absl::Status Probe(const std::function<void(int)>& serve) {
  const ListenSocket listener = ListenSomewhere();
  std::thread server([&] {
    int fd = -1;
    while (fd < 0) fd = accept4(listener.fd.get(), nullptr, nullptr, SOCK_CLOEXEC);
    serve(fd);
    close(fd);
  });
  const absl::Status status = ProbeListener(listener.address, Http2Greeting(), kPatience);
  server.join();
  return status;
}

TEST(ListenerProbeTest, AnAnswerIsASignOfLife) {
  std::string heard;
  const absl::Status status = Probe([&heard](int fd) {
    char buffer[256];
    const ssize_t n = recv(fd, buffer, sizeof(buffer), 0);
    heard.assign(buffer, static_cast<size_t>(n));
    send(fd, "x", 1, 0);
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(heard, Http2Greeting());
  EXPECT_EQ(heard.size(), 24 + 9u);
}

TEST(ListenerProbeTest, SoIsARefusalOfTheGreeting) {
  EXPECT_TRUE(Probe([](int) {}).ok());
}

TEST(ListenerProbeTest, ABacklogIsNoSignOfLife) {
  const ListenSocket listener = ListenSomewhere();
  const absl::Status status =
      ProbeListener(listener.address, Http2Greeting(), absl::Milliseconds(50));
  EXPECT_EQ(ReasonOf(status), "LISTENER_SILENT");
  EXPECT_THAT(std::string(status.message()), HasSubstr(listener.address));
}

TEST(ListenerProbeTest, NorIsAPortThatNobodyListensOn) {
  std::string address;
  {
    const ListenSocket listener = ListenSomewhere();
    address = listener.address;
  }
  EXPECT_EQ(ReasonOf(ProbeListener(address, "", kPatience)), "LISTENER_SILENT");
  EXPECT_EQ(ReasonOf(ProbeListener("unix:/no/such/socket", "", kPatience)), "LISTENER_SILENT");
  EXPECT_EQ(ReasonOf(ProbeListener("nowhere", "", kPatience)), "LISTEN_ADDRESS");
}

TEST(ListenerProbeTest, FindsASocketFileAndAWildcardAddress) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/probe", getpid(), ".sock");
  unlink(path.c_str());
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::strncpy(name.sun_path, path.c_str(), sizeof(name.sun_path) - 1);
  const UniqueFd file(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(bind(file.get(), reinterpret_cast<const sockaddr*>(&name), sizeof(name)), 0);
  ASSERT_EQ(listen(file.get(), 8), 0);
  std::thread server([&] { close(accept(file.get(), nullptr, nullptr)); });
  EXPECT_TRUE(ProbeListener("unix:" + path, Http2Greeting(), kPatience).ok());
  server.join();
  unlink(path.c_str());

  const auto any = ParseListenAddress("0.0.0.0:0");
  const auto listener = ListenTcp(*any);
  ASSERT_TRUE(listener.ok()) << listener.status();
  std::thread other([&] {
    int fd = -1;
    while (fd < 0) fd = accept4(listener->fd.get(), nullptr, nullptr, SOCK_CLOEXEC);
    close(fd);
  });
  EXPECT_TRUE(ProbeListener(listener->address, Http2Greeting(), kPatience).ok());
  other.join();
}

}  // namespace
}  // namespace dorad
