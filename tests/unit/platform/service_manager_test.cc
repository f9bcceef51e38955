#include "server/platform/process/service_manager.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

// The manager's end of the notification socket.
class FakeManager {
 public:
  // name: as NOTIFY_SOCKET.
  explicit FakeManager(const std::string& name)
      : fd_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, name.data(), name.size());
    if (name[0] == '@') address.sun_path[0] = '\0';
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
    EXPECT_EQ(bind(fd_.get(), reinterpret_cast<const sockaddr*>(&address), length), 0);
    const timeval patience{20, 0};
    setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  }

  std::string Next() const {
    char buffer[512];
    const ssize_t n = recv(fd_.get(), buffer, sizeof(buffer), 0);
    return n < 0 ? "nothing came" : std::string(buffer, static_cast<size_t>(n));
  }

 private:
  const UniqueFd fd_;
};

std::string PathName() {
  const std::string path = absl::StrCat(::testing::TempDir(), "/notify", getpid());
  unlink(path.c_str());
  return path;
}

class ServiceManagerTest : public ::testing::TestWithParam<std::string> {};

TEST_P(ServiceManagerTest, TellsOfEachPhaseInOneDatagram) {
  const FakeManager manager(GetParam());
  ServiceManager us(GetParam(), absl::ZeroDuration());
  us.Ready("serving");
  EXPECT_EQ(manager.Next(), "READY=1\nSTATUS=serving");
  us.Reloading();
  EXPECT_THAT(manager.Next(), MatchesRegex("RELOADING=1\nMONOTONIC_USEC=[0-9]+"));
  us.Stopping("draining");
  EXPECT_EQ(manager.Next(), "STOPPING=1\nSTATUS=draining");
}

INSTANTIATE_TEST_SUITE_P(Names, ServiceManagerTest,
                         ::testing::Values(PathName(), absl::StrCat("@dorad-test-", getpid())),
                         [](const auto& info) { return info.index == 0 ? "Path" : "Abstract"; });

TEST(ServiceManagerWatchdogTest, KeepsAliveWhileTheServerLives) {
  const std::string name = absl::StrCat("@dorad-alive-", getpid());
  const FakeManager manager(name);
  std::atomic<int> asked{0};
  ServiceManager us(name, absl::Milliseconds(20));
  us.KeepAlive([&asked] { return ++asked != 2; });
  EXPECT_EQ(manager.Next(), "WATCHDOG=1");
  EXPECT_EQ(manager.Next(), "WATCHDOG=1");
  EXPECT_GE(asked, 3) << "the second time it did not live";
}

TEST(ServiceManagerWatchdogTest, NobodyIsToldWithoutASocketOrAWatchdog) {
  ServiceManager nobody("", absl::Milliseconds(1));
  nobody.Ready("serving");
  nobody.KeepAlive([] {
    ADD_FAILURE() << "nobody waits for it";
    return true;
  });
  const FakeManager manager(absl::StrCat("@dorad-unwatched-", getpid()));
  ServiceManager unwatched(absl::StrCat("@dorad-unwatched-", getpid()), absl::ZeroDuration());
  unwatched.KeepAlive([] {
    ADD_FAILURE() << "no watchdog";
    return true;
  });
  ServiceManager odd("no/absolute/path", absl::ZeroDuration());
  odd.Ready("serving");
}

TEST(ServiceManagerEnvironmentTest, IsTakenOutOfTheEnvironment) {
  const std::string name = absl::StrCat("@dorad-environment-", getpid());
  const FakeManager manager(name);
  setenv("NOTIFY_SOCKET", name.c_str(), 1);
  setenv("WATCHDOG_USEC", "20000", 1);
  setenv("WATCHDOG_PID", absl::StrCat(getpid()).c_str(), 1);
  const auto us = ServiceManager::FromEnvironment();
  for (const char* variable : {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}) {
    EXPECT_EQ(std::getenv(variable), nullptr);
  }
  us->KeepAlive([] { return true; });
  EXPECT_EQ(manager.Next(), "WATCHDOG=1");
}

TEST(ServiceManagerEnvironmentTest, AnotherProcessesWatchdogIsNotAnswered) {
  const std::string name = absl::StrCat("@dorad-other-", getpid());
  const FakeManager manager(name);
  setenv("NOTIFY_SOCKET", name.c_str(), 1);
  setenv("WATCHDOG_USEC", "1000", 1);
  setenv("WATCHDOG_PID", absl::StrCat(getpid() + 1).c_str(), 1);
  const auto us = ServiceManager::FromEnvironment();
  us->KeepAlive([] {
    ADD_FAILURE() << "not ours";
    return true;
  });
  us->Ready("serving");
  EXPECT_EQ(manager.Next(), "READY=1\nSTATUS=serving");
}

}  // namespace
}  // namespace dorad
