#include "server/backends/cpu/ops/thread_team.h"

#include "tests/unit/support/test.h"

namespace dorad::ops {
namespace {

TEST(ThreadTeamTest, RunsEveryTaskOnce) {
  for (int threads : {1, 2, 5}) {
    ThreadTeam team(threads);
    EXPECT_EQ(team.threads(), threads);
    for (int64_t tasks : {0, 1, 2, 3, 17, 1000}) {
      std::vector<std::atomic<int>> runs(tasks);
      team.Run(tasks, [&](int64_t i) { runs[i].fetch_add(1); });
      for (const auto& r : runs) EXPECT_EQ(r.load(), 1);
    }
  }
}

TEST(ThreadTeamTest, ResultsOfARegionAreVisibleAfterIt) {
  ThreadTeam team(4);
  std::vector<int64_t> values(64, 0);
  for (int round = 0; round < 2000; ++round) {
    team.Run(64, [&](int64_t i) { values[i] += i; });
  }
  for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(values[i], 2000 * i);
}

TEST(ThreadTeamTest, WorkersWakeAfterTheyParked) {
  ThreadTeam team(2, /*spin_microseconds=*/0);
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    // Needs two workers at once: each task waits for the other.
    std::atomic<int> inside{0};
    team.Run(2, [&](int64_t) {
      inside.fetch_add(1);
      while (inside.load() != 2) std::this_thread::yield();
    });
  }
}

TEST(ThreadTeamTest, TasksAreTakenInAscendingOrder) {
  // A task may therefore wait for an earlier one.
  ThreadTeam team(3);
  for (int round = 0; round < 200; ++round) {
    std::atomic<bool> first{false};
    team.Run(10, [&](int64_t i) {
      if (i == 0) first.store(true);
      while (!first.load()) std::this_thread::yield();
    });
    EXPECT_TRUE(first.load());
  }
}

TEST(ThreadTeamTest, CallersTakeTurns) {
  ThreadTeam team(3);
  std::atomic<int64_t> total{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 300; ++round) {
        team.Run(7, [&](int64_t i) { total.fetch_add(i); });
      }
    });
  }
  for (std::thread& t : callers) t.join();
  EXPECT_EQ(total.load(), 4 * 300 * 21);
}

}  // namespace
}  // namespace dorad::ops
