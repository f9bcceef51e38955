#include "server/backends/description.h"

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

const KvSizes kPage{.page_bytes = 1000, .needs = {}};

TEST(DescriptionTest, AnAutomaticKvCacheTakesTheAvailableMemory) {
  EXPECT_EQ(AutoKvPages(12'345, kPage, /*context_length=*/4096, /*max_running_sequences=*/8), 12);
}

TEST(DescriptionTest, AnAutomaticKvCacheIsNoLargerThanAllSequencesCanUse) {
  const int64_t one = AutoKvPages(int64_t{1} << 40, kPage, 100, 1);
  EXPECT_LT(one, 100);
  EXPECT_EQ(AutoKvPages(int64_t{1} << 40, kPage, 100, 3), 3 * one);
}

TEST(DescriptionTest, ACacheHasRoomForTheStatesOfASequence) {
  const KvSizes kSizes{.page_bytes = 1000, .needs = {.state_pages = 10}};
  EXPECT_EQ(KvPages(32'000, kSizes).value(), 32);
  EXPECT_EQ(KvPages(31'999, kSizes).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(AutoKvPages(0, kSizes, 4096, 8), 32);
  EXPECT_EQ(AutoKvPages(int64_t{1} << 40, kSizes, 160, 2), 2 * (10 + 30));
}

TEST(DescriptionTest, AnAutomaticKvCacheHasTwoPagesAtLeast) {
  EXPECT_EQ(AutoKvPages(0, kPage, 4096, 8), 2);
}

}  // namespace
}  // namespace dorad
