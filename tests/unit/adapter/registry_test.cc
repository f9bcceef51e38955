#include "tests/unit/adapter/registry_fixture.h"

namespace dorad::adapter {
namespace {

TEST_F(AdapterRegistryTest, AVersionLivesFromReservationToGone) {
  EXPECT_EQ(*registry_->Reserve("a", std::nullopt, {{"step", "7"}}), 1);
  EXPECT_EQ(registry_->Get({"a", 1})->state, AdapterState::kLoading);
  EXPECT_EQ(ReasonOf(registry_->Acquire({"a", 1}).status()), "ADAPTER_NOT_READY");
  EXPECT_EQ(*registry_->Publish(Loaded("a", 1), true, std::nullopt), 2) << "with its activation";
  AdapterRecord record = *registry_->Get({"a", 0});
  EXPECT_EQ(record.state, AdapterState::kReady);
  EXPECT_TRUE(record.active);
  EXPECT_EQ(record.tags.at("step"), "7");
  EXPECT_EQ(Bytes(), 100);

  AdapterLease lease = *registry_->Acquire({"a", 0});
  EXPECT_EQ(lease.get()->version(), 1);
  EXPECT_EQ(registry_->Get({"a", 1})->leases, 1);
  const auto retirement = registry_->Retire("a", 1);
  EXPECT_EQ(retirement->adapter.state, AdapterState::kRetiring);
  EXPECT_FALSE(retirement->adapter.active);
  EXPECT_EQ(ReasonOf(registry_->Acquire({"a", 0}).status()), "ADAPTER_NO_ACTIVE_VERSION");
  EXPECT_EQ(ReasonOf(registry_->Acquire({"a", 1}).status()), "ADAPTER_NOT_READY");
  EXPECT_EQ(ReasonOf(registry_->Retire("a", 1).status()), "ADAPTER_NOT_READY");
  EXPECT_EQ(Bytes(), 100) << "the lease still uses it";
  EXPECT_EQ(lease.get()->digest(), "a");

  lease.Reset();
  EXPECT_EQ(registry_->Get({"a", 1})->state, AdapterState::kGone);
  EXPECT_EQ(Bytes(), 0);
  EXPECT_EQ(registry_->total_leases(), 0);
  Drain();
  EXPECT_EQ(memory_.alive, 0);
  EXPECT_EQ(memory_.freed_elsewhere, 0);
  EXPECT_THAT(EventTypes(0), ElementsAre(EventType::kPublished, EventType::kActivated,
                                         EventType::kRetired, EventType::kGone));
}

TEST_F(AdapterRegistryTest, RetiringWithoutLeasesEndsAtOnce) {
  Publish("a", false);
  EXPECT_EQ(registry_->Retire("a", 1)->adapter.state, AdapterState::kGone);
  Drain();
  EXPECT_EQ(memory_.alive, 0);
  EXPECT_EQ(memory_.freed_elsewhere, 0);
}

TEST_F(AdapterRegistryTest, VersionNumbersRiseAndAreNeverUsedTwice) {
  EXPECT_EQ(*registry_->Reserve("a", 5, {}), 5);
  EXPECT_EQ(ReasonOf(registry_->Reserve("a", 5, {}).status()), "ADAPTER_VERSION_TAKEN");
  EXPECT_EQ(ReasonOf(registry_->Reserve("a", 4, {}).status()), "ADAPTER_VERSION_TAKEN");
  registry_->Fail("a", 5, MakeError(absl::StatusCode::kUnavailable, "STORE_UNAVAILABLE", "I/O"));
  const absl::Status taken = registry_->Reserve("a", 5, {}).status();
  EXPECT_EQ(ReasonOf(taken), "ADAPTER_VERSION_TAKEN");
  EXPECT_EQ(MetadataOf(taken)["failure_reason"], "STORE_UNAVAILABLE");
  EXPECT_THAT(std::string(taken.message()), HasSubstr("failed to load"));
  EXPECT_EQ(*registry_->Reserve("a", std::nullopt, {}), 6);
  EXPECT_EQ(*registry_->Reserve("b", std::nullopt, {}), 1);
  EXPECT_EQ(ReasonOf(registry_->Reserve("b", 0, {}).status()), "ADAPTER_VERSION_INVALID");
  EXPECT_EQ(ReasonOf(registry_->Reserve("b", int64_t{1} << 60, {}).status()),
            "ADAPTER_VERSION_INVALID");
  for (const char* name : {"", "A", "../a", "a/b", "a@1", "-a", "a-", "a b"}) {
    EXPECT_EQ(ReasonOf(registry_->Reserve(name, std::nullopt, {}).status()), "ADAPTER_NAME_INVALID")
        << name;
  }
}

// A publisher of some names must not take the numbers of others.
TEST_F(AdapterRegistryTest, LoadsThatFailDoNotDriveTheNumbersOfOtherNames) {
  constexpr int64_t kMost = 10'000'000'000'000'000;
  EXPECT_EQ(ReasonOf(registry_->Reserve("z", kMost + 1, {}).status()), "ADAPTER_VERSION_INVALID");
  registry_->Fail("z", *registry_->Reserve("z", kMost, {}), absl::UnknownError("broken"));
  EXPECT_EQ(*registry_->Reserve("z", std::nullopt, {}), kMost + 1);
  registry_->Fail("z", kMost + 1, absl::UnknownError("broken"));
  EXPECT_EQ(Publish("served", false), 1);
  EXPECT_EQ(Publish("served", false), 2);
  for (const int64_t version : {1, 2}) {
    ASSERT_TRUE(registry_->Retire("served", version).ok());
  }
  // So many names that those without a record are forgotten.
  for (int i = 0; i < 70'000; ++i) {
    const std::string name = absl::StrCat("n", i);
    registry_->Fail(name, *registry_->Reserve(name, std::nullopt, {}), absl::UnknownError("no"));
  }
  // Above what served, and not above what never did.
  EXPECT_EQ(*registry_->Reserve("mine", std::nullopt, {}), 3);
  EXPECT_EQ(*registry_->Reserve("other", 4, {}), 4);
}

TEST_F(AdapterRegistryTest, ActivationIsACompareAndSet) {
  Publish("a", true);
  Publish("a", false);
  const int64_t generation = registry_->generation();
  EXPECT_EQ(ReasonOf(registry_->Activate("a", 2, generation - 1).status()), "GENERATION_MISMATCH");
  EXPECT_EQ(registry_->Get({"a", 0})->version, 1);
  const auto activation = registry_->Activate("a", 2, generation);
  ASSERT_TRUE(activation.ok()) << activation.status();
  EXPECT_EQ(activation->previous_version, 1);
  EXPECT_EQ(activation->generation, generation + 1);
  EXPECT_TRUE(activation->adapter.active);
  EXPECT_FALSE(registry_->Get({"a", 1})->active);
  EXPECT_EQ(registry_->Activate("a", 2, std::nullopt)->generation, generation + 1)
      << "activating the active version changes nothing";
  EXPECT_EQ(ReasonOf(registry_->Activate("a", 3, std::nullopt).status()), "ADAPTER_NOT_FOUND");
  EXPECT_EQ(ReasonOf(registry_->Activate("x", 1, std::nullopt).status()), "ADAPTER_NOT_FOUND");
  EXPECT_EQ(ReasonOf(registry_->Activate("a", 0, std::nullopt).status()), "ADAPTER_NOT_FOUND");
}

TEST_F(AdapterRegistryTest, ARefusedPublishLeavesTheActiveVersion) {
  Publish("a", true);
  const int64_t version = *registry_->Reserve("a", std::nullopt, {});
  const auto refused = registry_->Publish(Loaded("a", version), true, 999);
  EXPECT_EQ(ReasonOf(refused.status()), "GENERATION_MISMATCH");
  EXPECT_EQ(registry_->Get({"a", 0})->version, 1);
  EXPECT_EQ(registry_->Get({"a", version})->state, AdapterState::kFailed);
  EXPECT_EQ(ReasonOf(registry_->Get({"a", version})->failure), "GENERATION_MISMATCH");
  EXPECT_EQ(Bytes(), 100);
  Drain();
  EXPECT_EQ(memory_.alive, 1);
  EXPECT_EQ(memory_.freed_elsewhere, 0);
}

TEST_F(AdapterRegistryTest, TheBaseNeedsNoLease) {
  EXPECT_EQ(registry_->Acquire({})->get(), nullptr);
  EXPECT_EQ(registry_->total_leases(), 0);
}

TEST_F(AdapterRegistryTest, ListsInOrderAndInPages) {
  for (const char* name : {"b", "a", "c", "a", "b"}) Publish(name, false);
  const auto page = [this](const std::string& name, const std::string& after, int64_t version,
                           int limit) {
    std::vector<std::string> found;
    for (const AdapterRecord& record : registry_->List(name, after, version, limit)) {
      found.push_back(record.name + "@" + std::to_string(record.version));
    }
    return found;
  };
  EXPECT_THAT(page("", "", 0, 3), ElementsAre("a@1", "a@2", "b@1"));
  EXPECT_THAT(page("", "b", 1, 3), ElementsAre("b@2", "c@1"));
  EXPECT_THAT(page("", "c", 1, 3), ElementsAre());
  EXPECT_THAT(page("b", "", 0, 10), ElementsAre("b@1", "b@2"));
  EXPECT_THAT(page("b", "b", 1, 10), ElementsAre("b@2"));
  EXPECT_THAT(page("b", "bb", 1, 10), ElementsAre());
}

TEST_F(AdapterRegistryTest, CountsVersionsByState) {
  for (const char* name : {"b", "a", "c", "a"}) Publish(name, false);
  ASSERT_TRUE(registry_->Reserve("d", std::nullopt, {}).ok());
  absl::StatusOr<AdapterLease> lease = registry_->Acquire({"a", 1});
  ASSERT_TRUE(lease.ok());
  ASSERT_TRUE(registry_->Retire("a", 1).ok());
  ASSERT_TRUE(registry_->Retire("c", 1).ok());
  const std::map<AdapterState, int> expected = {{AdapterState::kLoading, 1},
                                                {AdapterState::kReady, 2},
                                                {AdapterState::kRetiring, 1},
                                                {AdapterState::kGone, 1}};
  EXPECT_EQ(registry_->Totals().by_state, expected);
}

TEST_F(AdapterRegistryTest, ChecksumsTheActiveVersions) {
  const uint32_t none = registry_->Totals().active_checksum;
  Publish("a", true);
  const VersionTotals first = registry_->Totals();
  Publish("a", false);
  Publish("b", false);
  const VersionTotals waiting = registry_->Totals();
  EXPECT_EQ(std::tie(waiting.active_checksum, waiting.active_numbers, waiting.unactivated),
            std::make_tuple(first.active_checksum, int64_t{1}, 2));
  ASSERT_TRUE(registry_->Activate("b", 1, std::nullopt).ok());
  ASSERT_TRUE(registry_->Activate("a", 2, std::nullopt).ok());
  const VersionTotals now = registry_->Totals();
  EXPECT_EQ(std::tie(now.active_numbers, now.unactivated), std::make_tuple(int64_t{3}, 0));
  // An older version is neither ahead nor in the checksum.
  AdapterRegistry::Options options;
  options.executor = [](const std::function<void()>& task) { task(); };
  AdapterRegistry other(options);
  ASSERT_TRUE(other.Reserve("a", 2, {}).ok());
  ASSERT_TRUE(other.Publish(Loaded("a", 2), true, std::nullopt).ok());
  ASSERT_TRUE(other.Reserve("b", 1, {}).ok());
  EXPECT_NE(other.Totals().active_checksum, now.active_checksum);
  ASSERT_TRUE(other.Publish(Loaded("b", 1), true, std::nullopt).ok());
  EXPECT_EQ(other.Totals().active_checksum, now.active_checksum);
  ASSERT_TRUE(registry_->Retire("b", 1).ok());
  ASSERT_TRUE(registry_->Retire("a", 2).ok());
  ASSERT_TRUE(registry_->Retire("a", 1).ok());
  EXPECT_EQ(registry_->Totals().active_checksum, none);
  EXPECT_NE(now.active_checksum, none);
}

TEST_F(AdapterRegistryTest, ChecksumsTheContentOfActiveVersions) {
  const auto checksum_of = [this](const std::string& digest) {
    AdapterRegistry::Options options;
    options.executor = [](const std::function<void()>& task) { task(); };
    AdapterRegistry registry(options);
    AdapterSummary summary;
    summary.digest = digest;
    EXPECT_TRUE(registry.Reserve("a", 1, {}).ok());
    const auto adapter =
        std::make_shared<const LoadedAdapter>("a", 1, summary, MakeWeights(memory_));
    EXPECT_TRUE(registry.Publish(adapter, true, std::nullopt).ok());
    return registry.Totals().active_checksum;
  };
  EXPECT_EQ(checksum_of("00ff"), checksum_of("00ff"));
  EXPECT_NE(checksum_of("00ff"), checksum_of("00fe"));
}

TEST_F(AdapterRegistryTest, SaysWhenEventsAreNoLongerKept) {
  for (int i = 0; i < 12; ++i) Publish("a", false);
  EXPECT_EQ(ReasonOf(registry_->EventsAfter(3, 10).status()), "GENERATION_COMPACTED");
  const auto kept = registry_->EventsAfter(4, 3);
  ASSERT_TRUE(kept.ok()) << kept.status();
  ASSERT_EQ(kept->size(), 3u);
  EXPECT_EQ(kept->front().generation, 5);
  EXPECT_TRUE(registry_->EventsAfter(12, 3)->empty());
  EXPECT_EQ(ReasonOf(registry_->EventsAfter(13, 3).status()), "GENERATION_UNKNOWN");
}

TEST_F(AdapterRegistryTest, AWatcherCanContinueAfterAnyEvent) {
  Publish("a", true);
  Publish("a", true);
  using enum EventType;
  int64_t generation = 0;
  for (const EventType expected : {kPublished, kActivated, kPublished, kActivated}) {
    const auto page = registry_->EventsAfter(generation, 1);
    ASSERT_EQ(page->size(), 1u);
    EXPECT_EQ(page->front().type, expected);
    EXPECT_EQ(page->front().generation, ++generation);
  }
}

TEST_F(AdapterRegistryTest, OfTwoActivationsThatExpectAGenerationOneFails) {
  Publish("a", true);
  const int64_t seen = registry_->generation();
  EXPECT_EQ(registry_->Activate("a", 1, std::nullopt)->generation, seen) << "nothing changes";
  EXPECT_EQ(registry_->Activate("a", 1, seen)->generation, seen + 1);
  EXPECT_EQ(ReasonOf(registry_->Activate("a", 1, seen).status()), "GENERATION_MISMATCH");
}

TEST_F(AdapterRegistryTest, KnowsWhetherANameOrVersionExists) {
  Publish("a", false);
  EXPECT_TRUE(registry_->CheckExists({"a", 0}).ok()) << "no version is active";
  EXPECT_TRUE(registry_->CheckExists({"a", 1}).ok());
  EXPECT_TRUE(registry_->CheckExists({"", 0}).ok());
  EXPECT_EQ(ReasonOf(registry_->CheckExists({"a", 2})), "ADAPTER_NOT_FOUND");
  EXPECT_EQ(ReasonOf(registry_->CheckExists({"b", 0})), "ADAPTER_NOT_FOUND");
}

TEST_F(AdapterRegistryTest, KeepsOnlySomeEndedRecords) {
  for (int i = 0; i < 10; ++i) {
    const int64_t version = *registry_->Reserve("a", std::nullopt, {});
    registry_->Fail("a", version, absl::InternalError("broken"));
  }
  EXPECT_EQ(registry_->List("a", "", 0, 100).size(), 4u);
  EXPECT_EQ(ReasonOf(registry_->Get({"a", 3}).status()), "ADAPTER_NOT_FOUND");
  EXPECT_EQ(registry_->Get({"a", 10})->failure.message(), "broken");
  EXPECT_EQ(*registry_->Reserve("a", std::nullopt, {}), 11);
}

TEST_F(AdapterRegistryTest, CallsSubscribersAfterEachChangeUntilUnsubscribed) {
  int calls = 0;
  const int64_t id = registry_->Subscribe([&] {
    ++calls;
    (void)registry_->generation();  // must not deadlock
  });
  Publish("a", true);
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(registry_->Retire("a", 1).ok());
  EXPECT_EQ(calls, 2);
  registry_->Unsubscribe(id);
  Publish("a", true);
  EXPECT_EQ(calls, 2);
}

TEST_F(AdapterRegistryTest, UnsubscribeWaitsForARunningCall) {
  absl::Notification entered, leave;
  std::atomic<bool> left = false;
  const int64_t id = registry_->Subscribe([&] {
    entered.Notify();
    leave.WaitForNotification();
    left = true;
  });
  std::thread publisher([this] { Publish("a", false); });
  entered.WaitForNotification();
  std::thread unsubscriber([&] {
    registry_->Unsubscribe(id);
    EXPECT_TRUE(left);
  });
  absl::SleepFor(absl::Milliseconds(20));
  leave.Notify();
  unsubscriber.join();
  publisher.join();
}

TEST_F(AdapterRegistryTest, LeasesMayOutliveTheRegistry) {
  Publish("a", true);
  Publish("b", true);
  AdapterLease ready = *registry_->Acquire({"a", 0});
  AdapterLease retiring = *registry_->Acquire({"b", 0});
  EXPECT_TRUE(registry_->Retire("b", 1).ok());
  registry_.reset();
  EXPECT_EQ(ready.get()->name(), "a");
  retiring.Reset();
  ready.Reset();
  EXPECT_EQ(memory_.alive, 0);
}

// Random sequences of everything against a model as plain as possible.
TEST_F(AdapterRegistryTest, AgreesWithASimpleModel) {
  struct Model {
    std::map<std::pair<std::string, int64_t>, AdapterState> states;
    std::map<std::string, int64_t> last, active;
    std::multiset<std::pair<std::string, int64_t>> leases;
    int64_t generation = 0;
  } model;
  std::vector<AdapterLease> leases;
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    for (int step = 0; step < 400; ++step) {
      const std::string name(1, static_cast<char>('a' + random() % 3));
      // Mostly one of the newest versions: older records may have been dropped.
      const int64_t version = std::max<int64_t>(1, model.last[name] - random() % 3);
      const auto key = std::make_pair(name, version);
      const auto known = model.states.find(key);
      const auto end_of = [&](const std::pair<std::string, int64_t>& ended) {
        if (model.states[ended] == AdapterState::kRetiring && model.leases.count(ended) == 0) {
          model.states[ended] = AdapterState::kGone;
          ++model.generation;
        }
      };
      switch (random() % 7) {
        case 0: {
          ASSERT_EQ(*registry_->Reserve(name, std::nullopt, {}), ++model.last[name]);
          model.states[{name, model.last[name]}] = AdapterState::kLoading;
          break;
        }
        case 1: {
          if (known == model.states.end() || known->second != AdapterState::kLoading) break;
          const bool activate = random() % 2 == 0;
          const bool stale = random() % 4 == 0;
          const auto result = registry_->Publish(Loaded(name, version), activate,
                                                 model.generation - (stale ? 1 : 0));
          ++model.generation;
          if (result.ok() && activate) ++model.generation;
          ASSERT_EQ(result.ok(), !(activate && stale)) << result.status();
          known->second = result.ok() ? AdapterState::kReady : AdapterState::kFailed;
          if (result.ok() && activate) model.active[name] = version;
          break;
        }
        case 2:
          if (known == model.states.end() || known->second != AdapterState::kLoading) break;
          registry_->Fail(name, version, absl::InternalError("x"));
          known->second = AdapterState::kFailed;
          ++model.generation;
          break;
        case 3: {
          const bool allowed = known != model.states.end() && known->second == AdapterState::kReady;
          ASSERT_EQ(registry_->Activate(name, version, std::nullopt).ok(), allowed);
          if (allowed && model.active[name] != version) {
            model.active[name] = version;
            ++model.generation;
          }
          break;
        }
        case 4: {
          const bool allowed = known != model.states.end() && known->second == AdapterState::kReady;
          ASSERT_EQ(registry_->Retire(name, version).ok(), allowed);
          if (!allowed) break;
          known->second = AdapterState::kRetiring;
          ++model.generation;
          if (model.active[name] == version) model.active[name] = 0;
          end_of(key);
          break;
        }
        case 5: {
          const bool by_active = random() % 2 == 0;
          const int64_t wanted = by_active ? model.active[name] : version;
          const auto state = model.states.find({name, wanted});
          const bool allowed = state != model.states.end() && state->second == AdapterState::kReady;
          auto lease = registry_->Acquire({name, by_active ? 0 : version});
          ASSERT_EQ(lease.ok(), allowed) << lease.status();
          if (!allowed) break;
          ASSERT_EQ(lease->get()->version(), wanted);
          model.leases.insert({name, wanted});
          leases.push_back(*std::move(lease));
          break;
        }
        case 6: {
          if (leases.empty()) break;
          const size_t index = random() % leases.size();
          const auto held =
              std::make_pair(leases[index].get()->name(), leases[index].get()->version());
          leases.erase(leases.begin() + static_cast<std::ptrdiff_t>(index));
          model.leases.erase(model.leases.find(held));
          end_of(held);
          break;
        }
      }
      int64_t resident = 0;
      for (const auto& [id, state] : model.states) {
        if (state == AdapterState::kReady || state == AdapterState::kRetiring) resident += 100;
      }
      ASSERT_EQ(registry_->generation(), model.generation);
      ASSERT_EQ(Bytes(), resident);
      ASSERT_EQ(registry_->total_leases(), static_cast<int>(model.leases.size()));
    }
  }
  leases.clear();
  for (const auto& [key, state] : model.states) {
    if (state == AdapterState::kReady) {
      EXPECT_TRUE(registry_->Retire(key.first, key.second).ok());
    }
  }
  EXPECT_EQ(registry_->total_leases(), 0);
  EXPECT_EQ(Bytes(), 0);
  Drain();
  EXPECT_EQ(memory_.alive, 0);
  EXPECT_EQ(memory_.freed_elsewhere, 0);
}

TEST_F(AdapterRegistryTest, ManyThreadsLeaveNothingBehind) {
  std::atomic<int> notified = 0;
  const int64_t id = registry_->Subscribe([&] { ++notified; });
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([this, seed] {
      std::mt19937 random(seed);
      std::vector<AdapterLease> leases;
      for (int i = 0; i < 500; ++i) {
        const std::string name(1, static_cast<char>('a' + random() % 2));
        if (i % 4 == 0) {
          const int64_t version = Publish(name, true);
          if (version > 1) (void)registry_->Retire(name, version - 1);
        }
        auto lease = registry_->Acquire({name, 0});
        if (lease.ok()) {
          EXPECT_EQ(lease->get()->name(), name);
          leases.push_back(*std::move(lease));
        }
        if (leases.size() > 5) leases.erase(leases.begin());
        (void)registry_->List("", "", 0, 10);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  registry_->Unsubscribe(id);
  EXPECT_GT(notified, 0);
  for (const AdapterRecord& record : registry_->List("", "", 0, 100000)) {
    if (record.state == AdapterState::kReady) {
      EXPECT_TRUE(registry_->Retire(record.name, record.version).ok());
    }
  }
  EXPECT_EQ(registry_->total_leases(), 0);
  EXPECT_EQ(Bytes(), 0);
  Drain();
  EXPECT_EQ(memory_.alive, 0);
  EXPECT_EQ(memory_.freed_elsewhere, 0);
}

}  // namespace
}  // namespace dorad::adapter
