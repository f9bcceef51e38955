#include "server/platform/process/stack_dump.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include "server/platform/log.h"
#include "tests/unit/support/test.h"

namespace {
// How long a thread takes to look at its stack.
thread_local unsigned slow_milliseconds = 0;
}  // namespace

// Stands before libc's, which it calls.
extern "C" int backtrace(void** frames, int size) {
  usleep(slow_milliseconds * 1000);
  static const auto real = reinterpret_cast<int (*)(void**, int)>(dlsym(RTLD_NEXT, "backtrace"));
  return real(frames, size);
}

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
  std::thread blocked([&] {
    pthread_setname_np(pthread_self(), "blocked");
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    ready.Notify();
    done.WaitForNotification();
  });
  ready.WaitForNotification();
  EXPECT_THAT(Dump(), HasSubstr("does not answer"));
  done.Notify();
  blocked.join();
}

TEST(StackDumpTest, GivesASlowThreadsStackToNoOtherThread) {
  absl::Notification slow_ready, blocked_ready, done;
  std::thread slow([&] {
    slow_milliseconds = 250;  // ends while the blocked thread, which comes next, is waited for
    WaitInAFunctionWithAName(&slow_ready, &done);
  });
  slow_ready.WaitForNotification();
  std::thread blocked([&] {
    pthread_setname_np(pthread_self(), "blocked");
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    blocked_ready.Notify();
    done.WaitForNotification();
  });
  blocked_ready.WaitForNotification();
  const std::string text = Dump();
  EXPECT_THAT(text, Not(HasSubstr("WaitInAFunctionWithAName")));
  EXPECT_THAT(text, HasSubstr("does not answer"));
  done.Notify();
  slow.join();
  blocked.join();
}

}  // namespace
}  // namespace dorad

int main(int argc, char** argv) {
  dorad::InitializeStackDump(argv[0]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
