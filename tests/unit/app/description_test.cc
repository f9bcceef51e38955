#include "server/backends/description.h"

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

constexpr int64_t kPage = 1000;

TEST(DescriptionTest, AnAutomaticKvCacheTakesTheAvailableMemory) {
  EXPECT_EQ(AutoKvPages(12'345, kPage, /*context_length=*/4096, /*max_running_sequences=*/8), 12);
}

TEST(DescriptionTest, AnAutomaticKvCacheIsNoLargerThanAllSequencesCanUse) {
  const int64_t one = AutoKvPages(int64_t{1} << 40, kPage, 100, 1);
  EXPECT_LT(one, 100);
  EXPECT_EQ(AutoKvPages(int64_t{1} << 40, kPage, 100, 3), 3 * one);
}

TEST(DescriptionTest, AnAutomaticKvCacheHasTwoPagesAtLeast) {
  EXPECT_EQ(AutoKvPages(0, kPage, 4096, 8), 2);
}

}  // namespace
}  // namespace dorad
