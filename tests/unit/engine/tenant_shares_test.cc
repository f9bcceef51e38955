#include "server/engine/tenant_shares.h"

#include <deque>
#include <map>
#include <random>
#include <string>

#include "server/engine/scheduler.h"
#include "tests/unit/support/test.h"

namespace dorad::engine {
namespace {

constexpr int64_t kBudget = 64;

// A scheduler whose sequences end after a number of generated tokens.
class TenantSharesTest : public ::testing::Test {
 protected:
  ~TenantSharesTest() override {
    for (Sequence& sequence : sequences_) scheduler_->Remove(&sequence);
    pages_->CheckIntegrity();
  }

  void Make(int64_t pages, int32_t places, int64_t budget = kBudget) {
    pages_ = std::make_unique<KvPages>(pages);
    scheduler_ = std::make_unique<Scheduler>(Scheduler::Options{budget, places}, pages_.get());
  }

  Sequence* Add(std::string_view tenant, int64_t prompt, int64_t answer, int32_t priority = 0) {
    Sequence& s = sequences_.emplace_back();
    s.tenant = tenant;
    s.priority = priority;
    s.arrival = sequences_.size();
    s.tokens.resize(static_cast<size_t>(prompt));
    std::iota(s.tokens.begin(), s.tokens.end(), static_cast<TokenId>(sequences_.size() * 10000));
    s.prompt_tokens = prompt;
    s.most_tokens = prompt + answer;
    s.root = PrefixRoot("", "");
    scheduler_->Add(&s);
    return &s;
  }

  // Returns the rows of each tenant.
  std::map<std::string_view, int64_t> Step() {
    std::map<std::string_view, int64_t> rows;
    for (const Chunk& chunk : scheduler_->Schedule()) {
      Sequence& s = *chunk.sequence;
      rows[s.tenant] += chunk.count;
      order_.push_back(s.arrival);
      scheduler_->Computed(chunk);
      if (chunk.samples) s.tokens.push_back(1);
      if (static_cast<int64_t>(s.tokens.size()) == s.most_tokens) scheduler_->Remove(&s);
      scheduler_->Landed(chunk);
    }
    return rows;
  }

  int StepsUntilItEnds(const Sequence* sequence, int most) {
    int steps = 0;
    while (sequence->state != Sequence::State::kEnded && steps < most) {
      Step();
      ++steps;
    }
    return steps;
  }

  std::unique_ptr<KvPages> pages_;
  std::unique_ptr<Scheduler> scheduler_;
  std::deque<Sequence> sequences_;
  std::vector<uint64_t> order_;  // of arrivals in chunks
};

TEST_F(TenantSharesTest, ACrowdDoesNotDelayAnotherTenantsCall) {
  Make(4096, 32);
  for (int i = 0; i < 512; ++i) Add("crowd", 20, 200);
  for (int i = 0; i < 40; ++i) Step();
  ASSERT_EQ(scheduler_->running(), 32);
  const Sequence* const honest = Add("honest", 30, 10);
  // One step for the prompt, one for each further token, and one for prompts that have begun.
  EXPECT_LE(StepsUntilItEnds(honest, 1000), 12);
  EXPECT_EQ(honest->preemptions, 0u);
}

TEST_F(TenantSharesTest, ACrowdThatHoldsAllPagesMakesRoom) {
  Make(100, 32);
  for (int i = 0; i < 64; ++i) Add("crowd", 40, 400);
  for (int i = 0; i < 100; ++i) Step();
  const Sequence* const honest = Add("honest", 200, 10);
  EXPECT_LE(StepsUntilItEnds(honest, 1000), 20);
  EXPECT_EQ(honest->preemptions, 0u);
}

TEST_F(TenantSharesTest, TheCrowdsSequencesArePreemptedAtMostOnceForEachOfTheOthers) {
  Make(4096, 32);
  for (int i = 0; i < 256; ++i) Add("crowd", 20, 100);
  for (int i = 0; i < 40; ++i) Step();
  for (int i = 0; i < 8; ++i) Add("honest", 20, 10);
  const uint64_t before = scheduler_->preemptions();
  while (scheduler_->running() + scheduler_->waiting() > 0) Step();
  EXPECT_LE(scheduler_->preemptions() - before, 8u);
  EXPECT_GT(scheduler_->preemptions() - before, 0u);
}

TEST_F(TenantSharesTest, RecomputationIsPaidByTheTenantThatWantedThePlace) {
  Make(4096, 8);
  for (int i = 0; i < 8; ++i) Add("crowd", 500, 4000);
  for (int i = 0; i < 200; ++i) Step();
  // Each of these would cost the crowd some 600 rows for one row of its own.
  std::map<std::string_view, int64_t> rows;
  int64_t lost = 0;
  for (int i = 0; i < 2000; ++i) {
    if (i % 2 == 0) Add("short", 1, 1);
    for (const auto& [tenant, count] : Step()) rows[tenant] += count;
  }
  for (const Sequence& s : sequences_) lost += s.tenant == "crowd" ? s.preemptions : 0;
  EXPECT_LE(lost * 500, rows["crowd"]) << "at least half of the crowd's rows brought tokens";
  EXPECT_GT(rows["short"], 0);
}

TEST_F(TenantSharesTest, BackloggedTenantsAreServedAlike) {
  Make(4096, 16);
  for (int i = 0; i < 600; ++i) Add("many", 100, 2);
  for (int i = 0; i < 150; ++i) Add("few", 400, 8);
  std::map<std::string_view, int64_t> rows;
  for (int i = 0; i < 300; ++i) {
    for (const auto& [tenant, count] : Step()) rows[tenant] += count;
  }
  // They differ by the largest prompt on its way, and by what runs.
  EXPECT_NEAR(static_cast<double>(rows["many"]), static_cast<double>(rows["few"]), 1000);
}

TEST_F(TenantSharesTest, PriorityCountsMoreThanTurns) {
  Make(4096, 4);
  for (int i = 0; i < 20; ++i) Add("urgent", 10, 20, /*priority=*/-1);
  for (int i = 0; i < 10; ++i) Step();
  const Sequence* const other = Add("other", 10, 1);
  while (scheduler_->waiting() > 1) {
    Step();
    ASSERT_EQ(other->state, Sequence::State::kWaiting);
  }
}

TEST_F(TenantSharesTest, AnIdleTenantSavesNothingUp) {
  Make(4096, 16);
  Add("idle", 10, 1);
  Step();
  for (int i = 0; i < 1000; ++i) Add("busy", 100, 2);
  for (int i = 0; i < 200; ++i) Step();
  for (int i = 0; i < 1000; ++i) Add("idle", 100, 2);
  std::map<std::string_view, int64_t> rows;
  for (int i = 0; i < 300; ++i) {
    for (const auto& [tenant, count] : Step()) rows[tenant] += count;
  }
  EXPECT_NEAR(static_cast<double>(rows["idle"]), static_cast<double>(rows["busy"]), 1000);
}

TEST_F(TenantSharesTest, AFrozenTenantsCreditIsBounded) {
  Make(4096, 16);
  const Sequence* const first = Add("frozen", 10, 100);
  Step();
  for (int i = 0; i < 600; ++i) Add("frozen", 100, 2);
  for (Sequence& s : sequences_) scheduler_->SetFrozen(&s, true);
  const size_t frozen = sequences_.size();
  for (int i = 0; i < 3000; ++i) Add("busy", 100, 2);
  for (int i = 0; i < 1000; ++i) Step();
  for (size_t i = 0; i < frozen; ++i) scheduler_->SetFrozen(&sequences_[i], false);
  std::map<std::string_view, int64_t> rows;
  for (int i = 0; i < 4 * TenantShares::kMostCredit; ++i) {
    for (const auto& [tenant, count] : Step()) rows[tenant] += count;
  }
  EXPECT_GT(first->generated(), 1);
  EXPECT_GE(rows["busy"], TenantShares::kMostCredit * kBudget);
}

// For any traffic: everything ends, no step exceeds its budget, and no place is left empty while a
// sequence waits that needs nothing else.
TEST_F(TenantSharesTest, NobodyStarvesUnderRandomTraffic) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint32_t>(n)); };
    const std::string_view tenants[] = {"", "a", "b", "c", "d"};
    Make(64 + below(200), 1 + below(40), 8 + below(100));
    const size_t before = sequences_.size();
    for (int step = 0; step < 3000; ++step) {
      // "d" is the crowd, and never stops.
      if (below(3) == 0) Add("d", 1 + below(60), 1 + below(100));
      if (step < 1000 && below(10) == 0) Add(tenants[below(4)], 1 + below(60), 1 + below(40));
      int64_t rows = 0;
      for (const auto& [tenant, count] : Step()) rows += count;
      ASSERT_TRUE(rows > 0 || scheduler_->running() + scheduler_->waiting() == 0);
    }
    for (size_t i = before; i < sequences_.size(); ++i) {
      EXPECT_TRUE(sequences_[i].tenant == "d" || sequences_[i].state == Sequence::State::kEnded);
    }
    for (Sequence& s : sequences_) scheduler_->Remove(&s);
    pages_->CheckIntegrity();
  }
}

// A tenant alone, whatever its name, and although others were there before it.
TEST_F(TenantSharesTest, OneTenantAloneIsServedInTheOrderOfArrival) {
  Make(200, 8);
  Add("gone", 30, 5);
  while (scheduler_->running() + scheduler_->waiting() > 0) Step();
  order_.clear();
  const size_t first = sequences_.size() + 1;
  for (int i = 0; i < 40; ++i) Add("alone", 70, 3);
  std::vector<uint64_t> begun;
  while (scheduler_->running() + scheduler_->waiting() > 0) Step();
  for (const uint64_t arrival : order_) {
    if (std::find(begun.begin(), begun.end(), arrival) == begun.end()) begun.push_back(arrival);
  }
  ASSERT_EQ(begun.size(), 40u);
  for (size_t i = 0; i < begun.size(); ++i) EXPECT_EQ(begun[i], first + i);
}

}  // namespace
}  // namespace dorad::engine
