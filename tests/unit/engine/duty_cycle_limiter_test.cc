// A clock that the test moves: no time passes.
#include "server/engine/duty_cycle_limiter.h"

#include "tests/unit/support/test.h"

namespace dorad::engine {
namespace {

using absl::Milliseconds;
using absl::ZeroDuration;

class DutyCycleLimiterTest : public ::testing::Test {
 protected:
  void Pass(absl::Duration time) { now_ += absl::ToChronoNanoseconds(time); }

  // A step that takes `busy`, after whatever wait is asked for; the wait ends late by `late`.
  void Step(absl::Duration busy, absl::Duration late = ZeroDuration()) {
    while (limiter_.Wait(now_) > ZeroDuration()) Pass(limiter_.Wait(now_) + late);
    Pass(busy);
    limiter_.Ran(busy, now_);
    busy_ += busy;
  }

  double BusyShareSince(Instant begin) const {
    return absl::FDivDuration(busy_, Between(begin, now_));
  }

  DutyCycleLimiter limiter_;
  Instant now_ = Instant(std::chrono::hours(5));
  absl::Duration busy_;
};

TEST_F(DutyCycleLimiterTest, WithoutAShareNoStepWaits) {
  EXPECT_FALSE(limiter_.paces());
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(limiter_.Wait(now_), ZeroDuration());
    Step(Milliseconds(7));
  }
}

TEST_F(DutyCycleLimiterTest, AStepIsFollowedByTheTimeThatIsOthers) {
  limiter_.SetShare(0.25, now_);
  EXPECT_EQ(limiter_.Wait(now_), ZeroDuration());
  Step(Milliseconds(10));
  EXPECT_EQ(limiter_.Wait(now_), Milliseconds(30));
  Pass(Milliseconds(20));
  EXPECT_EQ(limiter_.Wait(now_), Milliseconds(10));
  Pass(Milliseconds(10));
  EXPECT_EQ(limiter_.Wait(now_), ZeroDuration());
}

TEST_F(DutyCycleLimiterTest, AStepLongerThanTheWindowIsFollowedByAllOfIt) {
  limiter_.SetShare(0.5, now_);
  Step(absl::Seconds(2));
  EXPECT_EQ(limiter_.Wait(now_), absl::Seconds(2));
}

TEST_F(DutyCycleLimiterTest, LateWakeUpsAreMadeUpFor) {
  for (const double share : {0.1, 0.3, 0.9}) {
    SCOPED_TRACE(share);
    limiter_.SetShare(share, now_);
    busy_ = ZeroDuration();
    const Instant begin = now_;
    for (int i = 0; i < 2000; ++i) Step(absl::Microseconds(300), absl::Microseconds(80));
    EXPECT_NEAR(BusyShareSince(begin), share, 0.02 * share);
  }
}

TEST_F(DutyCycleLimiterTest, StepsOfAllLengthsKeepTheShareTogether) {
  std::mt19937 random(3);
  limiter_.SetShare(0.3, now_);
  const Instant begin = now_;
  for (int i = 0; i < 2000; ++i) {
    Step(absl::Microseconds(1 << std::uniform_int_distribution<>(4, 17)(random)));
  }
  EXPECT_NEAR(BusyShareSince(begin), 0.3, 0.003);
}

TEST_F(DutyCycleLimiterTest, AnIdleHourIsNotSavedForABurst) {
  limiter_.SetShare(0.5, now_);
  Step(Milliseconds(1));
  Pass(absl::Hours(1));
  const Instant begin = now_;
  busy_ = ZeroDuration();
  for (int i = 0; i < 100; ++i) Step(Milliseconds(10));
  const absl::Duration wall = Between(begin, now_);
  EXPECT_LE(busy_, 0.5 * (wall + DutyCycleLimiter::kWindow) + Milliseconds(10));
  EXPECT_GE(busy_, 0.5 * wall);
}

TEST_F(DutyCycleLimiterTest, WhatWasOwedUnderAnotherShareIsForgotten) {
  limiter_.SetShare(0.01, now_);
  Step(absl::Seconds(1));
  EXPECT_GT(limiter_.Wait(now_), absl::Seconds(90));
  limiter_.SetShare(0.01, now_);  // a renewal
  EXPECT_GT(limiter_.Wait(now_), absl::Seconds(90));
  limiter_.SetShare(0.5, now_);
  EXPECT_EQ(limiter_.Wait(now_), ZeroDuration());
  limiter_.SetShare(1, now_);
  Step(absl::Seconds(1));
  EXPECT_EQ(limiter_.Wait(now_), ZeroDuration());
}

TEST_F(DutyCycleLimiterTest, AStepThatBeganUnderAnotherShareCountsUnderTheNewOne) {
  const Instant began = now_;
  Pass(Milliseconds(4));
  limiter_.SetShare(0.5, now_);
  Pass(Milliseconds(4));
  limiter_.Ran(Between(began, now_), now_);
  EXPECT_EQ(limiter_.Wait(now_), Milliseconds(8));
}

}  // namespace
}  // namespace dorad::engine
