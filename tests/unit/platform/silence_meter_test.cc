#include "server/platform/process/silence_meter.h"

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

constexpr absl::Duration kPeriod = absl::Seconds(1);
constexpr absl::Duration kLimit = absl::Seconds(10);

// Somebody who was heard at the start and looks that come when the test says.
class SilenceMeterTest : public testing::Test {
 protected:
  absl::Duration LookAfter(absl::Duration time) {
    now_ += absl::ToChronoNanoseconds(time);
    return meter_.Look(now_, Between(sign_, now_));
  }
  void ShowLife() { sign_ = now_; }

 private:
  Instant now_ = Instant() + std::chrono::hours(1);
  Instant sign_ = now_;
  SilenceMeter meter_{now_, kPeriod};
};

TEST_F(SilenceMeterTest, GrowsWithTheTimeSinceTheLastSign) {
  for (int i = 1; i <= 20; ++i) EXPECT_EQ(LookAfter(kPeriod), i * kPeriod);
}

TEST_F(SilenceMeterTest, ASignOfLifeBeginsItAnew) {
  for (int i = 0; i < 8; ++i) LookAfter(kPeriod);
  ShowLife();
  EXPECT_EQ(LookAfter(kPeriod), kPeriod);
  EXPECT_EQ(LookAfter(kPeriod), 2 * kPeriod);
}

TEST_F(SilenceMeterTest, AStepThatWasStoppedHasTheRestOfItsTimeAfterwards) {
  EXPECT_EQ(LookAfter(kPeriod), kPeriod);
  EXPECT_LE(LookAfter(100 * kLimit), 2 * kPeriod);
  for (int i = 0; i < 7; ++i) EXPECT_LE(LookAfter(kPeriod), kLimit) << "the step still runs";
  ShowLife();
  EXPECT_EQ(LookAfter(kPeriod), kPeriod);
}

TEST_F(SilenceMeterTest, StopsThatAreShorterThanTheLimitDoNotAddUp) {
  for (int i = 0; i < 4; ++i) EXPECT_LE(LookAfter(kPeriod + kLimit / 2), kLimit);
}

TEST_F(SilenceMeterTest, AHangThatBeganBeforeAStopIsNoticedAfterIt) {
  LookAfter(100 * kLimit);
  absl::Duration silence;
  for (int i = 0; i < 10; ++i) silence = LookAfter(kPeriod);
  EXPECT_GT(silence, kLimit);
}

TEST_F(SilenceMeterTest, LooksThatComeEarlyCountForTheTimeThatPassed) {
  EXPECT_EQ(LookAfter(kPeriod / 4), kPeriod / 4);
  EXPECT_EQ(LookAfter(kPeriod / 4), kPeriod / 2);
}

}  // namespace
}  // namespace dorad
