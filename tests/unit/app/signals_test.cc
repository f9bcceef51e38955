#include "server/app/signals.h"

#include <signal.h>
#include <unistd.h>

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

// Signals block signals and end processes: each test runs in a process of its own.
class SignalsDeathTest : public ::testing::Test {
 protected:
  static void Send(int number) { kill(getpid(), number); }
  // For signals that end the process.
  [[noreturn]] static void WaitForTheEnd() {
    sleep(30);
    _exit(99);
  }
};

TEST_F(SignalsDeathTest, BeforeServingTheFirstSignalEndsTheProcess) {
  EXPECT_EXIT(
      {
        const Signals signals;
        Send(SIGTERM);
        WaitForTheEnd();
      },
      ::testing::ExitedWithCode(0), "");
}

TEST_F(SignalsDeathTest, TheFirstSignalAsksForAnOrderlyEnd) {
  EXPECT_EXIT(
      {
        Signals signals;
        signals.BeginOrderlyEnd();
        Send(SIGINT);
        const bool stops = signals.Wait() == Signals::Event::kStop;
        _exit(stops && !signals.hurry().HasBeenNotified() && signals.EndOrderlyEnd() == 0 ? 7 : 1);
      },
      ::testing::ExitedWithCode(7), "");
}

TEST_F(SignalsDeathTest, TheSecondSignalAsksForAQuickEnd) {
  EXPECT_EXIT(
      {
        Signals signals;
        signals.BeginOrderlyEnd();
        Send(SIGTERM);
        signals.Wait();
        Send(SIGINT);
        signals.hurry().WaitForNotification();
        _exit(signals.EndOrderlyEnd());
      },
      ::testing::ExitedWithCode(128 + SIGINT), "");
}

TEST_F(SignalsDeathTest, TheThirdSignalEndsTheProcess) {
  EXPECT_EXIT(
      {
        Signals signals;
        signals.BeginOrderlyEnd();
        Send(SIGTERM);
        signals.Wait();
        Send(SIGTERM);
        signals.hurry().WaitForNotification();
        Send(SIGINT);
        WaitForTheEnd();
      },
      ::testing::ExitedWithCode(128 + SIGINT), "");
}

TEST_F(SignalsDeathTest, AReloadThatCameEarlyIsNotLost) {
  EXPECT_EXIT(
      {
        Signals signals;
        Send(SIGHUP);
        signals.BeginOrderlyEnd();
        const bool reloads = signals.Wait() == Signals::Event::kReload;
        Send(SIGTERM);
        _exit(reloads && signals.Wait() == Signals::Event::kStop ? 7 : 1);
      },
      ::testing::ExitedWithCode(7), "");
}

TEST_F(SignalsDeathTest, ARequestedEndKeepsItsExitCodeThroughTheFirstSignal) {
  EXPECT_EXIT(
      {
        Signals signals;
        signals.BeginOrderlyEnd();
        signals.RequestEnd(71);
        const bool stops = signals.Wait() == Signals::Event::kStop;
        Send(SIGTERM);
        const bool hurries =
            signals.hurry().WaitForNotificationWithTimeout(absl::Milliseconds(200));
        _exit(stops && !hurries ? signals.EndOrderlyEnd() : 1);
      },
      ::testing::ExitedWithCode(71), "");
}

}  // namespace
}  // namespace dorad
