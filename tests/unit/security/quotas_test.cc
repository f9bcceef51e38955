#include "server/security/quotas.h"

#include "tests/unit/support/test.h"

namespace dorad::security {
namespace {

class QuotasTest : public testing::Test {
 protected:
  absl::Time now_ = absl::FromUnixSeconds(1000);
  std::map<std::string, Quota> limits_;
  Quotas quotas_{[this](const std::string& tenant) { return limits_[tenant]; },
                 [this] { return now_; }};
};

TEST_F(QuotasTest, LimitsStreamsOfEachTenantAlone) {
  limits_["a"].streams = 2;
  std::vector<Quotas::Hold> holds;
  for (int i = 0; i < 2; ++i) holds.push_back(*quotas_.OpenStream("a"));
  const absl::Status refused = quotas_.OpenStream("a").status();
  EXPECT_EQ(ReasonOf(refused), "QUOTA_STREAMS");
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(RetryAfterOf(refused));
  EXPECT_TRUE(quotas_.OpenStream("b").ok());
  holds.pop_back();
  EXPECT_TRUE(quotas_.OpenStream("a").ok());
}

TEST_F(QuotasTest, CountsAHoldOnceHoweverItEnds) {
  limits_["a"].streams = 1;
  Quotas::Hold hold = *quotas_.OpenStream("a");
  hold.Release();
  hold.Release();
  Quotas::Hold other = *quotas_.OpenStream("a");
  hold = std::move(other);
  EXPECT_EQ(quotas_.use("a").streams, 1);
  hold = Quotas::Hold();
  EXPECT_EQ(quotas_.use("a").streams, 0);
}

TEST_F(QuotasTest, LetsARequestLargerThanTheBucketInAndMakesTheNextOneWait) {
  limits_["a"].tokens_per_minute = 60;
  EXPECT_TRUE(quotas_.AdmitTokens("a", 90).ok());
  const absl::Status refused = quotas_.AdmitTokens("a", 1);
  EXPECT_EQ(ReasonOf(refused), "QUOTA_TOKENS");
  // It owes 30, at one a second.
  EXPECT_EQ(RetryAfterOf(refused), absl::Seconds(30));
  now_ += absl::Seconds(29);
  EXPECT_FALSE(quotas_.AdmitTokens("a", 1).ok());
  now_ += absl::Seconds(2);
  EXPECT_TRUE(quotas_.AdmitTokens("a", 1).ok());
}

TEST_F(QuotasTest, CountsGeneratedTokensAndGivesThoseOfARefusedRequestBack) {
  limits_["a"].tokens_per_minute = 100;
  ASSERT_TRUE(quotas_.AdmitTokens("a", 40).ok());
  quotas_.TakeTokens("a", 50);
  EXPECT_DOUBLE_EQ(quotas_.use("a").tokens_left, 10);
  quotas_.TakeTokens("a", -40);
  EXPECT_DOUBLE_EQ(quotas_.use("a").tokens_left, 50);
  // Nothing is saved up beyond a minute's worth.
  now_ += absl::Hours(5);
  EXPECT_DOUBLE_EQ(quotas_.use("a").tokens_left, 100);
  // A clock that steps back takes nothing.
  now_ -= absl::Hours(2);
  EXPECT_DOUBLE_EQ(quotas_.use("a").tokens_left, 100);
}

TEST_F(QuotasTest, CountsPublishesOnTheirWayLikeLiveOnes) {
  limits_["a"].adapters = 3;
  limits_["a"].bytes = 1000;
  Quotas::Live live{1, 300};
  const auto reserve = [&](int64_t bytes) {
    return quotas_.ReservePublish("a", {1, bytes}, [&] { return live; });
  };
  Quotas::Hold first = *reserve(400);
  EXPECT_EQ(ReasonOf(reserve(301).status()), "QUOTA_BYTES");
  Quotas::Hold second = *reserve(300);
  EXPECT_EQ(ReasonOf(reserve(0).status()), "QUOTA_ADAPTERS");
  EXPECT_FALSE(RetryAfterOf(reserve(0).status())) << "no time makes room here";
  second.Release();
  live = {2, 700};
  first.Release();
  EXPECT_TRUE(reserve(300).ok());
}

TEST_F(QuotasTest, CountsBytesThatAreKnownLaterBesideTheirVersion) {
  limits_["a"].adapters = 2;
  limits_["a"].bytes = 1000;
  const auto reserve = [&](const Quotas::Live& wanted) {
    return quotas_.ReservePublish("a", wanted, [] { return Quotas::Live(); });
  };
  Quotas::Hold first = *reserve({1, 0});
  Quotas::Hold second = *reserve({1, 0});
  // The versions are counted already: only the bytes are asked for.
  Quotas::Hold bytes = *reserve({0, 600});
  EXPECT_EQ(ReasonOf(reserve({0, 401}).status()), "QUOTA_BYTES");
  EXPECT_TRUE(reserve({0, 400}).ok());
  bytes.Release();
  EXPECT_TRUE(reserve({0, 1000}).ok());
  EXPECT_EQ(quotas_.use("a").pending.bytes, 0);
  EXPECT_EQ(quotas_.use("a").pending.versions, 2);
}

TEST_F(QuotasTest, FollowsChangedLimits) {
  limits_["a"].streams = 1;
  Quotas::Hold hold = *quotas_.OpenStream("a");
  limits_["a"].streams = 2;
  EXPECT_TRUE(quotas_.OpenStream("a").ok());
  limits_["a"].streams = 0;
  EXPECT_TRUE(quotas_.OpenStream("a").ok());
}

// For any traffic: streams never exceed their limit, all slots are released, and over any time
// they get at most their rate, one bucket, and what the requests at hand overdrew.
TEST_F(QuotasTest, HoldsItsPromisesUnderRandomUse) {
  constexpr int64_t kRate = 600;
  constexpr int64_t kLargest = 50;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    const std::string tenant = absl::StrCat("t", seed);
    limits_[tenant] = {.streams = 4, .tokens_per_minute = kRate};
    std::vector<Quotas::Hold> holds;
    int64_t taken = 0;
    const absl::Time start = now_;
    for (int step = 0; step < 2000; ++step) {
      now_ += absl::Milliseconds(random() % 200);
      if (random() % 2 == 0) {
        auto hold = quotas_.OpenStream(tenant);
        ASSERT_EQ(hold.ok(), holds.size() < 4);
        if (hold.ok()) holds.push_back(*std::move(hold));
      } else if (!holds.empty()) {
        holds.erase(holds.begin() + random() % holds.size());
      }
      const int64_t tokens = random() % kLargest;
      const double left = quotas_.use(tenant).tokens_left;
      const absl::Status admitted = quotas_.AdmitTokens(tenant, tokens);
      ASSERT_EQ(admitted.ok(), left > 0);
      if (admitted.ok()) {
        taken += tokens;
      } else {
        ASSERT_LE(*RetryAfterOf(admitted), absl::Minutes(1.0 * kLargest / kRate));
      }
      const double most =
          kRate * (1 + absl::FDivDuration(now_ - start, absl::Minutes(1))) + kLargest;
      ASSERT_LE(taken, most);
      ASSERT_EQ(quotas_.use(tenant).streams, static_cast<int64_t>(holds.size()));
    }
    // It asked for more than that, and lost nothing of its share.
    EXPECT_GE(taken, kRate * absl::FDivDuration(now_ - start, absl::Minutes(1)) - kRate);
    holds.clear();
    EXPECT_EQ(quotas_.use(tenant).streams, 0);
  }
}

TEST_F(QuotasTest, LosesNothingWhenManyThreadsComeAndGo) {
  limits_["a"] = {.streams = 3, .adapters = 2};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this] {
      for (int i = 0; i < 2000; ++i) {
        auto stream = quotas_.OpenStream("a");
        auto room = quotas_.ReservePublish("a", {1, 10}, [] { return Quotas::Live(); });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(quotas_.use("a").streams, 0);
  EXPECT_EQ(quotas_.use("a").pending.versions, 0);
  EXPECT_EQ(quotas_.use("a").pending.bytes, 0);
}

}  // namespace
}  // namespace dorad::security
