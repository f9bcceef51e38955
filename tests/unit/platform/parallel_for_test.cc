#include "server/platform/parallel_for.h"

#include "absl/synchronization/barrier.h"
#include "tests/unit/support/test.h"

namespace dorad {
namespace {

TEST(ParallelForTest, DoesEachPieceOnce) {
  for (const int threads : {1, 2, 7}) {
    for (const size_t count : {0, 1, 3, 1000}) {
      std::vector<std::atomic<int>> done(count);
      EXPECT_TRUE(ParallelFor(threads, count, [&](size_t i) {
                    ++done[i];
                    return absl::OkStatus();
                  }).ok());
      for (const auto& times : done) EXPECT_EQ(times, 1);
    }
  }
}

TEST(ParallelForTest, UsesTheThreads) {
  auto* const barrier = new absl::Barrier(3);  // passes only when three threads work at once
  std::atomic<bool> last = false;
  EXPECT_TRUE(ParallelFor(3, 3, [&](size_t) {
                if (barrier->Block()) last = true;
                return absl::OkStatus();
              }).ok());
  EXPECT_TRUE(last);
  delete barrier;
}

TEST(ParallelForTest, TheFirstErrorEndsIt) {
  size_t done = 0;
  const absl::Status status = ParallelFor(1, 10, [&](size_t i) {
    ++done;
    return i == 3 ? absl::DataLossError("three") : absl::OkStatus();
  });
  EXPECT_EQ(status, absl::DataLossError("three"));
  EXPECT_EQ(done, 4u);
}

TEST(ParallelForTest, AnExceptionIsAnError) {
  const auto fail = [](size_t i) -> absl::Status {
    if (i == 1) throw std::runtime_error("no");
    return absl::OkStatus();
  };
  EXPECT_EQ(ReasonOf(ParallelFor(4, 8, fail)), "INTERNAL_ERROR");
}

}  // namespace
}  // namespace dorad
