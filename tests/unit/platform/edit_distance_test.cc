#include "server/platform/config/edit_distance.h"

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

TEST(EditDistanceTest, CountsInsertionsDeletionsAndSubstitutions) {
  EXPECT_EQ(EditDistance("", ""), 0u);
  EXPECT_EQ(EditDistance("", "abc"), 3u);
  EXPECT_EQ(EditDistance("abc", ""), 3u);
  EXPECT_EQ(EditDistance("policy", "polcy"), 1u);
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3u);
}

TEST(EditDistanceTest, ALongNameMayDifferInMore) {
  EXPECT_TRUE(IsNear(2, "ab"));
  EXPECT_FALSE(IsNear(3, "ab"));
  EXPECT_TRUE(IsNear(4, "abcdefghijkl"));
  EXPECT_FALSE(IsNear(5, "abcdefghijkl"));
}

}  // namespace
}  // namespace dorad
