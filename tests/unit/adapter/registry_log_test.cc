// The registry over a change log: what is durable when, and what a restart brings back.

#include "absl/strings/str_replace.h"
#include "server/adapter/registry/registry.h"
#include "server/platform/thread_pool.h"
#include "tests/unit/support/test.h"

namespace dorad::adapter {
namespace {

using Type = Change::Type;

class FakeLog : public ChangeLog {
 public:
  absl::Status Append(const Change& change) override {
    if (on_append) on_append(change);
    DORAD_RETURN_IF_ERROR(failure);
    absl::MutexLock lock(&mu);
    changes.push_back(change);
    state.Apply(change);
    return absl::OkStatus();
  }
  void Drop(const std::string& object) override {
    absl::MutexLock lock(&mu);
    dropped.push_back(object);
  }

  std::vector<Type> Types() {
    std::vector<Type> types;
    for (const Change& change : changes) types.push_back(change.type);
    return types;
  }

  std::function<void(const Change&)> on_append;
  absl::Status failure;
  absl::Mutex mu;
  std::vector<Change> changes;
  std::vector<std::string> dropped;
  StoredState state;
};

class RegistryLogTest : public ::testing::Test {
 protected:
  // Of the versions that are not GONE.
  int64_t Bytes() const {
    int64_t bytes = 0;
    for (const AdapterRecord& record : registry_->List("", "", 0, 1000)) {
      bytes += record.summary.resident_bytes;
    }
    return bytes;
  }

  RegistryLogTest() { Start(); }

  void Start() {
    AdapterRegistry::Options options;
    options.executor = [this](std::function<void()> task) { pool_.Submit(std::move(task)); };
    options.log = &log_;
    registry_ = std::make_unique<AdapterRegistry>(std::move(options));
  }

  // A new run of the server on what the log holds.
  void Restart(const AdapterRegistry::LoadStored& load) {
    Start();
    ASSERT_TRUE(
        log_.Append({.type = Type::kStarted, .generation = log_.state.generation + 1}).ok());
    log_.changes.clear();
    registry_->Restore(log_.state, load);
  }
  void Restart() {
    Restart([](const std::string& name, int64_t version, const StoredVersion& stored) {
      return Loaded(name, version, stored.digest);
    });
  }

  void Drain() {
    absl::Notification done;
    pool_.Submit([&done] { done.Notify(); });
    done.WaitForNotification();
  }

  static std::shared_ptr<const LoadedAdapter> Loaded(const std::string& name, int64_t version,
                                                     const std::string& digest = "d") {
    AdapterSummary summary;
    summary.digest = digest;
    summary.resident_bytes = 100;
    return std::make_shared<const LoadedAdapter>(name, version, summary,
                                                 std::make_shared<AdapterWeights>());
  }

  int64_t Publish(const std::string& name, bool activate, const std::string& object) {
    const int64_t version = *registry_->Reserve(name, std::nullopt, {{"k", name}});
    const auto published = registry_->Publish(Loaded(name, version, "digest of " + object),
                                              activate, std::nullopt, object);
    EXPECT_TRUE(published.ok()) << published.status();
    return version;
  }

  // All that a caller can see.
  std::string View() const {
    std::string view = absl::StrCat("generation ", registry_->generation(), "\n");
    for (const AdapterRecord& r : registry_->List("", "", 0, 1000)) {
      absl::StrAppend(&view, r.name, "@", r.version, " ", static_cast<int>(r.state), r.active,
                      r.durable, "\n");
    }
    return view;
  }

  FakeLog log_;
  ThreadPool pool_{1, 0};
  std::unique_ptr<AdapterRegistry> registry_;
};

TEST_F(RegistryLogTest, EveryChangeIsLoggedBeforeAnyoneSeesIt) {
  std::string before;
  int appends = 0;
  log_.on_append = [&](const Change& change) {
    ++appends;
    // Readers are not held up while the log waits for its disk.
    EXPECT_EQ(View(), before) << ToJson(change);
  };
  const auto step = [&](const auto& change) {
    before = View();
    change();
    EXPECT_NE(View(), before);
  };
  step([&] { EXPECT_TRUE(registry_->Reserve("a", std::nullopt, {}).ok()); });
  step([&] { EXPECT_TRUE(registry_->Publish(Loaded("a", 1), true, std::nullopt, "one").ok()); });
  step([&] { EXPECT_TRUE(registry_->Reserve("a", std::nullopt, {}).ok()); });
  step([&] { EXPECT_TRUE(registry_->Publish(Loaded("a", 2), false, std::nullopt, "two").ok()); });
  step([&] { EXPECT_TRUE(registry_->Activate("a", 2, std::nullopt).ok()); });
  step([&] { EXPECT_TRUE(registry_->Retire("a", 1).ok()); });
  EXPECT_EQ(appends, 6);
  EXPECT_THAT(log_.Types(), ElementsAre(Type::kReserved, Type::kPublished, Type::kReserved,
                                        Type::kPublished, Type::kActivated, Type::kRetired));
}

TEST_F(RegistryLogTest, AFailedAppendLeavesAllAsItWas) {
  Publish("a", true, "one");
  Publish("a", false, "two");
  const int64_t loading = *registry_->Reserve("a", std::nullopt, {});
  const std::string before = View();
  log_.failure = MakeError(absl::StatusCode::kResourceExhausted, "STORE_FULL", "no room");
  EXPECT_EQ(ReasonOf(registry_->Reserve("a", std::nullopt, {}).status()), "STORE_FULL");
  EXPECT_EQ(ReasonOf(registry_->Activate("a", 2, std::nullopt).status()), "STORE_FULL");
  EXPECT_EQ(ReasonOf(registry_->Retire("a", 1).status()), "STORE_FULL");
  EXPECT_EQ(View(), before);
  EXPECT_TRUE(registry_->Acquire({"a", 0}).ok());

  EXPECT_EQ(
      ReasonOf(registry_->Publish(Loaded("a", loading), true, std::nullopt, "three").status()),
      "STORE_FULL");
  EXPECT_EQ(registry_->Get({"a", loading})->state, AdapterState::kFailed);
  EXPECT_EQ(ReasonOf(registry_->Get({"a", loading})->failure), "STORE_FULL");
  EXPECT_EQ(registry_->Get({"a", 0})->version, 1) << "still the active one";
  Drain();
  EXPECT_THAT(log_.dropped, IsEmpty()) << "the object is still the caller's";
  log_.failure = absl::OkStatus();
  EXPECT_EQ(*registry_->Reserve("a", std::nullopt, {}), loading + 1);
}

TEST_F(RegistryLogTest, OnlyDurableVersionsComeBack) {
  Publish("a", false, "one");
  Publish("a", true, "two");
  Publish("a", false, "");
  Publish("b", true, "");
  const absl::Time created = registry_->Get({"a", 2})->create_time;
  Restart();
  ASSERT_EQ(registry_->List("", "", 0, 10).size(), 2u);
  const AdapterRecord two = *registry_->Get({"a", 0});
  EXPECT_EQ(two.version, 2);
  EXPECT_TRUE(two.durable && two.active);
  EXPECT_EQ(two.state, AdapterState::kReady);
  EXPECT_EQ(two.summary.digest, "digest of two");
  EXPECT_EQ(two.create_time, created);
  EXPECT_EQ(two.tags.at("k"), "a");
  EXPECT_EQ(Bytes(), 200);
  EXPECT_EQ(registry_->Acquire({"a", 1})->get()->digest(), "digest of one");
  EXPECT_EQ(ReasonOf(registry_->Acquire({"b", 1}).status()), "ADAPTER_NOT_FOUND");
  EXPECT_EQ(*registry_->Reserve("a", std::nullopt, {}), 4) << "3 was given out";
  EXPECT_EQ(ReasonOf(registry_->Reserve("b", 1, {}).status()), "ADAPTER_VERSION_TAKEN");
}

// A log that is rewritten forgets names; their numbers are never reused.
TEST_F(RegistryLogTest, NumbersThatServedAreNotUsedAgainWhateverIsForgotten) {
  ASSERT_TRUE(registry_->Reserve("durable", 3, {}).ok());
  ASSERT_TRUE(registry_->Publish(Loaded("durable", 3), false, std::nullopt, "one").ok());
  ASSERT_TRUE(registry_->Retire("durable", 3).ok());
  ASSERT_TRUE(registry_->Reserve("active", 4, {}).ok());
  ASSERT_TRUE(registry_->Publish(Loaded("active", 4), true, std::nullopt).ok());
  ASSERT_TRUE(registry_->Reserve("ephemeral", 5, {}).ok());
  ASSERT_TRUE(registry_->Publish(Loaded("ephemeral", 5), false, std::nullopt).ok());
  registry_->Fail("refused", *registry_->Reserve("refused", 9, {}), absl::UnknownError("no"));
  Restart();
  log_.state.ForgetIdleNames();
  EXPECT_EQ(log_.state.names.count("refused"), 0u);
  Restart();
  EXPECT_EQ(*registry_->Reserve("durable", std::nullopt, {}), 4);
  EXPECT_EQ(*registry_->Reserve("active", std::nullopt, {}), 5);
  EXPECT_EQ(*registry_->Reserve("ephemeral", std::nullopt, {}), 6);
  EXPECT_EQ(*registry_->Reserve("refused", std::nullopt, {}), 1);
}

// A publisher of some names must not take the numbers of others.
TEST_F(RegistryLogTest, LoadsThatFailedInAnEarlierRunDoNotDriveTheNumbersOfOtherNames) {
  constexpr int64_t kMost = 10'000'000'000'000'000;
  registry_->Fail("evil", *registry_->Reserve("evil", kMost, {}), absl::UnknownError("no"));
  EXPECT_EQ(Publish("served", true, ""), 1);
  Restart();
  EXPECT_EQ(*registry_->Reserve("evil", std::nullopt, {}), kMost + 1);
  registry_->Fail("evil", kMost + 1, absl::UnknownError("no"));
  // So many names that those without a record are forgotten.
  for (size_t i = 0; i < kMaxNames + 1000; ++i) {
    const std::string name = absl::StrCat("n", i);
    registry_->Fail(name, *registry_->Reserve(name, std::nullopt, {}), absl::UnknownError("no"));
  }
  EXPECT_EQ(*registry_->Reserve("other", 2, {}), 2);
  log_.state.ForgetIdleNames();
  EXPECT_EQ(log_.state.names.size(), 1u) << "what served";
  Restart();
  EXPECT_EQ(*registry_->Reserve("another", 2, {}), 2);
  EXPECT_EQ(*registry_->Reserve("served", std::nullopt, {}), 2);
}

TEST_F(RegistryLogTest, NamesThatTheLogForgotStartAboveEveryNumberThatServed) {
  for (size_t i = 0; i < kMaxNames; ++i) {
    const Change served = {.type = Type::kServed, .name = absl::StrCat("n", i), .version = 7};
    ASSERT_TRUE(log_.Append(served).ok());
  }
  Publish("kept", true, "one");
  log_.state.ForgetIdleNames();
  EXPECT_EQ(log_.state.names.size(), 1u);
  Restart();
  EXPECT_EQ(*registry_->Reserve("n1", std::nullopt, {}), 8);
  EXPECT_EQ(ReasonOf(registry_->Reserve("n2", 7, {}).status()), "ADAPTER_VERSION_TAKEN");
  EXPECT_EQ(*registry_->Reserve("kept", std::nullopt, {}), 2);
}

TEST_F(RegistryLogTest, AnEphemeralVersionThatWasActiveLeavesNoActiveOne) {
  Publish("a", true, "one");
  Publish("a", true, "");
  Publish("b", true, "one");
  Publish("b", false, "");
  ASSERT_TRUE(registry_->Activate("b", 2, std::nullopt).ok());
  Restart();
  for (const char* name : {"a", "b"}) {
    EXPECT_EQ(ReasonOf(registry_->Get({name, 0}).status()), "ADAPTER_NO_ACTIVE_VERSION");
    EXPECT_FALSE(registry_->Get({name, 1})->active);
  }
}

TEST_F(RegistryLogTest, GenerationsRiseAcrossRestartsWhateverWasGivenOut) {
  int64_t highest = 0, restored = 0;
  for (int restart = 0; restart < 3; ++restart) {
    // Every kind of change, logged or not.
    Publish("a", true, "");
    const int64_t retired = Publish("a", true, "kept");
    AdapterLease lease = *registry_->Acquire({"a", retired});
    ASSERT_TRUE(registry_->Retire("a", retired).ok());
    lease.Reset();
    const int64_t ephemeral = Publish("a", false, "");
    ASSERT_TRUE(registry_->Retire("a", ephemeral).ok());
    const int64_t kept = Publish("a", false, "kept");
    ASSERT_TRUE(registry_->Activate("a", kept, std::nullopt).ok());
    registry_->Fail("a", *registry_->Reserve("a", std::nullopt, {}), absl::InternalError("x"));
    // A restored one.
    if (restart > 0) {
      ASSERT_TRUE(registry_->Retire("a", restored).ok());
    }
    restored = kept;
    highest = registry_->generation();
    Restart();
    EXPECT_GT(registry_->generation(), highest);
    // A watcher of the last run learns that it may have missed events.
    EXPECT_EQ(ReasonOf(registry_->EventsAfter(highest, 10).status()), "GENERATION_COMPACTED");
    EXPECT_THAT(*registry_->EventsAfter(registry_->generation(), 10), IsEmpty());
  }
}

// Its number, and with it the generations of its life, was given out in another run.
TEST_F(RegistryLogTest, GenerationsRiseAcrossARestartAfterTheRetirementOfARestoredVersion) {
  Publish("a", true, "one");
  Restart();
  ASSERT_TRUE(registry_->Retire("a", 1).ok());
  const int64_t highest = registry_->generation();
  Restart();
  EXPECT_GT(registry_->generation(), highest);
}

TEST_F(RegistryLogTest, WhatCannotBeLoadedIsFailedAndTheOthersServe) {
  Publish("a", false, "bad");
  Publish("a", true, "bad");
  Publish("a", false, "good");
  Restart([](const std::string& name, int64_t version,
             const StoredVersion& stored) -> absl::StatusOr<std::shared_ptr<const LoadedAdapter>> {
    if (stored.object == "bad") {
      return MakeError(absl::StatusCode::kDataLoss, "STORE_OBJECT_DAMAGED", "rotten");
    }
    return Loaded(name, version);
  });
  EXPECT_EQ(registry_->Get({"a", 1})->state, AdapterState::kFailed);
  EXPECT_EQ(ReasonOf(registry_->Get({"a", 2})->failure), "STORE_OBJECT_DAMAGED");
  EXPECT_EQ(ReasonOf(registry_->Acquire({"a", 0}).status()), "ADAPTER_NO_ACTIVE_VERSION");
  EXPECT_TRUE(registry_->Acquire({"a", 3}).ok());

  EXPECT_EQ(registry_->Retire("a", 1)->adapter.state, AdapterState::kGone);
  Drain();
  EXPECT_THAT(log_.dropped, ElementsAre("bad"));
  EXPECT_EQ(log_.state.names.at("a").versions.size(), 2u);
}

TEST_F(RegistryLogTest, DropsTheObjectWhenTheLastLeaseEnds) {
  Publish("a", true, "one");
  AdapterLease lease = *registry_->Acquire({"a", 0});
  ASSERT_TRUE(registry_->Retire("a", 1).ok());
  Drain();
  EXPECT_THAT(log_.dropped, IsEmpty());
  lease.Reset();
  Drain();
  EXPECT_THAT(log_.dropped, ElementsAre("one"));
}

TEST_F(RegistryLogTest, ALeaseThatEndsDuringAChangeWaitsForItNotForTheDisk) {
  Publish("a", false, "one");
  Publish("a", false, "two");
  AdapterLease lease = *registry_->Acquire({"a", 1});
  ASSERT_TRUE(registry_->Retire("a", 1).ok());
  const int64_t expected = registry_->generation();
  log_.on_append = [&](const Change&) {
    lease.Reset();  // on the thread that would wait for it: it must not
    EXPECT_EQ(registry_->generation(), expected) << "what was compared still holds";
  };
  const auto activated = registry_->Activate("a", 2, expected);
  ASSERT_TRUE(activated.ok()) << activated.status();
  EXPECT_EQ(activated->generation, expected + 1);
  EXPECT_EQ(registry_->Get({"a", 1})->state, AdapterState::kGone);
  EXPECT_EQ(registry_->generation(), expected + 2);
  Drain();
  EXPECT_THAT(log_.dropped, ElementsAre("one"));
}

TEST_F(RegistryLogTest, ManyThreadsLogWhatTheRegistryShows) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      const std::string name(1, static_cast<char>('a' + t % 2));
      for (int i = 0; i < 50; ++i) {
        const int64_t version = Publish(name, i % 3 == 0, i % 2 == 0 ? "object" : "");
        const auto lease = registry_->Acquire({name, version});
        if (i % 5 == 0) (void)registry_->Retire(name, version);
        if (i % 7 == 0) (void)registry_->Activate(name, version, std::nullopt);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Drain();
  for (const AdapterRecord& record : registry_->List("", "", 0, 10000)) {
    const bool kept = record.state == AdapterState::kReady && record.durable;
    const StoredState::Name& name = log_.state.names.at(record.name);
    EXPECT_EQ(name.versions.count(record.version), kept ? 1u : 0u);
    EXPECT_EQ(name.active == record.version, record.active);
  }
  EXPECT_LE(registry_->generation(), log_.state.generation);
}

TEST_F(RegistryLogTest, ALoadThatThrowsFailsItsVersionAndARestoreGoesOn) {
  Publish("a", /*activate=*/true, "bad");
  Publish("b", /*activate=*/true, "good");
  Drain();
  registry_.reset();
  Restart([](const std::string& name, int64_t version,
             const StoredVersion& stored) -> absl::StatusOr<std::shared_ptr<const LoadedAdapter>> {
    if (stored.object == "bad") throw std::bad_alloc();
    return Loaded(name, version);
  });
  EXPECT_EQ(registry_->Get({"a", 1})->state, AdapterState::kFailed);
  EXPECT_EQ(ReasonOf(registry_->Get({"a", 1})->failure), "OUT_OF_MEMORY");
  EXPECT_EQ(registry_->Get({"b", 1})->state, AdapterState::kReady);
}

TEST_F(RegistryLogTest, ARestoreLoadsOnAllThreadsOfTheExecutor) {
  constexpr int kThreads = 4;
  for (int i = 0; i < 200; ++i) {
    const std::string name = absl::StrCat("a", i % 10);
    Publish(name, /*activate=*/i % 3 == 0, absl::StrCat("object", i));
  }
  const std::string before = View();
  Drain();
  registry_.reset();
  ThreadPool pool(kThreads, 0);
  AdapterRegistry::Options options;
  options.executor = [&pool](std::function<void()> task) { pool.Submit(std::move(task)); };
  options.log = &log_;
  registry_ = std::make_unique<AdapterRegistry>(std::move(options));
  absl::Mutex mu;
  int loading = 0, most = 0, all = 0;
  bool alone = false;  // nobody comes
  registry_->Restore(
      log_.state,
      [&](const std::string& name, int64_t version,
          const StoredVersion& stored) -> absl::StatusOr<std::shared_ptr<const LoadedAdapter>> {
        absl::MutexLock lock(&mu);
        most = std::max(most, ++loading);
        ++all;
        const auto together = [&] { return most == kThreads || alone; };
        if (!mu.AwaitWithTimeout(absl::Condition(&together), absl::Seconds(20))) alone = true;
        --loading;
        if (stored.object == "object77") return absl::DataLossError("unreadable");
        return Loaded(name, version, stored.digest);
      });
  EXPECT_EQ(most, kThreads);
  EXPECT_EQ(all, 200);
  const auto failed = registry_->Get({"a7", 8});
  ASSERT_TRUE(failed.ok()) << failed.status();
  EXPECT_EQ(failed->state, AdapterState::kFailed);
  EXPECT_EQ(failed->failure.message(), "unreadable");
  // Apart from that one all is as before.
  const std::string line = absl::StrCat("a7@8 ", static_cast<int>(AdapterState::kReady));
  const std::string instead = absl::StrCat("a7@8 ", static_cast<int>(AdapterState::kFailed));
  const auto versions = [](const std::string& view) { return view.substr(view.find('\n')); };
  EXPECT_EQ(versions(View()), versions(absl::StrReplaceAll(before, {{line, instead}})));
  registry_.reset();
}

}  // namespace
}  // namespace dorad::adapter
