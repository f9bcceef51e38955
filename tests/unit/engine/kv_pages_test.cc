#include "server/engine/kv_pages.h"

#include "tests/unit/support/test.h"

namespace dorad::engine {
namespace {

std::vector<TokenId> Tokens(int64_t count, TokenId first) {
  std::vector<TokenId> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// Fills and registers whole pages of tokens below root.
PrefixNode Fill(KvPages& pages, PrefixNode node, const std::vector<TokenId>& tokens,
                std::vector<int32_t>* held) {
  for (size_t i = 0; i + kKvPageTokens <= tokens.size(); i += kKvPageTokens) {
    EXPECT_TRUE(pages.Allocate(1, held));
    node =
        pages.Register(node, absl::MakeConstSpan(tokens).subspan(i, kKvPageTokens), {held->back()});
  }
  return node;
}

TEST(KvPages, AllocatesAllOrNothing) {
  KvPages pages(4);
  std::vector<int32_t> held;
  EXPECT_FALSE(pages.Allocate(5, &held));
  EXPECT_TRUE(held.empty());
  EXPECT_TRUE(pages.Allocate(4, &held));
  EXPECT_EQ(pages.available(), 0);
  EXPECT_FALSE(pages.Allocate(1, &held));
  pages.Release(&held);
  EXPECT_EQ(pages.available(), 4);
  pages.CheckIntegrity();
}

TEST(KvPages, FindsARegisteredPrefixAfterItsHolderHasGone) {
  KvPages pages(4);
  const PrefixNode root = PrefixRoot("digest", "salt");
  const std::vector<TokenId> tokens = Tokens(3 * kKvPageTokens, 5);
  std::vector<int32_t> held;
  Fill(pages, root, tokens, &held);
  const std::vector<int32_t> expected = held;
  pages.Release(&held);
  EXPECT_EQ(pages.cached(), 3);
  PrefixNode node = root;
  pages.MatchPrefix(tokens, &node, &held);
  EXPECT_EQ(held, expected);
  EXPECT_EQ(pages.cached(), 0);
  pages.CheckIntegrity();
  pages.Release(&held);
}

TEST(KvPages, DoesNotShareAcrossDigestsOrSalts) {
  KvPages pages(4);
  const std::vector<TokenId> tokens = Tokens(kKvPageTokens, 0);
  std::vector<int32_t> held;
  Fill(pages, PrefixRoot("digest", "salt"), tokens, &held);
  for (const PrefixNode& root :
       {PrefixRoot("digest", "other"), PrefixRoot("other", "salt"), PrefixRoot("", ""),
        PrefixRoot("digests", "alt"), PrefixRoot("digest", "salt", "tenant"),
        PrefixRoot("digest", "sal", "t")}) {
    PrefixNode node = root;
    std::vector<int32_t> found;
    pages.MatchPrefix(tokens, &node, &found);
    EXPECT_TRUE(found.empty());
  }
  pages.Release(&held);
}

TEST(KvPages, StopsAtTheFirstDifferentTokenAndAtPartialPages) {
  KvPages pages(4);
  const PrefixNode root = PrefixRoot("", "");
  std::vector<TokenId> tokens = Tokens(2 * kKvPageTokens, 0);
  std::vector<int32_t> held;
  Fill(pages, root, tokens, &held);
  std::vector<int32_t> found;
  PrefixNode node = root;
  pages.MatchPrefix(absl::MakeConstSpan(tokens).subspan(0, 2 * kKvPageTokens - 1), &node, &found);
  EXPECT_EQ(found.size(), 1u);
  pages.Release(&found);
  tokens[kKvPageTokens + 3] = 999;
  node = root;
  pages.MatchPrefix(tokens, &node, &found);
  EXPECT_EQ(found.size(), 1u);
  pages.Release(&found);
  pages.Release(&held);
}

TEST(KvPages, FindsThePageWithTheMostTokensOfAPart) {
  KvPages pages(4);
  const PrefixNode root = PrefixRoot("", "");
  const std::vector<TokenId> tokens = Tokens(kKvPageTokens, 0);
  std::vector<TokenId> other = tokens;
  other[5] = 999;
  std::vector<int32_t> held;
  ASSERT_TRUE(pages.Allocate(3, &held));
  pages.Register(root, absl::MakeConstSpan(tokens).first(9), {held[0]});
  pages.Register(root, other, {held[1]});
  pages.Register(PrefixRoot("", "salt"), tokens, {held[2]});
  const auto match = [&](size_t count, std::vector<int32_t>* page) {
    return pages.MatchPart(root, absl::MakeConstSpan(tokens).first(count), page);
  };
  std::vector<int32_t> page;
  EXPECT_EQ(match(16, &page), 9) << "the unfinished page has more of them";
  EXPECT_EQ(page, std::vector{held[0]});
  EXPECT_EQ(match(4, &page), 4);
  std::vector<int32_t> found;
  PrefixNode node = root;
  pages.MatchPrefix(tokens, &node, &found);
  EXPECT_TRUE(found.empty()) << "an unfinished page is no whole one";

  const std::vector<int32_t> all = held;
  pages.Release(&held);
  pages.CheckIntegrity();
  pages.Share({&all[1], 1}, &held);
  std::vector<int32_t> evicting;
  ASSERT_TRUE(pages.Allocate(3, &evicting));
  EXPECT_EQ(match(16, &page), 5) << "only the held one is left";
  EXPECT_EQ(page, std::vector{all[1]});
  pages.Release(&evicting);
  pages.Release(&held);
  pages.CheckIntegrity();
}

TEST(KvPages, EvictsTheLeastRecentlyUsedEndOfAPrefixFirst) {
  KvPages pages(3);
  const PrefixNode root = PrefixRoot("", "");
  const std::vector<TokenId> tokens = Tokens(3 * kKvPageTokens, 0);
  std::vector<int32_t> held;
  Fill(pages, root, tokens, &held);
  pages.Release(&held);
  std::vector<int32_t> other;
  ASSERT_TRUE(pages.Allocate(1, &other));
  PrefixNode node = root;
  pages.MatchPrefix(tokens, &node, &held);
  EXPECT_EQ(held.size(), 2u) << "the last page of the prefix went, its beginning stayed";
  pages.Release(&held);
  pages.Release(&other);
  pages.CheckIntegrity();
}

TEST(KvPages, NeverEvictsAHeldPage) {
  KvPages pages(2);
  std::vector<int32_t> held;
  Fill(pages, PrefixRoot("", ""), Tokens(kKvPageTokens, 0), &held);
  std::vector<int32_t> other;
  EXPECT_FALSE(pages.Allocate(2, &other));
  EXPECT_TRUE(pages.Allocate(1, &other));
  EXPECT_NE(other[0], held[0]);
  pages.Release(&held);
  pages.Release(&other);
}

TEST(KvPages, KeepsTheFirstOfTwoEqualPages) {
  KvPages pages(2);
  const PrefixNode root = PrefixRoot("", "");
  const std::vector<TokenId> tokens = Tokens(kKvPageTokens, 0);
  std::vector<int32_t> a;
  std::vector<int32_t> b;
  const PrefixNode first = Fill(pages, root, tokens, &a);
  const PrefixNode second = Fill(pages, root, tokens, &b);
  EXPECT_EQ(first, second);
  pages.Release(&b);
  EXPECT_EQ(pages.cached(), 0) << "the copy is free at once";
  pages.Release(&a);
  EXPECT_EQ(pages.cached(), 1);
}

TEST(KvPages, RegistersASharedPageAgainWhenItsOldParentIsGone) {
  KvPages pages(3);
  const PrefixNode root = PrefixRoot("", "");
  const std::vector<TokenId> tokens = Tokens(2 * kKvPageTokens, 0);
  const auto page_tokens = [&](int i) {
    return absl::MakeConstSpan(tokens).subspan(i * kKvPageTokens, kKvPageTokens);
  };
  std::vector<int32_t> x;
  Fill(pages, root, {tokens.begin(), tokens.begin() + kKvPageTokens}, &x);
  // A second holder computed the same first page; its second page hangs below x's node.
  std::vector<int32_t> y;
  Fill(pages, root, tokens, &y);
  pages.Release(&x);
  std::vector<int32_t> z;
  ASSERT_TRUE(pages.Allocate(1, &z));  // evicts x's page
  PrefixNode node = pages.Register(root, page_tokens(0), {y[0]});
  pages.Register(node, page_tokens(1), {y[1]});
  pages.CheckIntegrity();
  pages.Release(&y);
  node = root;
  pages.MatchPrefix(tokens, &node, &y);
  EXPECT_EQ(y.size(), 2u);
  pages.Release(&y);
  pages.Release(&z);
}

TEST(KvPages, KeepsItsBooksUnderRandomUse) {
  std::mt19937 random(7);
  KvPages pages(24);
  std::vector<std::vector<int32_t>> holders(8);
  for (int i = 0; i < 20000; ++i) {
    std::vector<int32_t>& holder = holders[random() % holders.size()];
    switch (random() % 3) {
      case 0:
        pages.Release(&holder);
        break;
      case 1: {
        if (!holder.empty()) break;
        PrefixNode node = PrefixRoot(std::to_string(random() % 2), "");
        const std::vector<TokenId> tokens = Tokens(4 * kKvPageTokens, random() % 3);
        pages.MatchPrefix(tokens, &node, &holder);
        while (holder.size() < 4 && pages.Allocate(1, &holder)) {
          node = pages.Register(node,
                                absl::MakeConstSpan(tokens).subspan(
                                    (holder.size() - 1) * kKvPageTokens, kKvPageTokens),
                                {holder.back()});
        }
        break;
      }
      case 2: {
        std::vector<int32_t>& other = holders[random() % holders.size()];
        if (&other != &holder && holder.empty()) pages.Share(other, &holder);
        break;
      }
    }
    if (i % 100 == 0) pages.CheckIntegrity();
  }
  for (auto& holder : holders) pages.Release(&holder);
  pages.CheckIntegrity();
  EXPECT_EQ(pages.used(), 0);
}

constexpr int64_t kChunk = 8;

// The first chunk has a page less.
int32_t ChunkOf(int32_t page) { return (page + 1) / kChunk; }

TEST(KvPagesInChunks, LowChunksAreFilledFirst) {
  KvPages pages(31, {kChunk, 1});
  std::vector<int32_t> a, b, c;
  ASSERT_TRUE(pages.Allocate(7, &a));
  ASSERT_TRUE(pages.Allocate(10, &b));
  for (const int32_t page : a) EXPECT_EQ(ChunkOf(page), 0);
  pages.Release(&a);
  ASSERT_TRUE(pages.Allocate(5, &c));
  for (const int32_t page : c) EXPECT_EQ(ChunkOf(page), 0);
  pages.Release(&b);
  pages.Release(&c);
  pages.CheckIntegrity();
}

TEST(KvPagesInChunks, ChunksWithoutHeldPagesAreLentAndComeBack) {
  KvPages pages(31, {kChunk, 1});
  std::vector<int32_t> held;
  ASSERT_TRUE(pages.Allocate(9, &held));
  EXPECT_EQ(pages.Shrinkable(0), 2);
  EXPECT_EQ(pages.Shrink(1, 0), std::vector<int32_t>({3})) << "the highest of equal ones";
  EXPECT_EQ(pages.Shrink(5, 0), std::vector<int32_t>({2}));
  pages.CheckIntegrity();
  EXPECT_EQ(pages.total(), 31);
  EXPECT_EQ(pages.released(), 16);
  EXPECT_EQ(pages.used(), 9);
  EXPECT_EQ(pages.available(), 6);
  std::vector<int32_t> more;
  EXPECT_FALSE(pages.Allocate(7, &more));
  EXPECT_EQ(pages.FirstReleased(), 2);
  pages.Grow(2);
  EXPECT_TRUE(pages.Allocate(7, &more));
  pages.Grow(pages.FirstReleased());
  EXPECT_EQ(pages.FirstReleased(), -1);
  pages.CheckIntegrity();
  pages.Release(&held);
  pages.Release(&more);
}

TEST(KvPagesInChunks, TheFirstChunkStaysAndSoDoesTheFloor) {
  KvPages pages(31, {kChunk, 1});
  EXPECT_EQ(pages.Shrinkable(15), 2);
  EXPECT_EQ(pages.Shrinkable(16), 1) << "chunks are whole";
  EXPECT_EQ(pages.Shrinkable(31), 0);
  EXPECT_EQ(pages.Shrinkable(1000), 0);
  EXPECT_EQ(pages.Shrink(100, 0), std::vector<int32_t>({3, 2, 1}));
  EXPECT_EQ(pages.available(), 7);
  KvPages one(31);
  EXPECT_EQ(one.Shrinkable(0), 0);
  EXPECT_TRUE(one.Shrink(1, 0).empty());
}

TEST(KvPagesInChunks, PrefixesInAChunkThatIsLentAreForgottenTheFewestFirst) {
  KvPages pages(31, {kChunk, 1});
  std::vector<int32_t> low, middle, high;
  ASSERT_TRUE(pages.Allocate(7, &low));
  const PrefixNode root = PrefixRoot("", "");
  const std::vector<TokenId> many = Tokens(8 * kKvPageTokens, 0);
  const std::vector<TokenId> few = Tokens(kKvPageTokens, 5000);
  Fill(pages, root, many, &middle);
  Fill(pages, root, few, &high);
  ASSERT_EQ(ChunkOf(middle.front()), 1);
  ASSERT_EQ(ChunkOf(high.front()), 2);
  pages.Release(&middle);
  pages.Release(&high);
  EXPECT_EQ(pages.Shrink(2, 0), std::vector<int32_t>({3, 2}));
  pages.CheckIntegrity();
  EXPECT_EQ(pages.cached(), 8);
  std::vector<int32_t> found;
  PrefixNode node = root;
  pages.MatchPrefix(few, &node, &found);
  EXPECT_TRUE(found.empty());
  node = root;
  pages.MatchPrefix(many, &node, &found);
  EXPECT_EQ(found.size(), 8u);
  pages.Release(&found);
  EXPECT_EQ(pages.Shrink(1, 0), std::vector<int32_t>({1}));
  EXPECT_EQ(pages.cached(), 0);
  pages.Release(&low);
  pages.CheckIntegrity();
}

TEST(KvPagesInChunks, KeepTheirBooksUnderRandomUse) {
  std::mt19937 random(11);
  for (const int64_t lead : {0, 1, 7}) {
    constexpr int64_t kFloor = 12;
    KvPages pages(61, {kChunk, lead});
    std::vector<std::vector<int32_t>> holders(8);
    int64_t most_released = 0;
    for (int i = 0; i < 20000; ++i) {
      std::vector<int32_t>& holder = holders[random() % holders.size()];
      switch (random() % 6) {
        case 0:
        case 1:
          pages.Release(&holder);
          break;
        case 2: {
          if (!holder.empty()) break;
          PrefixNode node = PrefixRoot(std::to_string(random() % 4), "");
          const std::vector<TokenId> tokens = Tokens(6 * kKvPageTokens, random() % 3);
          pages.MatchPrefix(tokens, &node, &holder);
          while (holder.size() < 6 && pages.Allocate(1, &holder)) {
            node = pages.Register(node,
                                  absl::MakeConstSpan(tokens).subspan(
                                      (holder.size() - 1) * kKvPageTokens, kKvPageTokens),
                                  {holder.back()});
          }
          break;
        }
        case 3: {
          std::vector<int32_t>& other = holders[random() % holders.size()];
          if (&other != &holder && holder.empty()) pages.Share(other, &holder);
          break;
        }
        case 4: {
          const int64_t shrinkable = pages.Shrinkable(kFloor);
          const int64_t count = static_cast<int64_t>(random() % 3);
          const auto released = static_cast<int64_t>(pages.Shrink(count, kFloor).size());
          ASSERT_EQ(released, std::min(count, shrinkable));
          ASSERT_GE(pages.total() - pages.released(), kFloor);
          break;
        }
        case 5:
          if (pages.released() > 0) pages.Grow(pages.FirstReleased());
          break;
      }
      most_released = std::max(most_released, pages.released());
      if (i % 20 == 0) pages.CheckIntegrity();
    }
    EXPECT_GT(most_released, 3 * kChunk);
    for (auto& holder : holders) pages.Release(&holder);
    pages.CheckIntegrity();
    EXPECT_EQ(pages.used(), 0);
    while (pages.released() > 0) pages.Grow(pages.FirstReleased());
    EXPECT_EQ(pages.available(), pages.total());
  }
}

// A prefix of two pages with a state of two pages after it.
struct KvPagesWithState : ::testing::Test {
  KvPagesWithState() {
    Fill(pages, root, Tokens(kKvPageTokens, 0), &held);
    EXPECT_TRUE(pages.Allocate(1, &held));
    EXPECT_TRUE(pages.Allocate(2, &state));
    PrefixNode node = root;
    std::vector<int32_t> first;
    pages.MatchPrefix(absl::MakeConstSpan(tokens).first(kKvPageTokens), &node, &first);
    pages.Release(&first);
    pages.Register(node, absl::MakeConstSpan(tokens).subspan(kKvPageTokens, kKvPageTokens),
                   {held.back()}, state);
  }
  ~KvPagesWithState() override {
    pages.CheckIntegrity();
    pages.Release(&held);
    pages.Release(&state);
    pages.CheckIntegrity();
  }

  // The pages and the state of what is found for these tokens.
  std::pair<std::vector<int32_t>, std::vector<int32_t>> Find(const std::vector<TokenId>& wanted) {
    std::pair<std::vector<int32_t>, std::vector<int32_t>> found;
    PrefixNode node = root;
    pages.MatchPrefix(wanted, &node, &found.first);
    pages.CutToState(root, &found.first, &node, &found.second);
    pages.CheckIntegrity();
    std::vector<int32_t> pages_of_prefix = found.first, pages_of_state = found.second;
    pages.Release(&pages_of_prefix);
    pages.Release(&pages_of_state);
    return found;
  }

  KvPages pages{8};
  const PrefixNode root = PrefixRoot("", "");
  const std::vector<TokenId> tokens = Tokens(3 * kKvPageTokens, 0);
  std::vector<int32_t> held, state;
};

TEST_F(KvPagesWithState, AStateIsFoundWithItsPrefixOnly) {
  const std::pair all(held, state);
  const std::pair<std::vector<int32_t>, std::vector<int32_t>> none;
  EXPECT_EQ(Find(tokens), all);
  pages.Release(&held);
  pages.Release(&state);
  EXPECT_EQ(pages.cached(), 4);
  EXPECT_EQ(Find(tokens), all);
  EXPECT_EQ(Find(Tokens(2 * kKvPageTokens, 0)), all);
  // Its first page alone has none.
  EXPECT_EQ(Find(Tokens(kKvPageTokens, 0)), none);
}

TEST_F(KvPagesWithState, OthersMayReadACachedStateAndNobodyMayWriteIt) {
  EXPECT_TRUE(pages.IsShared(state[0]));
  std::vector<int32_t> fresh;
  ASSERT_TRUE(pages.Allocate(1, &fresh));
  EXPECT_FALSE(pages.IsShared(fresh[0]));
  pages.Acquire(fresh[0]);
  EXPECT_TRUE(pages.IsShared(fresh[0]));
  pages.Release(fresh[0]);
  pages.Release(&fresh);
}

TEST_F(KvPagesWithState, AStateIsForgottenAsAWhole) {
  pages.Release(&state);  // the oldest of what can go
  std::vector<int32_t> fresh;
  ASSERT_TRUE(pages.Allocate(5, &fresh));  // four are free
  EXPECT_EQ(pages.cached(), 0);
  EXPECT_EQ(pages.free(), 1);
  EXPECT_TRUE(Find(tokens).first.empty());
  pages.Release(&fresh);
}

TEST_F(KvPagesWithState, AStateGoesWithItsPrefix) {
  pages.Release(&held);
  pages.Release(&state);
  std::vector<int32_t> fresh;
  ASSERT_TRUE(pages.Allocate(5, &fresh));  // evicts the end of the prefix
  EXPECT_EQ(pages.cached(), 1);            // its first page
  EXPECT_EQ(pages.free(), 2);
  pages.Release(&fresh);
}

TEST_F(KvPagesWithState, AHeldStateOutlivesItsPrefix) {
  pages.Release(&held);
  std::vector<int32_t> fresh;
  ASSERT_TRUE(pages.Allocate(6, &fresh));
  EXPECT_EQ(pages.cached(), 0);
  EXPECT_FALSE(pages.IsShared(state[0]));  // its holder's own again
  pages.Release(&fresh);
}

TEST_F(KvPagesWithState, AnEqualPrefixKeepsItsState) {
  std::vector<int32_t> other, other_state;
  ASSERT_TRUE(pages.Allocate(1, &other));
  ASSERT_TRUE(pages.Allocate(1, &other_state));
  PrefixNode node = root;
  std::vector<int32_t> first;
  pages.MatchPrefix(absl::MakeConstSpan(tokens).first(kKvPageTokens), &node, &first);
  pages.Register(node, absl::MakeConstSpan(tokens).subspan(kKvPageTokens, kKvPageTokens),
                 {other[0]}, other_state);
  EXPECT_FALSE(pages.IsShared(other_state[0]));
  EXPECT_EQ(Find(tokens), std::pair(held, state));
  for (auto* list : {&first, &other, &other_state}) pages.Release(list);
}

}  // namespace
}  // namespace dorad::engine
