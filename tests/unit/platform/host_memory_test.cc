#include "server/platform/process/host_memory.h"

#include <unistd.h>

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

class HostMemoryTest : public ::testing::Test {
 protected:
  HostMemoryTest()
      : root_(std::filesystem::path(::testing::TempDir()) /
              ("host_memory_" + std::to_string(getpid()))) {
    std::filesystem::remove_all(root_);
  }
  ~HostMemoryTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  void Group(const std::string& path, const std::string& max, int64_t current, int64_t cached) {
    Write("sys/fs/cgroup" + path + "/memory.max", max + "\n");
    Write("sys/fs/cgroup" + path + "/memory.current", std::to_string(current) + "\n");
    Write("sys/fs/cgroup" + path + "/memory.stat",
          "anon 5\ninactive_file " + std::to_string(cached) + "\n");
  }

  const std::filesystem::path root_;
};

TEST_F(HostMemoryTest, IsWhatTheKernelCallsAvailable) {
  Write("proc/meminfo", "MemTotal:  100 kB\nMemFree:  10 kB\nMemAvailable:   40 kB\n");
  EXPECT_EQ(AvailableHostMemory(root_), 40 * 1024);
}

TEST_F(HostMemoryTest, EveryGroupAboveTheProcessLimitsIt) {
  Write("proc/meminfo", "MemAvailable: 1000 kB\n");
  Write("proc/self/cgroup", "0::/a/b\n");
  Group("/a/b", "max", 1, 0);
  EXPECT_EQ(AvailableHostMemory(root_), 1000 * 1024);
  Group("/a", "9000", 8000, 300);
  EXPECT_EQ(AvailableHostMemory(root_), 1300) << "cached files make room";
  Group("/a/b", "500", 400, 0);
  EXPECT_EQ(AvailableHostMemory(root_), 100);
  Group("/a/b", "500", 900, 0);
  EXPECT_EQ(AvailableHostMemory(root_), 0);
}

TEST_F(HostMemoryTest, TheTotalIsTheHostsOrTheTightestGroups) {
  Write("proc/meminfo", "MemTotal:  100 kB\nMemFree:  10 kB\nMemAvailable:   40 kB\n");
  EXPECT_EQ(TotalHostMemory(root_), 100 * 1024);
  Write("proc/self/cgroup", "0::/a/b\n");
  Group("/a/b", "max", 1, 0);
  Group("/a", "9000", 8000, 300);
  EXPECT_EQ(TotalHostMemory(root_), 9000);
}

TEST_F(HostMemoryTest, InANamespaceTheGroupIsTheRoot) {
  Write("proc/self/cgroup", "0::/\n");
  Group("", "700", 100, 0);
  EXPECT_EQ(AvailableHostMemory(root_), 600);
}

TEST_F(HostMemoryTest, IsUnboundedWhereNobodySays) {
  EXPECT_EQ(AvailableHostMemory(root_), std::numeric_limits<int64_t>::max());
  EXPECT_GT(AvailableHostMemory(), 0);
}

TEST_F(HostMemoryTest, WhatTakesNearlyAllOfItIsRefused) {
  EXPECT_TRUE(CheckHostMemory(900, 1000, "this").ok());
  const absl::Status refused = CheckHostMemory(901, 1000, "this");
  EXPECT_EQ(ReasonOf(refused), "OUT_OF_MEMORY");
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("this takes 901 bytes of host memory, of which 1000"));
  EXPECT_TRUE(CheckHostMemory(0, 0, "this").ok());
}

}  // namespace
}  // namespace dorad
