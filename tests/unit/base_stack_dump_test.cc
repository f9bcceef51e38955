#include <pthread.h>
#include <signal.h>

#include <string>
#include <thread>

#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/log.h"
#include "server/base/stack_dump.h"

namespace dorad {

// Not in an unnamed namespace and never inlined: its name is looked for.
__attribute__((noinline)) void WaitInAFunctionWithAName(absl::Notification* ready,
                                                        absl::Notification* done) {
  ready->Notify();
  done->WaitForNotification();
  // Keeps the call above from being the last thing, which could replace this frame.
  asm volatile("" ::: "memory");
}

namespace {

using ::testing::HasSubstr;

std::string Dump() {
  SetLogging(LogLevel::kError, true);
  ::testing::internal::CaptureStderr();
  DumpStacks();
  return ::testing::internal::GetCapturedStderr();
}

TEST(StackDumpTest, NamesTheFunctionsThatThreadsAreIn) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer keeps signals from a thread that waits";
#endif
  absl::Notification ready, done;
  std::thread waiting([&] {
    pthread_setname_np(pthread_self(), "waiting");
    WaitInAFunctionWithAName(&ready, &done);
  });
  ready.WaitForNotification();
  // Twice: the first dump must leave things as they were.
  for (int i = 0; i < 2; ++i) {
    const std::string text = Dump();
    EXPECT_THAT(text, HasSubstr("\"thread\":\"waiting\""));
    EXPECT_THAT(text, HasSubstr("WaitInAFunctionWithAName"));
    EXPECT_THAT(text, HasSubstr("DumpStacks"));
  }
  done.Notify();
  waiting.join();
}

TEST(StackDumpTest, DoesNotWaitForAThreadThatTakesNoSignals) {
  absl::Notification ready, done;
  std::thread deaf([&] {
    pthread_setname_np(pthread_self(), "deaf");
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    ready.Notify();
    done.WaitForNotification();
  });
  ready.WaitForNotification();
  EXPECT_THAT(Dump(), HasSubstr("does not answer"));
  done.Notify();
  deaf.join();
}

}  // namespace
}  // namespace dorad

int main(int argc, char** argv) {
  dorad::InitializeStackDump(argv[0]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
