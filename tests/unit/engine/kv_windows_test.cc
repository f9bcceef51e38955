// Groups of layers with windows: what they hold, give back and find again.

#include "server/engine/kv_needs.h"
#include "server/engine/kv_pages.h"
#include "tests/unit/support/scheduler_fixture.h"

namespace dorad::engine {
namespace {

constexpr int64_t kBlock = kKvPageTokens;

std::vector<TokenId> Tokens(int64_t count, TokenId first = 0) {
  std::vector<TokenId> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// Two groups: all positions, and the last two blocks.
struct KvWindows : ::testing::Test {
  ~KvWindows() override { pages.CheckIntegrity(); }

  // Gives the list all pages of its blocks and registers them.
  PrefixNode Fill(const std::vector<TokenId>& tokens, std::vector<int32_t>* held) {
    PrefixNode node = root;
    for (size_t i = 0; i < tokens.size(); i += kBlock) {
      EXPECT_TRUE(held->size() / 2 * kBlock > i || pages.Allocate(2, held));
      node = pages.Register(node, absl::MakeConstSpan(tokens).subspan(i, kBlock),
                            absl::MakeConstSpan(*held).subspan(i / kBlock * 2, 2));
    }
    return node;
  }
  // Blocks that are found for the tokens.
  int64_t Find(const std::vector<TokenId>& tokens) {
    PrefixNode node = root;
    std::vector<int32_t> found;
    pages.MatchPrefix(tokens, &node, &found);
    const int64_t blocks = static_cast<int64_t>(found.size()) / 2;
    for (int64_t block = 0; block < blocks; ++block) {
      EXPECT_GE(found[2 * block], 0);
      const bool is_seen = block >= FirstBlockSeen(kWindow, blocks * kBlock);
      EXPECT_EQ(found[2 * block + 1] >= 0, is_seen) << block;
    }
    pages.Release(&found);
    pages.CheckIntegrity();
    return blocks;
  }
  // Takes free pages and then the oldest cached ones, and gives them back.
  void Evict(int64_t count) {
    std::vector<int32_t> taken;
    EXPECT_TRUE(pages.Allocate(pages.free() + count, &taken));
    pages.Release(&taken);
  }

  static constexpr int64_t kWindow = 2 * kBlock;
  KvPages pages{24, {}, {0, kWindow}};
  const PrefixNode root = PrefixRoot("", "");
  std::vector<int32_t> held;
};

TEST_F(KvWindows, ARowSeesItsWindowOnly) {
  EXPECT_EQ(FirstBlockSeen(0, 1000), 0);
  EXPECT_EQ(FirstBlockSeen(32, 31), 0);
  EXPECT_EQ(FirstBlockSeen(32, 46), 0);
  EXPECT_EQ(FirstBlockSeen(32, 47), 1);
  EXPECT_EQ(FirstBlockSeen(1, 15), 0);
  EXPECT_EQ(FirstBlockSeen(1, 16), 1);
}

TEST_F(KvWindows, PagesBehindAWindowAreCachedAndTheRestIsKept) {
  Fill(Tokens(6 * kBlock), &held);
  pages.ReleaseBehind(6 * kBlock, 6, &held);
  EXPECT_EQ(pages.used(), 6 + 2);
  EXPECT_EQ(pages.cached(), 4);
  EXPECT_EQ(held[7], -1);
  EXPECT_GE(held[9], 0) << "of the block in which the window begins";
  pages.ReleaseBehind(8 * kBlock, 5, &held);
  EXPECT_EQ(pages.used(), 6 + 1) << "not more than it is told";
  EXPECT_EQ(Find(Tokens(6 * kBlock)), 6);
  EXPECT_EQ(Find(Tokens(4 * kBlock)), 4) << "by the pages that it gave back";
  pages.Release(&held);
}

TEST_F(KvWindows, APrefixNeedsWhatTheNextRowSees) {
  Fill(Tokens(6 * kBlock), &held);
  pages.ReleaseBehind(6 * kBlock, 6, &held);
  Evict(1);  // block 3's, the last of those behind the window
  EXPECT_EQ(Find(Tokens(6 * kBlock)), 6);
  EXPECT_EQ(Find(Tokens(5 * kBlock)), 3) << "after 4 and 5 blocks a row would see the lost one";
  EXPECT_EQ(Find(Tokens(3 * kBlock)), 3);
  Evict(3);
  EXPECT_EQ(pages.cached(), 0);
  EXPECT_EQ(Find(Tokens(6 * kBlock)), 6)
      << "all pages before the window are gone but the whole ones";
  EXPECT_EQ(Find(Tokens(5 * kBlock)), 0);
  pages.Release(&held);
}

TEST_F(KvWindows, WhoComputesLostPagesAgainRepairsThePrefix) {
  Fill(Tokens(6 * kBlock), &held);
  pages.ReleaseBehind(6 * kBlock, 6, &held);
  Evict(4);
  std::vector<int32_t> again;
  Fill(Tokens(5 * kBlock), &again);
  EXPECT_EQ(Find(Tokens(5 * kBlock)), 5);
  pages.Release(&again);
  EXPECT_EQ(pages.cached(), 4) << "its pages of all positions were there already";
  EXPECT_EQ(Find(Tokens(5 * kBlock)), 5);
  pages.Release(&held);
}

TEST_F(KvWindows, ALostPageOfAllPositionsEndsThePrefix) {
  Fill(Tokens(4 * kBlock), &held);
  pages.Release(&held);
  Evict(1);  // the last block's of the window
  EXPECT_EQ(Find(Tokens(4 * kBlock)), 3);
  Evict(1);
  EXPECT_EQ(Find(Tokens(4 * kBlock)), 3);
  Evict(6);
  EXPECT_EQ(pages.cached(), 0);
  EXPECT_EQ(Find(Tokens(4 * kBlock)), 0);
}

TEST_F(KvWindows, AnUnfinishedBlockNeedsAllItsPages) {
  ASSERT_TRUE(pages.Allocate(2, &held));
  pages.Register(root, Tokens(5), {held[0], -1});
  std::vector<int32_t> found;
  EXPECT_EQ(pages.MatchPart(root, Tokens(5), &found), 0);
  pages.Register(root, Tokens(5), held);
  EXPECT_EQ(pages.MatchPart(root, Tokens(4), &found), 4);
  EXPECT_EQ(found, held);
  pages.Release(&held);
}

TEST_F(KvWindows, AfterAForgottenPrefixNothingIsRegistered) {
  const PrefixNode gone = Fill(Tokens(kBlock), &held);
  pages.Release(&held);
  Evict(2);
  ASSERT_TRUE(pages.Allocate(2, &held));
  const PrefixNode after = pages.Register(gone, Tokens(kBlock, 50), held);
  pages.Register(after, Tokens(kBlock, 50), held);
  pages.Release(&held);
  EXPECT_EQ(pages.cached(), 0);
}

TEST(KvWindowsAlone, ALongPrefixIsFoundByItsWindow) {
  KvPages pages(8, {}, {2 * kBlock});
  const PrefixNode root = PrefixRoot("", "");
  const std::vector<TokenId> tokens = Tokens(20 * kBlock);
  std::vector<int32_t> held;
  PrefixNode node = root;
  for (int64_t block = 0; block < 20; ++block) {
    pages.ReleaseBehind(block * kBlock, block, &held);
    ASSERT_TRUE(pages.Allocate(1, &held));
    EXPECT_LE(pages.used(), 3);
    node = pages.Register(node, absl::MakeConstSpan(tokens).subspan(block * kBlock, kBlock),
                          {held.back()});
  }
  pages.Release(&held);
  pages.CheckIntegrity();
  node = root;
  pages.MatchPrefix(tokens, &node, &held);
  EXPECT_EQ(held.size(), 20u);
  EXPECT_EQ(pages.used(), 2) << "its first blocks are forgotten, their places are known";
  pages.Release(&held);
  pages.DropPrefixes();
  pages.CheckIntegrity();
}

TEST(KvWindowsAlone, KeepTheirBooksUnderRandomUse) {
  std::mt19937 random(5);
  for (const std::vector<int64_t>& windows :
       {std::vector<int64_t>{0, 24}, {40}, {0, 1, 70}, {0, 0, 33, 33}}) {
    const auto groups = static_cast<int64_t>(windows.size());
    KvPages pages(20 * groups + 3, {8, 1}, windows);
    struct Holder {
      std::vector<int32_t> pages;
      std::vector<TokenId> tokens;
      PrefixNode node;
    };
    std::vector<Holder> holders(6);
    int64_t found = 0, grown = 0;
    for (int i = 0; i < 20000; ++i) {
      Holder& holder = holders[random() % holders.size()];
      const int64_t blocks = static_cast<int64_t>(holder.pages.size()) / groups;
      if (random() % 12 == 0 || blocks == 12) {
        pages.Release(&holder.pages);
        continue;
      }
      if (blocks == 0) {
        holder.node = PrefixRoot(std::to_string(random() % 2), "");
        holder.tokens = Tokens(12 * kBlock, random() % 2);
        if (random() % 2 == 0) holder.tokens[(random() % 12) * kBlock] = 999;
        pages.MatchPrefix(absl::MakeConstSpan(holder.tokens).first(random() % (12 * kBlock)),
                          &holder.node, &holder.pages);
        found += holder.pages.empty() ? 0 : 1;
      } else {
        pages.ReleaseBehind(blocks * kBlock, blocks, &holder.pages);
      }
      const int64_t next = static_cast<int64_t>(holder.pages.size()) / groups;
      if (!holder.tokens.empty() && next < 12 && pages.Allocate(groups, &holder.pages)) {
        holder.node = pages.Register(
            holder.node, absl::MakeConstSpan(holder.tokens).subspan(next * kBlock, kBlock),
            absl::MakeConstSpan(holder.pages).last(groups));
        ++grown;
      }
      if (random() % 50 == 0) (void)pages.Shrink(1, 8 * groups);
      if (random() % 50 == 0 && pages.released() > 0) pages.Grow(pages.FirstReleased());
      if (i % 20 == 0) pages.CheckIntegrity();
    }
    EXPECT_GT(found, 100);
    EXPECT_GT(grown, 1000);
    for (Holder& holder : holders) pages.Release(&holder.pages);
    pages.DropPrefixes();
    pages.CheckIntegrity();
  }
}

TEST(KvNeedsTest, AWindowBoundsThePagesOfASequence) {
  const KvNeeds whole{{0}, 2, 64};
  EXPECT_EQ(whole.PagesFor(160), 10 + 2 * kMostStates);
  EXPECT_EQ(whole.PagesFor(161), 11 + 2 * kMostStates);
  EXPECT_EQ(whole.TokensIn(11 + 2 * kMostStates), 176);
  EXPECT_EQ(whole.TokensIn(0), 0);
  const KvNeeds windows{{0, 100, 100}, 0, 64};
  EXPECT_EQ(windows.PagesFor(160), 3 * 10);
  EXPECT_EQ(windows.PagesFor(1600), 100 + 2 * (BlocksOf(164) + 1));
  EXPECT_EQ(windows.TokensIn(windows.PagesFor(1600)), 1600);
  EXPECT_EQ(windows.TokensIn(windows.PagesFor(1600) - 1), 1584);
  const KvNeeds alone{{100}, 0, 64};
  EXPECT_GT(alone.TokensIn(alone.PagesFor(1 << 20)), int64_t{1} << 40);
}

class WindowedSchedulerTest : public SchedulerTest {
 protected:
  static constexpr int64_t kWindow = 40, kStep = 32;

  void MakeWithWindows(int64_t pages) {
    pages_ = std::make_unique<KvPages>(pages, KvPages::Chunks(), std::vector<int64_t>{0, kWindow});
    scheduler_ = std::make_unique<Scheduler>(Scheduler::Options{kStep, 64}, pages_.get());
  }
  // Pages of a group that the sequence holds.
  static int64_t Held(const Sequence& s, size_t group) {
    int64_t held = 0;
    for (size_t at = group; at < s.pages.size(); at += 2) held += s.pages[at] >= 0 ? 1 : 0;
    return held;
  }
};

TEST_F(WindowedSchedulerTest, ALongSequenceHoldsAsManyPagesOfAWindowAsAShortOne) {
  MakeWithWindows(200);
  Sequence* s = Add(600);
  const int64_t most = KvNeeds{{kWindow}, 0, kStep}.PagesFor(1 << 20);
  std::vector<Chunk> before = scheduler_->Schedule();
  while (s->tokens.size() < 1200) {
    std::vector<Chunk> next = scheduler_->Schedule();  // while the one before is computed
    EXPECT_LE(Held(*s, 1), most);
    EXPECT_GE(Held(*s, 0), BlocksOf(s->computed));
    EXPECT_EQ(pages_->used(), Held(*s, 0) + Held(*s, 1));
    for (int64_t p = std::max<int64_t>(0, s->computed - kWindow); p < s->computed; ++p) {
      ASSERT_GE(s->pages[p / kBlock * 2 + 1], 0) << p << " of " << s->computed;
    }
    Finish(before);
    before = std::move(next);
  }
  EXPECT_LE(Held(*s, 1), BlocksOf(kWindow) + 2) << "while it decodes";
  EXPECT_EQ(scheduler_->preemptions(), 0u);
  Finish(before);
}

TEST_F(WindowedSchedulerTest, TheSmallestCacheFinishesTheLongestSequence) {
  const KvNeeds needs{{0, kWindow}, 0, kStep};
  MakeWithWindows(needs.PagesFor(500));
  Sequence* s = Add(300);
  s->most_tokens = 500;
  std::vector<Chunk> before;
  while (s->state != Sequence::State::kEnded) {
    std::vector<Chunk> next = scheduler_->Schedule();
    Land(before);
    before = std::move(next);
  }
  Land(before);
  EXPECT_EQ(s->tokens.size(), 500u);
  EXPECT_EQ(scheduler_->preemptions(), 0u);
}

TEST_F(WindowedSchedulerTest, ASampleThatComesLateFindsThePromptInTheCache) {
  MakeWithWindows(100);
  Sequence* leader = Add(100, 0, nullptr, 5);
  while (leader->tokens.size() < 300) Step();
  EXPECT_EQ(leader->pages[5 * 2 + 1], -1) << "it has moved on";
  Sequence* sibling = Add(100, 0, leader, 5);
  Step();
  EXPECT_EQ(sibling->cached_tokens, 99 / kBlock * kBlock);
  // And computes it if that is lost, or not to be used.
  Sequence* apart = Add(100, 0, leader, 5);
  apart->use_prefix_cache = false;
  Step();
  EXPECT_EQ(apart->cached_tokens, 0);
}

TEST_F(WindowedSchedulerTest, ASequenceGoesOnFromTheEndOfAnother) {
  MakeWithWindows(100);
  Sequence* first = Add(200, 0, nullptr, 5);
  while (first->tokens.size() < 260) Step();
  const std::vector<TokenId> text = first->tokens;
  scheduler_->Remove(first);
  Sequence* second = Add(0);
  scheduler_->Remove(second);
  Sequence& next = sequences_.emplace_back();
  next.arrival = sequences_.size();
  next.tokens = text;
  next.prompt_tokens = static_cast<int64_t>(text.size());
  next.root = PrefixRoot("", "");
  scheduler_->Add(&next);
  Step();
  EXPECT_EQ(next.cached_tokens, 259);
  EXPECT_LE(Held(next, 1), BlocksOf(kWindow) + 2);
}

TEST_F(WindowedSchedulerTest, AWriterThatSwitchedIsNoSource) {
  MakeWithWindows(100);
  Sequence* first = Add(100, 0, nullptr, 5);
  while (first->tokens.size() < 110) Step();
  first->SwitchKeepingKv(nullptr);  // its text is of two versions from here on
  while (first->tokens.size() < 300) Step();
  EXPECT_LE(Held(*first, 1), BlocksOf(kWindow) + 2) << "what is never registered does not stay";
  scheduler_->Remove(first);
  pages_->CheckIntegrity();
}

}  // namespace
}  // namespace dorad::engine
