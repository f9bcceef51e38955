#include "server/app/shutdown_watchdog.h"

#include <unistd.h>

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

using Part = ShutdownWatchdog::Part;

class ShutdownWatchdogDeathTest : public ::testing::Test {
 protected:
  // Hangs in the shutdown after the phases of `ended` have ended.
  [[noreturn]] static void Hang(std::initializer_list<Part> ended) {
    ShutdownWatchdog watchdog;
    watchdog.Begin(absl::Milliseconds(50));
    for (const Part part : ended) ShutdownWatchdog::Phase(&watchdog, part);
    absl::SleepFor(absl::Seconds(30));  // the dump of stacks interrupts sleep()
    _exit(99);
  }
};

TEST_F(ShutdownWatchdogDeathTest, EndsAShutdownThatWaitsForCalls) {
  EXPECT_EXIT(Hang({}), ::testing::ExitedWithCode(0), "waits_for.*calls");
}

TEST_F(ShutdownWatchdogDeathTest, NamesThePartThatItWaitsForNow) {
  EXPECT_EXIT(Hang({Part::kChanges}), ::testing::ExitedWithCode(0), "changes of the registry");
  EXPECT_EXIT(Hang({Part::kChanges, Part::kStep, Part::kLoads}), ::testing::ExitedWithCode(0),
              "loads of adapters");
}

TEST_F(ShutdownWatchdogDeathTest, AStepThatHangsIsAFailure) {
  EXPECT_EXIT(Hang({Part::kChanges, Part::kStep}), ::testing::ExitedWithCode(70),
              "a step of the engine");
}

TEST_F(ShutdownWatchdogDeathTest, LogsTheStackOfTheThreadThatHangs) {
  EXPECT_EXIT(Hang({Part::kStep}), ::testing::ExitedWithCode(70), "stack of a thread");
}

}  // namespace
}  // namespace dorad
