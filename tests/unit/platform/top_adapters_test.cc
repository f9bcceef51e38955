#include "server/platform/metrics/top_adapters.h"

#include "tests/unit/support/test.h"

namespace dorad::internal {
namespace {

class TopAdaptersTest : public testing::Test {
 protected:
  explicit TopAdaptersTest(int slots = 2) : top_(slots, [this] { return now_; }) {}

  void Use(const std::string& name, int64_t generated) { top_.Count(name, {1, 0, generated, 0}); }

  // Generated tokens by adapter. A scrape.
  std::map<std::string, double> Tokens() {
    std::map<std::string, double> tokens;
    const std::vector<prometheus::MetricFamily> families = top_.Collect();
    for (const prometheus::ClientMetric& series : families.at(1).metric) {
      if (series.label.at(1).value == "generated") {
        tokens[series.label.at(0).value] = series.counter.value;
      }
    }
    return tokens;
  }

  absl::Time now_ = absl::FromUnixSeconds(1000);
  TopAdapters top_;
};

TEST_F(TopAdaptersTest, TheFirstNamesHaveSeriesAndTheRestIsOther) {
  Use("a", 1);
  Use("b", 2);
  Use("c", 3);
  Use("d", 4);
  Use("a", 10);
  Use("", 5);
  const auto tokens = Tokens();
  EXPECT_THAT(tokens, Contains(Pair("a", 11)));
  EXPECT_THAT(tokens, Contains(Pair("b", 2)));
  EXPECT_THAT(tokens, Contains(Pair("other", 7)));
  EXPECT_THAT(tokens, Contains(Pair("(base)", 5)));
  EXPECT_EQ(tokens.size(), 4);
}

TEST_F(TopAdaptersTest, CountsRequestsAndEveryKindOfTokens) {
  top_.Count("a", {2, 30, 40, 50});
  const auto families = top_.Collect();
  EXPECT_EQ(families.at(0).name, "dorad_adapter_requests_total");
  EXPECT_EQ(families.at(0).metric.back().counter.value, 2);
  EXPECT_EQ(families.at(1).name, "dorad_adapter_tokens_total");
  std::map<std::string, double> kinds;
  for (const auto& series : families.at(1).metric) {
    if (series.label.at(0).value == "a") kinds[series.label.at(1).value] = series.counter.value;
  }
  EXPECT_EQ(kinds,
            (std::map<std::string, double>{{"prompt", 30}, {"generated", 40}, {"scored", 50}}));
}

TEST_F(TopAdaptersTest, AnAdapterThatIsCalledOtherIsAmongTheOthers) {
  Use("other", 5);
  Use("a", 1);
  Use("b", 1);
  Use("c", 2);
  EXPECT_THAT(Tokens(), Contains(Pair("other", 7)));
}

TEST_F(TopAdaptersTest, ABusierNameTakesTheSlotOfTheLeastBusyAfterAMinute) {
  Use("quiet", 1);
  Use("busy", 100);
  Use("newcomer", 50);
  now_ += absl::Seconds(59);
  EXPECT_THAT(Tokens(), Not(Contains(Key("newcomer")))) << "too early";
  EXPECT_THAT(Tokens(), Contains(Pair("other", 50)));
  now_ += absl::Seconds(1);
  auto tokens = Tokens();
  EXPECT_THAT(tokens, Contains(Pair("quiet", 1))) << "the scrape sees the last of it";
  EXPECT_THAT(tokens, Contains(Pair("newcomer", 0))) << "and the beginning: rates lose nothing";
  Use("newcomer", 7);
  tokens = Tokens();
  EXPECT_THAT(tokens, Not(Contains(Key("quiet"))));
  EXPECT_THAT(tokens, Contains(Pair("newcomer", 7))) << "since it has the slot";
  EXPECT_THAT(tokens, Contains(Pair("other", 50))) << "does not fall";
}

TEST_F(TopAdaptersTest, AnAnnouncedNameBeginsAtZeroWhileThereIsRoom) {
  top_.Announce("a");
  EXPECT_THAT(Tokens(), Contains(Pair("a", 0)));
  Use("a", 5);
  top_.Announce("a");
  top_.Announce("b");
  top_.Announce("c");
  top_.Announce("other");
  const auto tokens = Tokens();
  EXPECT_THAT(tokens, Contains(Pair("a", 5)));
  EXPECT_THAT(tokens, Not(Contains(Key("c"))));
  EXPECT_EQ(tokens.size(), 4);
}

TEST_F(TopAdaptersTest, AnAnnouncedNameThatNobodyUsesGivesWay) {
  top_.Announce("a");
  top_.Announce("b");
  Use("c", 1);
  now_ += absl::Minutes(1);
  EXPECT_THAT(Tokens(), Contains(Pair("c", 0)));
}

TEST_F(TopAdaptersTest, NamesThatAreAboutAsBusyLeaveHoldersAlone) {
  Use("a", 100);
  Use("b", 100);
  Use("c", 190);
  now_ += absl::Minutes(1);
  Tokens();
  EXPECT_THAT(Tokens(), Not(Contains(Key("c"))));
}

TEST_F(TopAdaptersTest, NoSeriesFallsWhileItLasts) {
  std::map<std::string, double> before;
  for (int round = 0; round < 200; ++round) {
    for (int i = 0; i < 5; ++i) {
      Use(absl::StrCat("a", (round / 10 + i) % 6), (round * 31 + i * 17) % 97);
    }
    now_ += absl::Seconds(20);
    const auto tokens = Tokens();
    EXPECT_LE(tokens.size(), 6) << "two holders, and two new ones";
    for (const auto& [name, value] : before) {
      if (tokens.contains(name)) {
        EXPECT_GE(tokens.at(name), value) << name << " in round " << round;
      }
    }
    EXPECT_GE(tokens.at("other"), before.contains("other") ? before.at("other") : 0);
    before = tokens;
  }
}

class NoSlotsTest : public TopAdaptersTest {
 protected:
  NoSlotsTest() : TopAdaptersTest(0) {}
};

TEST_F(NoSlotsTest, EveryAdapterIsAmongTheOthers) {
  Use("a", 3);
  now_ += absl::Minutes(2);
  Tokens();
  Use("a", 4);
  EXPECT_THAT(Tokens(), Contains(Pair("other", 7)));
  EXPECT_EQ(Tokens().size(), 2);
}

}  // namespace
}  // namespace dorad::internal
