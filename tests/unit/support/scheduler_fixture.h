// A scheduler over pages without a model: steps are computed by hand.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <numeric>
#include <set>
#include <string_view>
#include <vector>

#include "server/engine/scheduler.h"
#include "tests/unit/support/test.h"

namespace dorad::engine {

class SchedulerTest : public ::testing::Test {
 protected:
  ~SchedulerTest() override {
    for (Sequence& sequence : sequences_) scheduler_->Remove(&sequence);
    pages_->CheckIntegrity();
  }

  void Make(int64_t pages, int64_t budget, int32_t max_running = 64) {
    pages_ = std::make_unique<KvPages>(pages);
    scheduler_ = std::make_unique<Scheduler>(Scheduler::Options{budget, max_running}, pages_.get());
  }

  // Of a model with a recurrence.
  void MakeWithStates(int64_t pages, int64_t budget, int64_t state_pages) {
    Scheduler::Options options;
    options.max_step_tokens = budget;
    options.state_pages = state_pages;
    pages_ = std::make_unique<KvPages>(pages);
    scheduler_ = std::make_unique<Scheduler>(options, pages_.get());
  }

  // Everybody's weights are there.
  void MakeWithWeights(int64_t pages) {
    pages_ = std::make_unique<KvPages>(pages);
    const auto may_run = [](Sequence* sequence) {
      sequence->has_pins = true;
      return true;
    };
    scheduler_ = std::make_unique<Scheduler>(Scheduler::Options{64, 64, may_run}, pages_.get());
  }

  Sequence* Add(int64_t prompt, int32_t priority = 0, const Sequence* leader = nullptr,
                TokenId first = -1, std::string_view salt = "") {
    Sequence& s = sequences_.emplace_back();
    s.priority = priority;
    s.arrival = sequences_.size();
    s.tokens.resize(static_cast<size_t>(prompt));
    // Different prompts by default, so that prefixes are not shared.
    const TokenId start = first >= 0 ? first : static_cast<TokenId>(sequences_.size() * 10000);
    std::iota(s.tokens.begin(), s.tokens.end(), start);
    s.prompt_tokens = prompt;
    s.leader = leader;
    s.root = PrefixRoot("", salt);
    s.tenant = tenant_;
    scheduler_->Add(&s);
    return &s;
  }

  // One step: every chunk is computed and complete sequences get a token.
  std::vector<Chunk> Step() {
    const std::vector<Chunk> chunks = scheduler_->Schedule();
    Finish(chunks);
    return chunks;
  }

  void Finish(const std::vector<Chunk>& chunks) {
    for (const Chunk& chunk : chunks) {
      scheduler_->Computed(chunk);
      Sequence& s = *chunk.sequence;
      s.scored = std::min(s.to_score, std::max(s.scored, chunk.end()));
      if (chunk.samples) s.tokens.push_back(1);
      scheduler_->Landed(chunk);
    }
  }

  // The same, when some sequences have ended meanwhile, and ends those that are complete.
  void Land(const std::vector<Chunk>& chunks) {
    for (const Chunk& chunk : chunks) {
      Sequence& s = *chunk.sequence;
      if (s.state != Sequence::State::kEnded) {
        scheduler_->Computed(chunk);
        if (chunk.samples) s.tokens.push_back(1);
        if (static_cast<int64_t>(s.tokens.size()) == s.most_tokens) scheduler_->Remove(&s);
      }
      scheduler_->Landed(chunk);
    }
  }

  // REQUIRES: no two sequences have a prefix in common.
  void ExpectPagesOfTheirOwn() {
    std::set<int32_t> held;
    size_t count = 0;
    for (const Sequence& s : sequences_) {
      held.insert(s.pages.begin(), s.pages.end());
      count += s.pages.size();
      EXPECT_TRUE(s.state != Sequence::State::kEnded || s.pages.empty());
    }
    EXPECT_EQ(held.size(), count) << "a page is in two lists";
    EXPECT_EQ(pages_->used(), static_cast<int64_t>(count));
  }

  static int64_t Rows(const std::vector<Chunk>& chunks) {
    int64_t rows = 0;
    for (const auto& chunk : chunks) rows += chunk.count;
    return rows;
  }

  std::string_view tenant_;  // of sequences that are added
  std::unique_ptr<KvPages> pages_;
  std::unique_ptr<Scheduler> scheduler_;
  std::deque<Sequence> sequences_;
};

}  // namespace dorad::engine
