#include "server/backends/cuda/unaccounted_memory.h"

#include "tests/unit/support/test.h"

namespace dorad::cuda {
namespace {

constexpr int64_t kMiB = 1 << 20;

TEST(UnaccountedMemoryTest, IsWhatGoesMissingWithoutBeingAccountedFor) {
  UnaccountedMemory untold(nullptr);
  untold.Look(1000 * kMiB, 100 * kMiB);
  EXPECT_EQ(untold.bytes(), 0);
  untold.Look(800 * kMiB, 300 * kMiB);  // all of it is the ledger's
  EXPECT_EQ(untold.bytes(), 0);
  untold.Look(740 * kMiB, 350 * kMiB);
  untold.Look(738 * kMiB, 350 * kMiB);
  untold.Look(739 * kMiB, 350 * kMiB);  // something was given back
  EXPECT_EQ(untold.bytes(), 11 * kMiB);
  EXPECT_EQ(untold.of_others(), 0);
}

TEST(UnaccountedMemoryTest, LeavesOutWhatOthersTakeAndGiveBackMeanwhile) {
  UnaccountedMemory untold(nullptr);
  untold.Look(140'000 * kMiB, 0);
  untold.Look(139'990 * kMiB, 0);
  untold.Look(9'990 * kMiB, 0);  // a trainer begins a step
  untold.Look(9'980 * kMiB, 0);
  untold.Look(79'980 * kMiB, 0);
  untold.Look(79'970 * kMiB, 0);
  EXPECT_EQ(untold.bytes(), 30 * kMiB);
  EXPECT_EQ(untold.of_others(), 60'000 * kMiB);
}

TEST(UnaccountedMemoryTest, IsNeverLessThanNothing) {
  UnaccountedMemory untold(nullptr);
  untold.Look(100 * kMiB, 0);
  untold.Look(120 * kMiB, 0);
  EXPECT_EQ(untold.bytes(), 0);
}

}  // namespace
}  // namespace dorad::cuda
