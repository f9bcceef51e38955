#include "server/adapter/residency/residency.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "server/adapter/registry/version.h"
#include "server/platform/error.h"

namespace dorad::adapter {
namespace {

// Weights that count themselves.
struct Weights final : AdapterWeights {
  Weights(int number, int* alive) : number(number), alive(alive) { ++*alive; }
  ~Weights() override { --*alive; }
  const int number;
  int* const alive;
};

// Host memory that notices when more is saved than it holds. Images take whole pages of ten bytes.
class Images final : public HostCopies {
 public:
  Images(int64_t capacity, int* alive) : capacity_(capacity), alive_(alive) {}
  ~Images() override { EXPECT_EQ(bytes_, 0); }

  int64_t capacity_bytes() const override { return capacity_; }
  int64_t BytesFor(int64_t bytes) const override { return (bytes + 9) / 10 * 10; }
  absl::StatusOr<std::unique_ptr<const HostCopy>> Save(
      const std::shared_ptr<const AdapterWeights>& weights) override {
    if (failing_) return absl::InternalError("the device failed");
    ++saved_;
    const int number = static_cast<const Weights&>(*weights).number;
    return std::make_unique<Image>(this, number, BytesFor(sizes_[number]));
  }
  absl::StatusOr<std::shared_ptr<const AdapterWeights>> Restore(const HostCopy& image) override {
    if (shortage_ > 0) {
      --shortage_;
      return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY", "no memory");
    }
    if (failing_) return absl::InternalError("the device failed");
    return std::make_shared<Weights>(static_cast<const Image&>(image).number, alive_);
  }

  void SetSize(int number, int64_t bytes) { sizes_[number] = bytes; }
  void set_failing(bool failing) { failing_ = failing; }
  // So many restores find no memory.
  void set_shortage(int restores) { shortage_ = restores; }
  int saved() const { return saved_; }
  int64_t bytes() const { return bytes_; }

 private:
  struct Image final : HostCopy {
    Image(Images* owner, int number, int64_t bytes) : owner(owner), number(number), bytes(bytes) {
      owner->bytes_ += bytes;
      EXPECT_LE(owner->bytes_, owner->capacity_) << "nobody made room";
    }
    ~Image() override { owner->bytes_ -= bytes; }
    Images* const owner;
    const int number;
    const int64_t bytes;
  };

  const int64_t capacity_;
  int* const alive_;
  std::map<int, int64_t> sizes_;
  int64_t bytes_ = 0;
  int saved_ = 0;
  int shortage_ = 0;
  bool failing_ = false;
};

enum class Kind { kStored, kEphemeral, kPinned };

class ResidencyTest : public ::testing::Test {
 protected:
  using EntryPtr = std::unique_ptr<Residency::Entry>;

  ~ResidencyTest() override {
    RunTasks();
    EXPECT_EQ(alive_, 0);
  }

  void Start(int64_t max_bytes, int64_t host_bytes = 0) {
    residency_.reset();
    images_.reset();
    if (host_bytes > 0) images_ = std::make_unique<Images>(host_bytes, &alive_);
    Residency::Options options;
    options.max_bytes = max_bytes;
    options.images = images_.get();
    options.patience = absl::Seconds(2);
    options.shrink_kv = shrink_kv_;
    options.executor = [this](std::function<void()> task) {
      absl::MutexLock lock(&tasks_mu_);
      tasks_.push_back(std::move(task));
    };
    options.now = [this] {
      absl::MutexLock lock(&now_mu_);
      return now_;
    };
    residency_ = std::make_unique<Residency>(std::move(options));
  }

  absl::StatusOr<EntryPtr> Add(int number, int64_t bytes, Kind kind = Kind::kStored) {
    if (images_) images_->SetSize(number, bytes);
    Residency::Reload reload;
    if (kind != Kind::kEphemeral) {
      reload = [this, number]() -> absl::StatusOr<std::shared_ptr<const AdapterWeights>> {
        if (failing_) return absl::DataLossError("no longer there");
        return std::make_shared<Weights>(number, &alive_);
      };
    }
    return residency_->Add(std::make_shared<Weights>(number, &alive_), bytes, std::move(reload),
                           kind == Kind::kPinned);
  }

  void RunTasks() {
    while (true) {
      std::function<void()> task;
      {
        absl::MutexLock lock(&tasks_mu_);
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  // Of a residency that waits for what is reloaded.
  absl::Status Wake() {
    std::atomic<bool> done = false;
    absl::Status status;
    std::thread waking([&] {
      status = residency_->Wake();
      done = true;
    });
    while (!done) RunTasks();
    waking.join();
    return status;
  }

  static absl::StatusOr<std::optional<Residency::Pins>> Use(Residency::Entry& entry) {
    Residency::Entry* const all[] = {&entry};
    return Residency::PinAll(all);
  }
  static WeightsPin TakeUse(Residency::Entry& entry) { return std::move((**Use(entry))[0]); }

  // "away", the reason of a failure, or "" with a use that is given back at once.
  static std::string Try(Residency::Entry& entry) {
    const auto use = Use(entry);
    if (!use.ok()) return ReasonOf(use.status());
    return use->has_value() ? "" : "away";
  }
  static int NumberOf(const Residency::Entry& entry) {
    return static_cast<const Weights&>(entry.weights()).number;
  }

  int alive_ = 0;
  bool failing_ = false;
  absl::Mutex now_mu_;
  absl::Time now_ = absl::UnixEpoch();
  absl::Mutex tasks_mu_;
  std::deque<std::function<void()>> tasks_;
  std::function<int64_t(int64_t)> shrink_kv_;  // of the next Start
  std::unique_ptr<Images> images_;
  std::unique_ptr<Residency> residency_;
};

// Nothing to be tried that needs room.
bool MakesRoom(Residency& residency) {
  int attempts = 0;
  (void)residency.WithRoom([&] {
    return ++attempts > 1 ? absl::OkStatus()
                          : MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY", "");
  });
  return attempts > 1;
}

TEST_F(ResidencyTest, KeepsEverythingWithoutALimit) {
  Start(0);
  std::vector<EntryPtr> entries;
  for (int i = 0; i < 50; ++i) entries.push_back(*Add(i, int64_t{1} << 40));
  for (const EntryPtr& entry : entries) EXPECT_EQ(Try(*entry), "");
  EXPECT_EQ(residency_->stats().resident, 50);
}

TEST_F(ResidencyTest, TheLeastRecentlyUsedMakesRoomAndComesBackWhenWanted) {
  Start(20);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10);
  EXPECT_EQ(Try(*a), "");
  const EntryPtr c = *Add(3, 10);
  EXPECT_TRUE(a->resident());
  EXPECT_FALSE(b->resident());
  EXPECT_EQ(alive_, 2);
  EXPECT_EQ(Try(*b), "away");
  EXPECT_EQ(Try(*b), "away") << "asking twice brings it once";
  EXPECT_EQ(tasks_.size(), 1u);
  RunTasks();
  EXPECT_FALSE(a->resident()) << "used before c came";
  const auto use = Use(*b);
  ASSERT_TRUE(use.ok() && use->has_value());
  EXPECT_EQ(NumberOf(*b), 2);
  EXPECT_EQ(residency_->stats().bytes, 20);
  EXPECT_EQ(residency_->stats().reloads_from_store, 1);
  EXPECT_EQ(residency_->stats().evictions, 2);
}

TEST_F(ResidencyTest, WhatIsInUseStays) {
  Start(20);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10);
  std::optional<WeightsPin> use_a = TakeUse(*a), use_b = TakeUse(*b);
  const EntryPtr c = *Add(3, 10);
  EXPECT_FALSE(c->resident()) << "it is away at once";
  EXPECT_EQ(Try(*c), "away");
  RunTasks();
  EXPECT_FALSE(c->resident());
  use_a.reset();
  RunTasks();
  EXPECT_TRUE(c->resident());
  EXPECT_FALSE(a->resident());
  EXPECT_TRUE(b->resident());
}

TEST_F(ResidencyTest, WhatCannotComeBackNeverGoes) {
  Start(20);
  const EntryPtr a = *Add(1, 10, Kind::kEphemeral);
  const EntryPtr b = *Add(2, 10, Kind::kPinned);
  const auto c = Add(3, 10, Kind::kEphemeral);
  EXPECT_EQ(c.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(c.status()), "OUT_OF_MEMORY");
  const EntryPtr d = *Add(4, 10);
  EXPECT_EQ(Try(*d), "OUT_OF_MEMORY") << "there will never be room for it";
  EXPECT_FALSE(MakesRoom(*residency_));
}

TEST_F(ResidencyTest, WeightsComeInTheOrderInWhichTheyWereWanted) {
  Start(10);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10), c = *Add(3, 10);
  std::optional<WeightsPin> use = TakeUse(*c);
  EXPECT_EQ(Try(*b), "away");
  EXPECT_EQ(Try(*a), "away");
  use.reset();
  RunTasks();
  EXPECT_TRUE(b->resident());
  EXPECT_EQ(Try(*a), "away");
  EXPECT_TRUE(b->resident()) << "it stays for the one who wanted it";
  EXPECT_EQ(Try(*b), "");
  RunTasks();
  EXPECT_TRUE(a->resident());
}

TEST_F(ResidencyTest, WhatNobodyComesForMakesRoom) {
  Start(10);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10);
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  EXPECT_EQ(Try(*b), "away");
  EXPECT_TRUE(tasks_.empty());
  now_ += absl::Seconds(2);
  EXPECT_EQ(Try(*b), "away");
  RunTasks();
  EXPECT_TRUE(b->resident());
}

TEST_F(ResidencyTest, PatienceCountsFromWhenTheWeightsHaveCome) {
  Start(10);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10);
  EXPECT_EQ(Try(*a), "away");
  now_ += absl::Seconds(3);  // a slow disk
  RunTasks();
  EXPECT_EQ(Try(*b), "away");
  EXPECT_TRUE(tasks_.empty());
  EXPECT_EQ(Try(*a), "") << "whoever wanted it had no chance to come before";
}

TEST_F(ResidencyTest, AFailedRecallIsToldAndTriedAgain) {
  Start(10);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10);
  failing_ = true;
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  EXPECT_EQ(Use(*a).status().code(), absl::StatusCode::kDataLoss);
  failing_ = false;
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  EXPECT_EQ(Try(*a), "");
}

TEST_F(ResidencyTest, TheStarvingGetTheRoomOfTheLongestResident) {
  Start(20);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10), c = *Add(3, 10);  // a is away
  std::optional<WeightsPin> use_b = TakeUse(*b), use_c = TakeUse(*c);
  EXPECT_EQ(Try(*a), "away");
  now_ += absl::Seconds(1);
  EXPECT_EQ(Try(*a), "away");
  EXPECT_EQ(Try(*b), "") << "nobody starves yet";
  now_ += absl::Seconds(1);
  EXPECT_EQ(Try(*a), "away");
  EXPECT_EQ(Try(*b), "away") << "no new users";
  EXPECT_EQ(Try(*c), "") << "one that goes is enough";
  use_b.reset();
  RunTasks();
  EXPECT_TRUE(a->resident());
  EXPECT_FALSE(b->resident());
  EXPECT_EQ(Try(*a), "");
  RunTasks();  // b is wanted, too
  EXPECT_TRUE(b->resident());
  EXPECT_FALSE(a->resident());
}

TEST_F(ResidencyTest, UsersComeBackWhenNobodyStarvesAnyMore) {
  Start(10);
  const EntryPtr a = *Add(1, 10);
  EntryPtr b = *Add(2, 10);
  std::optional<WeightsPin> use = TakeUse(*b);
  EXPECT_EQ(Try(*a), "away");
  EntryPtr c = *Add(3, 10);
  now_ += absl::Seconds(3);
  EXPECT_EQ(Try(*c), "away");
  EXPECT_EQ(Try(*b), "away");
  c.reset();
  // a starves still.
  EXPECT_EQ(Try(*b), "away");
  use.reset();
  RunTasks();
  EXPECT_TRUE(b->resident() || a->resident());
}

TEST_F(ResidencyTest, AnEntryThatGoesWhileItIsRecalledFreesItsRoom) {
  Start(10);
  EntryPtr a = *Add(1, 10);
  const EntryPtr b = *Add(2, 10);
  EXPECT_EQ(Try(*a), "away");
  a.reset();
  RunTasks();
  EXPECT_EQ(residency_->stats().bytes, 0);
  EXPECT_EQ(Try(*b), "away");
  RunTasks();
  EXPECT_TRUE(b->resident());
}

TEST_F(ResidencyTest, EntriesMayOutliveIt) {
  Start(10);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10);
  std::optional<WeightsPin> use = TakeUse(*b);
  EXPECT_EQ(Try(*a), "away");
  residency_.reset();
  use.reset();
  EXPECT_TRUE(tasks_.empty()) << "nothing is reloaded any more";
}

TEST_F(ResidencyTest, WhatIsNeededTogetherComesTogether) {
  Start(20);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10), c = *Add(3, 10), d = *Add(4, 10);
  Residency::Entry* const pair[] = {a.get(), b.get()};
  const auto try_pair = [&] {
    const auto uses = Residency::PinAll(pair);
    return uses.ok() && uses->has_value();
  };
  bool came = false;
  for (int i = 0; i < 10 && !came; ++i) {
    came = try_pair();
    (void)Try(*c);  // somebody else asks all the time
    RunTasks();
  }
  EXPECT_TRUE(came);
}

TEST_F(ResidencyTest, WhatCannotBeHereTogetherIsRefused) {
  Start(15);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10);
  Residency::Entry* const pair[] = {a.get(), b.get()};
  EXPECT_EQ(ReasonOf(Residency::PinAll(pair).status()), "OUT_OF_MEMORY");
  EXPECT_EQ(Try(*a), "away") << "each of them alone comes";
  RunTasks();
  EXPECT_EQ(Try(*a), "");
}

TEST_F(ResidencyTest, WantsThatCanNoLongerBeMetHoldNobodyUp) {
  Start(10);
  const EntryPtr x = *Add(1, 5), w = *Add(2, 6), y = *Add(3, 4);
  std::optional<WeightsPin> use = TakeUse(*y);
  EXPECT_EQ(Try(*x), "away");
  RunTasks();
  std::optional<WeightsPin> other = TakeUse(*x);
  EXPECT_EQ(Try(*w), "away");
  use.reset();
  const EntryPtr p = *Add(4, 5, Kind::kPinned);
  now_ += absl::Seconds(5);
  EXPECT_EQ(Try(*w), "OUT_OF_MEMORY");
  EXPECT_EQ(Try(*x), "") << "it drains for nobody";
  other.reset();
  EXPECT_EQ(Try(*y), "away");
  RunTasks();
  EXPECT_EQ(Try(*y), "");
}

TEST_F(ResidencyTest, WhatLeavesIsKeptInHostMemoryAndComesBackFromThere) {
  Start(20, 20);
  const EntryPtr a = *Add(1, 10, Kind::kEphemeral), b = *Add(2, 10);
  EXPECT_EQ(Try(*b), "");
  EXPECT_FALSE(a->in_host_memory()) << "it is resident";
  const EntryPtr c = *Add(3, 10);
  EXPECT_FALSE(a->resident());
  EXPECT_TRUE(a->in_host_memory());
  EXPECT_EQ(alive_, 2) << "its memory is free";
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  const auto use = Use(*a);
  ASSERT_TRUE(use.ok() && use->has_value());
  EXPECT_EQ(NumberOf(*a), 1);
  EXPECT_EQ(residency_->stats().reloads_from_host, 1);
  EXPECT_EQ(residency_->stats().reloads_from_store, 0);
  EXPECT_EQ(residency_->stats().host_bytes, 20) << "a's, which it keeps, and b's";
}

TEST_F(ResidencyTest, WhatHasAnImageIsSavedOnce) {
  Start(10, 30);
  const EntryPtr a = *Add(1, 10, Kind::kEphemeral), b = *Add(2, 10, Kind::kEphemeral);
  for (int i = 0; i < 6; ++i) {
    const EntryPtr& wanted = i % 2 == 0 ? a : b;
    EXPECT_EQ(Try(*wanted), "away");
    RunTasks();
    EXPECT_EQ(Try(*wanted), "");
  }
  EXPECT_EQ(images_->saved(), 2);
  EXPECT_EQ(residency_->stats().reloads_from_host, 6);
}

TEST_F(ResidencyTest, TheRoomOfImagesGoesToWhatNeedsItMost) {
  Start(10, 20);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10), c = *Add(3, 10);
  EXPECT_TRUE(a->in_host_memory() && b->in_host_memory());
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  EXPECT_EQ(Try(*a), "");
  EXPECT_EQ(residency_->stats().reloads_from_host, 1) << "c took b's room, not that of what comes";
  EXPECT_TRUE(a->in_host_memory() && c->in_host_memory());
  EXPECT_EQ(Try(*b), "away");
  RunTasks();
  EXPECT_EQ(Try(*b), "");
  EXPECT_EQ(residency_->stats().reloads_from_store, 1);
  EXPECT_EQ(Try(*c), "away");
  RunTasks();  // b leaves; c comes from its image
  EXPECT_EQ(Try(*c), "");
  EXPECT_FALSE(a->in_host_memory()) << "the store has it, and c's image was in use";
  EXPECT_TRUE(b->in_host_memory() && c->in_host_memory());
  const EntryPtr e = *Add(4, 10, Kind::kEphemeral);
  EXPECT_TRUE(b->in_host_memory() && c->in_host_memory()) << "c had its image still";
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  EXPECT_EQ(Try(*a), "");
  EXPECT_TRUE(e->in_host_memory()) << "nothing else brings it back";
  EXPECT_FALSE(b->in_host_memory()) << "less recently used than c";
}

TEST_F(ResidencyTest, TheOnlyCopyIsNeverDropped) {
  Start(10, 10);
  const EntryPtr a = *Add(1, 10, Kind::kEphemeral), b = *Add(2, 10);
  EXPECT_TRUE(a->in_host_memory());
  const EntryPtr c = *Add(3, 10);
  EXPECT_TRUE(a->in_host_memory());
  EXPECT_FALSE(b->resident() || b->in_host_memory()) << "the store has it";
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  EXPECT_EQ(Try(*a), "");
}

TEST_F(ResidencyTest, TwoThatOnlyImagesBringBackChangePlacesThroughAThirdImage) {
  Start(10, 20);
  const EntryPtr a = *Add(1, 10, Kind::kEphemeral), b = *Add(2, 10, Kind::kEphemeral);
  EXPECT_EQ(ReasonOf(Add(3, 10, Kind::kEphemeral).status()), "OUT_OF_MEMORY")
      << "two away and one resident could not change places";
  const EntryPtr c = *Add(4, 10), d = *Add(5, 10);
  for (int i = 0; i < 3; ++i) {
    for (const EntryPtr* wanted : {&a, &b, &c, &d}) {
      EXPECT_EQ(Try(**wanted), "away");
      RunTasks();
      EXPECT_EQ(Try(**wanted), "");
    }
  }
}

TEST_F(ResidencyTest, WhoWaitsForRoomThatNothingCanMakeIsTold) {
  // Two of six bytes have images of ten: one of them fits, where ten bytes of weights would.
  Start(12, 10);
  const EntryPtr a = *Add(1, 6, Kind::kEphemeral);
  EntryPtr b = *Add(2, 6, Kind::kEphemeral);
  std::optional<WeightsPin> use = TakeUse(*b);
  const EntryPtr c = *Add(3, 8);
  EXPECT_EQ(Try(*c), "away");
  RunTasks();
  EXPECT_EQ(Try(*c), "away") << "what is in use may make room";
  use.reset();
  EXPECT_EQ(Try(*c), "OUT_OF_MEMORY");
  b.reset();
  EXPECT_EQ(Try(*c), "away");
  RunTasks();
  EXPECT_EQ(Try(*c), "");
  EXPECT_TRUE(a->in_host_memory());
}

TEST_F(ResidencyTest, WhatIsSavedBackAndForthHoldsNobodysRoom) {
  Start(20, 40);
  EntryPtr a = *Add(1, 10, Kind::kEphemeral), b = *Add(2, 10, Kind::kEphemeral);
  EntryPtr c = *Add(3, 10, Kind::kEphemeral), d = *Add(4, 10);
  EXPECT_EQ(residency_->stats().images, 2);
  EXPECT_EQ(Try(*a), "away");
  a.reset();  // while it comes
  RunTasks();
  b.reset();
  c.reset();
  d.reset();
  EXPECT_EQ(residency_->stats().bytes, 0);
  EXPECT_EQ(residency_->stats().host_bytes, 0);
  EXPECT_EQ(images_->bytes(), 0);
}

TEST_F(ResidencyTest, WithoutMemoryToComeBackToOthersMakeRoom) {
  Start(0, 30);
  const EntryPtr a = *Add(1, 10, Kind::kEphemeral), b = *Add(2, 10, Kind::kEphemeral);
  EXPECT_TRUE(MakesRoom(*residency_));
  EXPECT_FALSE(a->resident());
  images_->set_shortage(1);
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  EXPECT_EQ(Try(*a), "");
  EXPECT_FALSE(b->resident()) << "the device was full in spite of the books";
  images_->set_shortage(5);
  const WeightsPin use = TakeUse(*a);
  EXPECT_EQ(Try(*b), "away");
  RunTasks();
  EXPECT_EQ(Try(*b), "OUT_OF_MEMORY") << "a is in use";
  images_->set_shortage(0);
  EXPECT_EQ(Try(*b), "away");
  RunTasks();
  EXPECT_EQ(Try(*b), "");
}

TEST_F(ResidencyTest, WhatCannotBeSavedStays) {
  Start(20, 20);
  const EntryPtr a = *Add(1, 10, Kind::kEphemeral), b = *Add(2, 10);
  EXPECT_EQ(Try(*b), "");
  images_->set_failing(true);
  const EntryPtr c = *Add(3, 10);
  EXPECT_TRUE(a->resident()) << "beyond the limit rather than lost";
  EXPECT_EQ(Try(*a), "");
  EXPECT_EQ(residency_->stats().host_bytes, 0);
  images_->set_failing(false);
  const EntryPtr d = *Add(4, 10);
  EXPECT_LE(residency_->stats().bytes, 20);
}

TEST_F(ResidencyTest, TheLenderIsAskedWhenNoIdleWeightsAreLeftAndForMoreEachTime) {
  std::vector<int64_t> loans;
  shrink_kv_ = [&](int64_t bytes) {
    loans.push_back(bytes);
    return loans.size() < 3 ? bytes : 0;
  };
  Start(0);
  const EntryPtr idle = *Add(1, 10);
  int attempts = 0;
  const absl::Status status = residency_->WithRoom([&] {
    EXPECT_EQ(idle->resident(), ++attempts == 1) << "idle weights go before anything is lent";
    return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY", "no memory");
  });
  EXPECT_EQ(ReasonOf(status), "OUT_OF_MEMORY");
  ASSERT_EQ(loans.size(), 3u);
  EXPECT_GT(loans[1], loans[0]);
  EXPECT_EQ(attempts, 4) << "the first, one after the weights went, one after each loan";
}

TEST_F(ResidencyTest, HoweverOftenMemoryIsLentTheNextLoanIsNoSmaller) {
  int64_t last = 0;
  int loans = 0;
  shrink_kv_ = [&](int64_t bytes) -> int64_t {
    EXPECT_GE(bytes, last);
    last = bytes;
    return ++loans < 100 ? 1 : 0;
  };
  Start(0);
  (void)residency_->WithRoom(
      [] { return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY", ""); });
  EXPECT_EQ(loans, 100);
}

TEST_F(ResidencyTest, NothingLeavesForWhatNeverFits) {
  shrink_kv_ = [](int64_t bytes) {
    ADD_FAILURE() << "nothing is to be lent";
    return bytes;
  };
  Start(0);
  const EntryPtr idle = *Add(1, 10);
  int attempts = 0;
  const absl::Status status = residency_->WithRoom([&] {
    ++attempts;
    return WithMetadata(MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY", ""),
                        kNeverFits, "true");
  });
  EXPECT_EQ(ReasonOf(status), "OUT_OF_MEMORY");
  EXPECT_EQ(attempts, 1);
  EXPECT_TRUE(idle->resident());
}

TEST_F(ResidencyTest, GivesBackTheLeastRecentlyUsedOfWhatIsIdle) {
  Start(0, 20);
  const EntryPtr stored = *Add(1, 10), hosted = *Add(2, 10, Kind::kEphemeral);
  const EntryPtr pinned = *Add(3, 10, Kind::kPinned), used = *Add(4, 10);
  const EntryPtr latest = *Add(5, 10);
  const WeightsPin use = TakeUse(*used);
  EXPECT_EQ(residency_->stats().idle_bytes, 30);
  EXPECT_EQ(residency_->GiveBack(11), 20);
  EXPECT_FALSE(stored->resident());
  EXPECT_FALSE(hosted->resident());
  EXPECT_TRUE(hosted->in_host_memory());
  EXPECT_TRUE(latest->resident());
  EXPECT_EQ(residency_->GiveBack(100), 10) << "no more can leave";
  EXPECT_TRUE(pinned->resident());
  EXPECT_TRUE(used->resident());
  EXPECT_EQ(residency_->stats().idle_bytes, 0);
  EXPECT_EQ(residency_->stats().bytes, 20);
  EXPECT_EQ(residency_->GiveBack(1), 0);
  EXPECT_EQ(Try(*hosted), "away");
  RunTasks();
  EXPECT_EQ(Try(*hosted), "");
}

TEST_F(ResidencyTest, WhatWouldBeLostIsNeverGivenBack) {
  Start(0, 10);
  const EntryPtr small = *Add(1, 10, Kind::kEphemeral);
  const EntryPtr large = *Add(2, 30, Kind::kEphemeral);
  EXPECT_EQ(residency_->stats().idle_bytes, 10);
  EXPECT_EQ(residency_->GiveBack(100), 10);
  EXPECT_TRUE(large->resident());
  images_->set_failing(true);
  const EntryPtr unsaved = *Add(3, 5, Kind::kEphemeral);
  EXPECT_EQ(residency_->GiveBack(100), 0);
  EXPECT_TRUE(large->resident());
  EXPECT_TRUE(unsaved->resident());
  EXPECT_EQ(residency_->stats().bytes, 35);
  images_->set_failing(false);
}

TEST_F(ResidencyTest, AsleepNothingIsResidentThatHasAWayBack) {
  Start(100, 20);
  const EntryPtr stored = *Add(1, 10), pinned = *Add(2, 10, Kind::kPinned);
  const EntryPtr ephemeral = *Add(3, 10, Kind::kEphemeral);
  const EntryPtr too_large = *Add(4, 30, Kind::kEphemeral);
  EXPECT_EQ(residency_->Sleep(), 30);
  EXPECT_EQ(residency_->stats().bytes, 30) << "what would be lost stays";
  EXPECT_TRUE(too_large->resident());
  EXPECT_EQ(alive_, 1);
  const EntryPtr added = *Add(5, 10);
  EXPECT_FALSE(added->resident()) << "what comes leaves at once";
  EXPECT_EQ(Try(*stored), "away");
  RunTasks();
  EXPECT_FALSE(stored->resident()) << "nothing comes back";
  EXPECT_TRUE(Wake().ok());
  EXPECT_TRUE(pinned->resident());
  RunTasks();
  EXPECT_TRUE(stored->resident()) << "it was wanted";
  for (const EntryPtr* entry : {&stored, &pinned, &ephemeral, &added}) {
    if (Try(**entry) == "away") RunTasks();
    EXPECT_EQ(Try(**entry), "");
  }
}

TEST_F(ResidencyTest, SleepingTwiceAndWakingTwiceIsHarmless) {
  Start(100, 40);
  const EntryPtr a = *Add(1, 10, Kind::kEphemeral);
  EXPECT_EQ(residency_->Sleep(), 10);
  EXPECT_EQ(residency_->Sleep(), 0);
  EXPECT_TRUE(Wake().ok());
  EXPECT_TRUE(Wake().ok());
  EXPECT_EQ(Try(*a), "away");
  RunTasks();
  EXPECT_EQ(Try(*a), "");
}

TEST_F(ResidencyTest, WhatCannotBeBroughtBackSleepsOn) {
  Start(100);
  const EntryPtr pinned = *Add(1, 10, Kind::kPinned);
  EXPECT_EQ(residency_->Sleep(), 10);
  failing_ = true;
  EXPECT_EQ(Wake().code(), absl::StatusCode::kDataLoss);
  EXPECT_FALSE(pinned->resident());
  failing_ = false;
  EXPECT_TRUE(Wake().ok());
  EXPECT_EQ(Try(*pinned), "") << "nobody is told of a failure that is over";
}

TEST_F(ResidencyTest, ThePinnedComeBackAlsoBehindOthersThatWereWantedFirst) {
  Start(10);
  const EntryPtr pinned = *Add(1, 8, Kind::kPinned);
  const EntryPtr a = *Add(2, 2), b = *Add(3, 2);
  residency_->Sleep();
  EXPECT_EQ(residency_->stats().bytes, 0);
  // Each fits beside the pinned one; both come first, and are kept for those who asked.
  EXPECT_EQ(Try(*a), "away");
  EXPECT_EQ(Try(*b), "away");
  // Time passes again and again: on a busy machine both may come after the first leap.
  std::atomic<bool> is_awake = false;
  std::thread passing([&] {
    while (!is_awake) {
      absl::SleepFor(absl::Milliseconds(50));
      absl::MutexLock lock(&now_mu_);
      now_ += absl::Seconds(3);
    }
  });
  EXPECT_TRUE(Wake().ok());
  is_awake = true;
  passing.join();
  EXPECT_TRUE(pinned->resident());
}

TEST_F(ResidencyTest, NothingIsRecalledWhileThatIsHeld) {
  Start(10, 10);
  const EntryPtr a = *Add(1, 10), b = *Add(2, 10), c = *Add(3, 10);
  EXPECT_EQ(Try(*a), "away");  // sent for, and not begun
  residency_->HoldReloads();
  failing_ = true;  // as without the base's weights
  RunTasks();
  EXPECT_EQ(Try(*a), "away");
  EXPECT_EQ(Try(*b), "away");
  RunTasks();
  EXPECT_FALSE(a->resident() || b->resident());
  failing_ = false;
  residency_->ReleaseReloads();
  RunTasks();
  EXPECT_EQ(Try(*a), "");
  RunTasks();
  EXPECT_EQ(Try(*b), "");
  EXPECT_LE(residency_->stats().bytes, 10);
}

TEST_F(ResidencyTest, WhatCannotBeSavedIsNoRoom) {
  Start(0, 30);
  const EntryPtr a = *Add(1, 10, Kind::kEphemeral);
  images_->set_failing(true);
  EXPECT_FALSE(MakesRoom(*residency_));
  EXPECT_EQ(Try(*a), "");
}

// Random uses of more versions than fit: limits hold, the right weights are used, and everyone who
// asks often enough gets his.
TEST_F(ResidencyTest, RandomUseKeepsTheLimitAndStarvesNobody) {
  for (uint32_t seed = 1; seed <= 30; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % n); };
    const int64_t limit = 40 + below(60);
    // Half of the runs have host memory: for some of what is away, or for all of it.
    Start(limit, seed % 2 == 0 ? 0 : (seed % 4 == 1 ? 60 + below(200) : 440));
    std::vector<EntryPtr> entries;
    for (int i = 0; i < 12; ++i) {
      const Kind kind = seed % 4 == 3 && below(2) == 0 ? Kind::kEphemeral : Kind::kStored;
      entries.push_back(*Add(i, 5 + below(30), kind));
    }
    std::vector<std::pair<int, WeightsPin>> uses;
    std::map<int, int> waits;
    for (int round = 0; round < 3000; ++round) {
      now_ += absl::Milliseconds(50);
      // Some names are asked for far more often than others.
      const int i = below(3) == 0 ? below(12) : below(4);
      auto use = Use(*entries[i]);
      ASSERT_TRUE(use.ok()) << use.status();
      if (use->has_value()) {
        EXPECT_EQ(NumberOf(*entries[i]), i);
        uses.emplace_back(i, std::move((**use)[0]));
        waits[i] = 0;
      } else {
        ASSERT_LT(++waits[i], 600) << i << " starves";
      }
      if (!uses.empty() && below(3) > 0) {
        std::swap(uses[below(static_cast<int>(uses.size()))], uses.back());
        uses.pop_back();
      }
      if (below(4) == 0) RunTasks();
      ASSERT_LE(residency_->stats().bytes, limit);
      if (uses.size() > 20) uses.clear();
    }
    uses.clear();
    RunTasks();
    entries.clear();
    RunTasks();  // some were on their way
    EXPECT_EQ(residency_->stats().bytes, 0);
    ASSERT_EQ(alive_, 0);
  }
}

}  // namespace
}  // namespace dorad::adapter
