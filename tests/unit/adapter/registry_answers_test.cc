// Answers about versions that cannot serve, and what is retired with age.
#include "tests/unit/adapter/registry_fixture.h"

namespace dorad::adapter {
namespace {

TEST_F(AdapterRegistryTest, AnUnknownNameIsAnsweredWithTheNearOnesThatAreReady) {
  Publish("policy", true);
  Publish("policy-2", true);
  Publish("critic", true);
  *registry_->Reserve("polic", std::nullopt, {});  // not ready
  const absl::Status status = registry_->Acquire({"polcy", 0}).status();
  EXPECT_EQ(ReasonOf(status), "ADAPTER_NOT_FOUND");
  EXPECT_THAT(std::string(status.message()), HasSubstr("did you mean policy?"));
  EXPECT_THAT(MetadataOf(status), ElementsAre(Pair("adapter", "polcy"), Pair("nearest", "policy")));
  EXPECT_THAT(MetadataOf(registry_->Acquire({"policy-1", 0}).status()),
              ElementsAre(Pair("adapter", "policy-1"), Pair("nearest", "policy-2,policy")));
  const absl::Status far = registry_->Acquire({"something-else", 0}).status();
  EXPECT_THAT(MetadataOf(far), ElementsAre(Pair("adapter", "something-else")));
  EXPECT_EQ(std::string(far.message()), "there is no adapter named \"something-else\"");
  const std::string longest(128, 'p');
  EXPECT_THAT(MetadataOf(registry_->Get({longest, 0}).status()),
              ElementsAre(Pair("adapter", longest)));
}

TEST_F(AdapterRegistryTest, FindsANearNameAmongMany) {
  for (int i = 0; i < 300; ++i) Publish(absl::StrCat("run-", i, "-policy"), false);
  EXPECT_THAT(MetadataOf(registry_->Acquire({"run-2-polic", 0}).status()),
              Contains(Pair("nearest", HasSubstr("run-2-policy"))));
}

TEST_F(AdapterRegistryTest, AnUnknownVersionIsAnsweredWithTheNewestReadyOnes) {
  for (int i = 0; i < 10; ++i) Publish("a", false);
  ASSERT_TRUE(registry_->Retire("a", 5).ok());
  const absl::Status status = registry_->Acquire({"a", 99}).status();
  EXPECT_EQ(ReasonOf(status), "ADAPTER_NOT_FOUND");
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("newest ready versions: 2, 3, 4, 6, 7, 8, 9, 10"));
  EXPECT_THAT(MetadataOf(status), ElementsAre(Pair("ready_versions", "2,3,4,6,7,8,9,10")));
  const absl::Status inactive = registry_->Acquire({"a", 0}).status();
  EXPECT_EQ(ReasonOf(inactive), "ADAPTER_NO_ACTIVE_VERSION");
  EXPECT_THAT(MetadataOf(inactive), ElementsAre(Pair("ready_versions", "2,3,4,6,7,8,9,10")));
}

// A number may name another version after a restart without a store.
TEST_F(AdapterRegistryTest, AReferenceWithAnotherDigestNamesNoVersion) {
  Publish("a", true);  // its digest is "a"
  EXPECT_TRUE(registry_->Acquire({"a", 1, "a"}).ok());
  EXPECT_TRUE(registry_->CheckExists({"a", 1, "a"}).ok());
  for (const absl::Status& status :
       {registry_->Acquire({"a", 1, "b"}).status(), registry_->Get({"a", 1, "b"}).status(),
        registry_->CheckExists({"a", 1, "b"})}) {
    EXPECT_EQ(ReasonOf(status), "ADAPTER_NOT_FOUND");
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("a@1 is another one: its digest is a, not b"));
  }
}

TEST(AdapterRefTest, ReadsTheDigestAfterTheVersion) {
  const auto ref = AdapterRef::Parse("policy@7:0f3c81aa93de");
  ASSERT_TRUE(ref.ok()) << ref.status();
  EXPECT_EQ(ref->name, "policy");
  EXPECT_EQ(ref->version, 7);
  EXPECT_EQ(ref->digest, "0f3c81aa93de");
  EXPECT_EQ(ref->ToString(), "policy@7");
  EXPECT_EQ(*ref, (AdapterRef{"policy", 7}));
  for (const std::string& text :
       {std::string("policy@7:"), std::string("policy@7:0f3c81a"), std::string("policy@7:0F3C81AA"),
        std::string("policy@:0f3c81aa"), std::string("policy:0f3c81aa"),
        std::string("policy@7:0f3c81aa:0f3c81aa"), "policy@7:" + std::string(65, 'a')}) {
    EXPECT_EQ(ReasonOf(AdapterRef::Parse(text).status()), "ADAPTER_NAME_INVALID") << text;
  }
}

TEST_F(AdapterRegistryTest, AVersionThatCannotServeSaysWhy) {
  const int64_t failed = *registry_->Reserve("a", std::nullopt, {});
  registry_->Fail("a", failed, MakeInvalid("adapter", {{"x", "ADAPTER_NOT_FINITE", "has a NaN"}}));
  const absl::Status why = registry_->Acquire({"a", failed}).status();
  EXPECT_EQ(ReasonOf(why), "ADAPTER_NOT_READY");
  EXPECT_THAT(std::string(why.message()),
              AllOf(HasSubstr("a@1 failed to load"), HasSubstr("ADAPTER_NOT_FINITE"),
                    HasSubstr("has a NaN")));
  EXPECT_THAT(MetadataOf(why),
              ElementsAre(Pair("failure_reason", "ADAPTER_NOT_FINITE"), Pair("state", "failed")));
  std::vector<Violation> many(600, {"tensor", "ADAPTER_TENSOR_MISSING", std::string(100, 'x')});
  const int64_t wrong = *registry_->Reserve("a", std::nullopt, {});
  registry_->Fail("a", wrong, MakeInvalid("adapter", std::move(many)));
  const absl::Status brief = registry_->Retire("a", wrong).status();
  EXPECT_THAT(std::string(brief.message()), HasSubstr("and 599 more"));
  EXPECT_LT(brief.message().size(), 300u) << "not a list of problems where a word is wanted";
  const int64_t held = Publish("a", false);
  AdapterLease lease = *registry_->Acquire({"a", held});
  ASSERT_TRUE(registry_->Retire("a", held).ok());
  const absl::Status retiring = registry_->Acquire({"a", held}).status();
  EXPECT_THAT(std::string(retiring.message()), HasSubstr("has been retired and serves only"));
  EXPECT_THAT(MetadataOf(retiring), ElementsAre(Pair("state", "retiring")));
  lease.Reset();
  const absl::Status gone = registry_->Acquire({"a", held}).status();
  EXPECT_THAT(std::string(gone.message()), HasSubstr("has been retired and is gone"));
  EXPECT_THAT(MetadataOf(gone), ElementsAre(Pair("state", "gone")));
  const int64_t loading = *registry_->Reserve("a", std::nullopt, {});
  EXPECT_THAT(MetadataOf(registry_->Acquire({"a", loading}).status()),
              ElementsAre(Pair("state", "loading")));
}

TEST_F(AdapterRegistryTest, AGenerationThatHasMovedIsTold) {
  const int64_t version = Publish("a", false);
  const int64_t now = registry_->generation();
  EXPECT_THAT(MetadataOf(registry_->Activate("a", version, now - 1).status()),
              ElementsAre(Pair("current_generation", absl::StrCat(now))));
}

TEST_F(AdapterRegistryTest, RetiresOlderVersionsButTheActiveOneAndWhatIsHeld) {
  for (int i = 0; i < 6; ++i) Publish("a", /*activate=*/i == 1);
  Publish("b", false);
  AdapterLease held = *registry_->Acquire({"a", 3});
  const int64_t before = registry_->generation();
  EXPECT_EQ(*registry_->RetireOlder("a", 2), 3);  // 1, 3, 4; 2 is active
  EXPECT_THAT(EventTypes(before),
              ElementsAre(EventType::kRetired, EventType::kGone, EventType::kRetired,
                          EventType::kRetired, EventType::kGone));
  std::vector<AdapterState> states;
  for (const AdapterRecord& record : registry_->List("a", "", 0, 10)) {
    states.push_back(record.state);
  }
  using enum AdapterState;
  EXPECT_THAT(states, ElementsAre(kGone, kReady, kRetiring, kGone, kReady, kReady));
  EXPECT_TRUE(registry_->Get({"a", 2})->active);
  EXPECT_EQ(registry_->Get({"b", 1})->state, kReady);
  held.Reset();
  EXPECT_EQ(registry_->Get({"a", 3})->state, kGone);
  EXPECT_EQ(*registry_->RetireOlder("a", 2), 0);
  EXPECT_EQ(*registry_->RetireOlder("nobody", 1), 0);
  Drain();
  EXPECT_EQ(memory_.alive, 4);
}

TEST_F(AdapterRegistryTest, VersionsThatAreNotReadyDoNotCountAsNewest) {
  Publish("a", false);
  *registry_->Reserve("a", std::nullopt, {});
  const int64_t failed = *registry_->Reserve("a", std::nullopt, {});
  registry_->Fail("a", failed, absl::InternalError("x"));
  EXPECT_EQ(*registry_->RetireOlder("a", 1), 0);
  EXPECT_EQ(registry_->Get({"a", 1})->state, AdapterState::kReady);
}

}  // namespace
}  // namespace dorad::adapter
