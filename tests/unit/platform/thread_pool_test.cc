#include "server/platform/thread_pool.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

TEST(ThreadPoolTest, OneThreadRunsTasksInOrder) {
  std::vector<int> order;
  {
    ThreadPool pool(1, 0);
    for (int i = 0; i < 100; ++i) {
      pool.Submit([&order, i] { order.push_back(i); });
    }
  }
  ASSERT_EQ(order.size(), 100);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

// Each task waits for the other: with one thread this would never end.
TEST(ThreadPoolTest, SeveralThreadsRunAtTheSameTime) {
  ThreadPool pool(2, 0);
  absl::Notification first, second, done;
  pool.Submit([&] {
    first.Notify();
    second.WaitForNotification();
    done.Notify();
  });
  pool.Submit([&] {
    first.WaitForNotification();
    second.Notify();
  });
  EXPECT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(30)));
}

TEST(ThreadPoolTest, DestructorRunsWhatTasksSubmit) {
  std::atomic<int> runs = 0;
  {
    ThreadPool pool(2, 0);
    pool.Submit([&] {
      ++runs;
      pool.Submit([&] {
        ++runs;
        pool.Submit([&] { ++runs; });
      });
    });
  }
  EXPECT_EQ(runs, 3);
}

TEST(ThreadPoolTest, LogsATaskThatThrowsAndGoesOn) {
  int runs = 0;
  testing::internal::CaptureStderr();
  {
    ThreadPool pool(1, 0);
    pool.Submit([] { throw std::bad_alloc(); });
    pool.Submit([] { throw 7; });
    pool.Submit([&] { ++runs; });
  }
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(runs, 1);
  EXPECT_THAT(log, HasSubstr("std::bad_alloc"));
  EXPECT_THAT(log, HasSubstr("an exception of an unknown type"));
}

// A task's captures (leases, tensors) must be gone when it has run, not when the next one starts.
TEST(ThreadPoolTest, DropsATaskWhenItHasRun) {
  ThreadPool pool(1, 0);
  auto token = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = token;
  absl::Notification done;
  pool.Submit([token = std::move(token)] {});
  pool.Submit([&] { done.Notify(); });
  ASSERT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(30)));
  EXPECT_TRUE(watch.expired());
}

TEST(ThreadPoolTest, GivesItsThreadsALowerPriority) {
  const auto niceness = [] {
    return getpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)));
  };
  const int own = niceness();
  int pooled = -100;
  {
    ThreadPool(1, 19).Submit([&] { pooled = niceness(); });
  }
  EXPECT_EQ(pooled, 19);
  EXPECT_EQ(niceness(), own);
}

}  // namespace
}  // namespace dorad
