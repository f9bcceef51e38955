#include <csignal>
#include <cstdio>

#include "gtest/gtest.h"
#include "server/base/error.h"
#include "server/base/failpoint.h"

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

TEST(FailpointTest, RefusesWhatItCannotRead) {
  for (const char* spec : {"", ":1", "point:", "point:0", "point:-1", "point:x", "point:1:2"}) {
    EXPECT_EQ(ReasonOf(ArmFailpoint(spec)), "USAGE") << spec;
  }
}

}  // namespace
}  // namespace dorad
