#include "server/platform/process/failpoint.h"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <exception>

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

TEST(FailpointTest, NothingHappensUnlessArmed) {
  for (int i = 0; i < 3; ++i) Failpoint("point");
}

TEST(FailpointTest, KillsTheProcessAtTheArmedPointOnly) {
  EXPECT_EXIT(
      {
        ASSERT_TRUE(ArmFailpoint("point").ok());
        Failpoint("other");
        std::fputs("passed the other\n", stderr);
        Failpoint("point", [] { std::fputs("last act\n", stderr); });
      },
      ::testing::KilledBySignal(SIGKILL), "passed the other\nlast act");
}

TEST(FailpointTest, CountsHowOftenThePointIsReached) {
  EXPECT_EXIT(
      {
        ASSERT_TRUE(ArmFailpoint("point:3").ok());
        for (int i = 1;; ++i) {
          std::fprintf(stderr, "%d ", i);
          Failpoint("point");
        }
      },
      ::testing::KilledBySignal(SIGKILL), "1 2 3 $");
}

TEST(FailpointTest, ThrowsOnceWhereItIsToldTo) {
  EXPECT_EXIT(
      {
        ASSERT_TRUE(ArmFailpoint("point:2=throw").ok());
        for (int i = 1; i <= 3; ++i) {
          try {
            Failpoint("point");
            std::fprintf(stderr, "%d ", i);
          } catch (const std::exception& e) {
            std::fprintf(stderr, "[%s] ", e.what());
          }
        }
        std::exit(0);
      },
      ::testing::ExitedWithCode(0), "1 \\[failpoint point\\] 3 $");
}

TEST(FailpointTest, HangsUntilTheProcessEnds) {
  EXPECT_EXIT(
      {
        ASSERT_TRUE(ArmFailpoint("point=hang").ok());
        (void)alarm(1);
        Failpoint("point");
        std::fputs("went on\n", stderr);
      },
      ::testing::KilledBySignal(SIGALRM), "^$");
}

TEST(FailpointTest, GoesOnAfterADelay) {
  EXPECT_EXIT(
      {
        ASSERT_TRUE(ArmFailpoint("point=delay").ok());
        const absl::Time begin = absl::Now();
        Failpoint("point");
        std::exit(absl::Now() - begin > absl::Seconds(4) ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "delayed at a failpoint.*point");
}

TEST(FailpointTest, RefusesWhatItCannotRead) {
  for (const char* spec : {"", ":1", "point:", "point:0", "point:-1", "point:x", "point:1:2",
                           "=throw", "point=", "point=stop", "point=throw:2"}) {
    EXPECT_EQ(ReasonOf(ArmFailpoint(spec)), "USAGE") << spec;
  }
}

}  // namespace
}  // namespace dorad
