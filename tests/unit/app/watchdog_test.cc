#include "server/app/watchdog.h"

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

TEST(WatchdogTest, ReportsASilenceAboveTheLimitOnce) {
  std::atomic<int> looks = 0, stalls = 0;
  absl::Notification stalled;
  const Watchdog watchdog(
      absl::Milliseconds(200),
      [&] {
        ++looks;
        return absl::Seconds(60);
      },
      [&] {
        ++stalls;
        stalled.Notify();
      });
  stalled.WaitForNotification();
  const int then = looks;
  absl::SleepFor(absl::Milliseconds(200));
  EXPECT_EQ(stalls, 1);
  EXPECT_EQ(looks, then);
}

TEST(WatchdogTest, ReportsNothingWhileThereAreSignsOfLife) {
  std::atomic<int> looks = 0, stalls = 0;
  absl::Notification looked;
  {
    const Watchdog watchdog(
        absl::Milliseconds(200),
        [&] {
          if (++looks == 5) looked.Notify();
          return absl::ZeroDuration();
        },
        [&] { ++stalls; });
    looked.WaitForNotification();
  }
  EXPECT_EQ(stalls, 0);
}

}  // namespace
}  // namespace dorad
