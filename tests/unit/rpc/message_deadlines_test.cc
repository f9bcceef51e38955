#include "server/rpc/message_deadlines.h"

#include "tests/unit/support/test.h"

namespace dorad::rpc {
namespace {

TEST(MessageDeadlinesTest, TellWhoIsLateOnceAndNobodyElse) {
  MessageDeadlines deadlines(absl::Seconds(2));  // long enough to stop a timer on a busy machine
  std::atomic<int> late{0};
  MessageTimer stopped(&deadlines), waits(&deadlines);
  absl::Notification told;
  stopped.Start([&] { late += 100; });
  waits.Start([&] {
    ++late;
    told.Notify();
  });
  stopped.Stop();
  EXPECT_TRUE(told.WaitForNotificationWithTimeout(absl::Minutes(1)));
  waits.Stop();
  EXPECT_EQ(late, 1);
}

TEST(MessageDeadlinesTest, ATimerStartsAgainAfterItWasLate) {
  MessageDeadlines deadlines(absl::Milliseconds(5));
  MessageTimer timer(&deadlines);
  for (int i = 0; i < 3; ++i) {
    absl::Notification told;
    timer.Start([&] { told.Notify(); });
    EXPECT_TRUE(told.WaitForNotificationWithTimeout(absl::Minutes(1)));
    timer.Stop();
  }
}

TEST(MessageDeadlinesTest, EndWithoutTellingWhoStillWaits) {
  std::atomic<int> late{0};
  auto deadlines = std::make_unique<MessageDeadlines>(absl::Hours(1));
  MessageTimer timer(deadlines.get());
  timer.Start([&] { ++late; });
  timer.Stop();
  deadlines.reset();
  EXPECT_EQ(late, 0);
}

TEST(MessageDeadlinesTest, ManyTimersAtTheSameTimeAreEachToldOrStopped) {
  MessageDeadlines deadlines(absl::Milliseconds(1));
  std::atomic<int> late{0};
  std::vector<std::thread> threads;
  constexpr int kThreads = 4, kRounds = 500;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kRounds; ++i) {
        MessageTimer timer(&deadlines);
        timer.Start([&] { ++late; });
        if (i % 50 == 0) absl::SleepFor(absl::Milliseconds(5));
        timer.Stop();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(late, 0);
  EXPECT_LE(late, kThreads * kRounds);
}

}  // namespace
}  // namespace dorad::rpc
