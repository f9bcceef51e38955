#include "server/app/listener_health_check.h"

#include <sys/socket.h>

#include "server/platform/net/http_server.h"
#include "server/platform/net/listen_address.h"
#include "server/platform/net/listen_socket.h"
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
