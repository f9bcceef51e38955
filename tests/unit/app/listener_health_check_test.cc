#include "server/app/listener_health_check.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>
#include <thread>

#include "server/platform/net/http_server.h"
#include "server/platform/net/listen_address.h"
#include "server/platform/net/listen_socket.h"
#include "server/platform/net/unique_fd.h"
#include "tests/unit/support/test.h"

namespace dorad {
namespace {

constexpr char kGreeting[] = "GET /healthz HTTP/1.1\r\n\r\n";

TEST(ListenerHealthCheckTest, LeavesAServerAloneThatAnswers) {
  std::atomic<int> probes = 0, calls = 0;
  absl::Notification probed;
  const auto server = MetricsHttpServer::Start("127.0.0.1:0", {[] { return ""; },
                                                               [&] {
                                                                 if (++probes == 5) probed.Notify();
                                                                 return true;
                                                               },
                                                               [] { return true; }});
  ASSERT_TRUE(server.ok()) << server.status();
  {
    const ListenerHealthCheck check(absl::Milliseconds(10), {{(*server)->address(), kGreeting}},
                                    [&] { ++calls; });
    probed.WaitForNotification();
  }
  EXPECT_EQ(calls, 0);
}

TEST(ListenerHealthCheckTest, ReportsAListenerThatTakesNoConnectionsOnce) {
  std::string address;
  {
    auto closed = ListenTcp(*ParseListenAddress("127.0.0.1:0"));
    ASSERT_TRUE(closed.ok()) << closed.status();
    address = closed->address;
  }
  std::atomic<int> calls = 0;
  absl::Notification reported;
  {
    const ListenerHealthCheck check(absl::Milliseconds(10), {{address, kGreeting}}, [&] {
      ++calls;
      reported.Notify();
    });
    reported.WaitForNotification();
  }
  EXPECT_EQ(calls, 1);
}

// The second listener is away in two rounds of three. The first one is probed before it and moves
// it.
TEST(ListenerHealthCheckTest, AnAnswerMakesEarlierFailuresCountNoMore) {
  const std::string path = absl::StrCat(::testing::TempDir(), "health-", getpid(), ".sock");
  const std::string away = path + ".away";
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  path.copy(at.sun_path, sizeof(at.sun_path) - 1);
  const UniqueFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<const sockaddr*>(&at), sizeof(at)), 0);
  ASSERT_EQ(listen(listener.get(), 8), 0);
  std::thread acceptor([&listener] {
    while (UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)).ok()) {
    }
  });
  int rounds = 0;
  std::atomic<int> calls = 0;
  absl::Notification ended;
  const auto move = [&] {
    const int round = rounds++ % 3;
    if (round == 0) std::rename(path.c_str(), away.c_str());
    if (round == 2) std::rename(away.c_str(), path.c_str());
    if (rounds == 9) ended.Notify();
    return true;
  };
  const auto first =
      MetricsHttpServer::Start("127.0.0.1:0", {[] { return ""; }, move, [] { return true; }});
  ASSERT_TRUE(first.ok()) << first.status();
  {
    const ListenerHealthCheck check(
        absl::Milliseconds(1),
        {{(*first)->address(), kGreeting}, {absl::StrCat("unix:", path), kGreeting}}, [&] {
          ++calls;
          if (!ended.HasBeenNotified()) ended.Notify();
        });
    ended.WaitForNotification();
  }
  EXPECT_EQ(calls, 0);
  shutdown(listener.get(), SHUT_RDWR);
  acceptor.join();
  unlink(path.c_str());
  unlink(away.c_str());
}

TEST(ListenerHealthCheckTest, ReportsNothingAfterStop) {
  std::atomic<int> calls = 0;
  {
    ListenerHealthCheck check(absl::Milliseconds(1), {}, [&] { ++calls; });
    check.Stop();
  }
  EXPECT_EQ(calls, 0);
}

}  // namespace
}  // namespace dorad
