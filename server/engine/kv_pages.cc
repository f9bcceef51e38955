#include "server/engine/kv_pages.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "server/platform/check.h"
#include "server/platform/files/sha256.h"

namespace dorad::engine {

PrefixKey::PrefixKey(const PrefixNode& parent, absl::Span<const TokenId> next) : parent(parent) {
  DORAD_CHECK(static_cast<int64_t>(next.size()) <= kKvPageTokens);
  std::fill(std::copy(next.begin(), next.end(), tokens.begin()), tokens.end(), -1);
}

PrefixNode PrefixRoot(std::string_view adapter_digest, std::string_view salt,
                      std::string_view tenant) {
  Sha256 sha;
  sha.UpdateFramed(adapter_digest);
  sha.UpdateFramed(salt);
  sha.UpdateFramed(tenant);
  const std::array<uint8_t, 32> digest = sha.Final();
  PrefixNode root;
  std::memcpy(&root.hi, digest.data(), sizeof(root.hi));
  std::memcpy(&root.lo, digest.data() + sizeof(root.hi), sizeof(root.lo));
  root.hi |= 1;  // inner nodes have hi = 0
  return root;
}

KvPages::KvPages(int64_t pages, Chunks chunks)
    : pages_(static_cast<size_t>(pages)),
      lead_(chunks.lead),
      shift_(std::bit_width(
          static_cast<uint64_t>(chunks.pages > 0 ? chunks.pages - 1 : pages + chunks.lead - 1))) {
  DORAD_CHECK(pages > 0 && lead_ >= 0 && lead_ < int64_t{1} << shift_);
  DORAD_CHECK(chunks.pages == 0 || chunks.pages == int64_t{1} << shift_);
  chunks_.resize(static_cast<size_t>(((pages + lead_ - 1) >> shift_) + 1));
  without_holders_ = static_cast<int64_t>(chunks_.size());
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const auto first = static_cast<int64_t>(i) << shift_;
    chunks_[i].begin = static_cast<int32_t>(std::max<int64_t>(0, first - lead_));
    chunks_[i].end = static_cast<int32_t>(std::min(pages, first + (int64_t{1} << shift_) - lead_));
    // The free list is taken from the back: low numbers first.
    for (int32_t page = chunks_[i].end; page > chunks_[i].begin;) Free(--page);
  }
}

KvPages::~KvPages() { DORAD_CHECK(used() == 0); }

bool KvPages::Allocate(int64_t count, std::vector<int32_t>* to) {
  if (count > available()) return false;
  for (int64_t i = 0; i < count; ++i) {
    if (free_ == 0) Evict(oldest_);
    const int32_t page = TakeFree();
    pages_[page].references = 1;
    Chunk& chunk = ChunkOf(page);
    SetUsed(&chunk, chunk.used + 1);
    to->push_back(page);
  }
  return true;
}

void KvPages::Release(std::vector<int32_t>* pages) {
  for (auto it = pages->rbegin(); it != pages->rend(); ++it) Release(*it);
  pages->clear();
}

void KvPages::Release(int32_t page) {
  DORAD_CHECK(pages_[page].references > 0);
  if (--pages_[page].references > 0) return;
  Chunk& chunk = ChunkOf(page);
  SetUsed(&chunk, chunk.used - 1);
  if (pages_[page].is_cached()) {
    AppendCached(page);
  } else {
    Free(page);
  }
}

void KvPages::Share(absl::Span<const int32_t> pages, std::vector<int32_t>* to) {
  for (int32_t page : pages) {
    Acquire(page);
    to->push_back(page);
  }
}

void KvPages::MatchPrefix(absl::Span<const TokenId> tokens, PrefixNode* node,
                          std::vector<int32_t>* to) {
  while (static_cast<int64_t>(tokens.size()) >= kKvPageTokens) {
    const auto child = children_.find({*node, tokens.first(kKvPageTokens)});
    if (child == children_.end()) return;
    Acquire(child->second.page);
    to->push_back(child->second.page);
    *node = child->second.node;
    tokens.remove_prefix(kKvPageTokens);
  }
}

int64_t KvPages::MatchPart(const PrefixNode& node, absl::Span<const TokenId> tokens,
                           int32_t* page) const {
  const auto children = by_parent_.find(node);
  if (children == by_parent_.end()) return 0;
  constexpr size_t kMost = 64;  // of a prefix with very many continuations
  int64_t best = 0;
  const size_t count = std::min(children->second.size(), kMost);
  for (size_t i = 0; i < count; ++i) {
    const int32_t child = children->second[i];
    const auto& held = pages_[child].key.tokens;
    const auto end = std::mismatch(tokens.begin(), tokens.end(), held.begin(), held.end());
    if (end.first - tokens.begin() <= best) continue;
    best = end.first - tokens.begin();
    *page = child;
  }
  return best;
}

PrefixNode KvPages::Register(const PrefixNode& parent, absl::Span<const TokenId> tokens,
                             int32_t page, absl::Span<const int32_t> state) {
  DORAD_CHECK(pages_[page].references > 0);
  const PrefixKey key(parent, tokens);
  const auto keep_state = [&](int32_t owner) {
    if (state.empty() || !pages_[owner].state.empty()) return;
    for (const int32_t part : state) {
      DORAD_CHECK(pages_[part].references > 0 && !pages_[part].is_cached());
      pages_[part].state_of = owner;
    }
    pages_[owner].state.assign(state.begin(), state.end());
  };
  const auto known = children_.find(key);
  if (known != children_.end()) {
    keep_state(known->second.page);
    return known->second.node;
  }
  // A shared page may still be registered under an evicted parent; no path leads to it.
  if (pages_[page].registered) Unregister(page);
  const PrefixNode node{0, next_node_++};
  children_.emplace(key, Child{node, page});
  by_parent_[parent].push_back(page);
  pages_[page].registered = true;
  pages_[page].key = key;
  keep_state(page);
  return node;
}

void KvPages::CutToState(const PrefixNode& root, std::vector<int32_t>* pages, PrefixNode* node,
                         std::vector<int32_t>* state) {
  while (!pages->empty() && pages_[pages->back()].state.empty()) {
    const int32_t page = pages->back();
    pages->pop_back();
    *node = pages->empty() ? root : pages_[page].key.parent;
    Release(page);
  }
  if (!pages->empty()) Share(pages_[pages->back()].state, state);
}

void KvPages::Evict(int32_t page) {
  if (pages_[page].state_of >= 0) return ForgetState(pages_[page].state_of);
  RemoveCached(page);
  Unregister(page);
  Free(page);
}

void KvPages::ForgetState(int32_t page) {
  for (const int32_t part : std::exchange(pages_[page].state, {})) {
    if (pages_[part].references == 0) {
      RemoveCached(part);
      Free(part);
    }
    pages_[part].state_of = -1;
  }
}

void KvPages::DropPrefixes() {
  DORAD_CHECK(used() == 0);
  while (oldest_ >= 0) Evict(oldest_);
}

int64_t KvPages::Shrinkable(int64_t floor) const {
  // The lowest chunk always stays: the runner keeps data of its own in it.
  const bool first_counts = !chunks_.front().is_shared && chunks_.front().used == 0;
  const int64_t spare = std::max<int64_t>(0, total() - released_ - floor);
  return std::min(without_holders_ - (first_counts ? 1 : 0), spare >> shift_);
}

std::vector<int32_t> KvPages::Shrink(int64_t count, int64_t floor) {
  count = std::min(count, Shrinkable(floor));
  std::vector<int32_t> shrinkable;
  for (size_t i = 1; i < chunks_.size(); ++i) {
    if (!chunks_[i].is_shared && chunks_[i].used == 0)
      shrinkable.push_back(static_cast<int32_t>(i));
  }
  // High chunks first among equals.
  std::sort(shrinkable.begin(), shrinkable.end(), [this](int32_t a, int32_t b) {
    return std::pair(chunks_[a].cached(), b) < std::pair(chunks_[b].cached(), a);
  });
  shrinkable.resize(static_cast<size_t>(count));
  for (const int32_t index : shrinkable) {
    Chunk& chunk = chunks_[index];
    for (int32_t page = chunk.begin; page < chunk.end; ++page) {
      if (pages_[page].is_cached()) Evict(page);
    }
    free_ -= static_cast<int64_t>(chunk.free.size());
    released_ += chunk.size();
    chunk.free.clear();
    chunk.is_shared = true;
    --without_holders_;
  }
  return shrinkable;
}

int32_t KvPages::FirstReleased() const {
  if (released_ == 0) return -1;
  const auto first = std::find_if(chunks_.begin(), chunks_.end(),
                                  [](const Chunk& chunk) { return chunk.is_shared; });
  return static_cast<int32_t>(first - chunks_.begin());
}

void KvPages::Grow(int32_t index) {
  Chunk& chunk = chunks_[index];
  DORAD_CHECK(chunk.is_shared);
  chunk.is_shared = false;
  released_ -= chunk.size();
  ++without_holders_;
  for (int32_t page = chunk.end; page > chunk.begin;) Free(--page);
}

void KvPages::Free(int32_t page) {
  ChunkOf(page).free.push_back(page);
  first_free_ = std::min(first_free_, static_cast<size_t>((page + lead_) >> shift_));
  ++free_;
}

int32_t KvPages::TakeFree() {
  while (chunks_[first_free_].free.empty()) ++first_free_;
  std::vector<int32_t>& pages = chunks_[first_free_].free;
  const int32_t page = pages.back();
  pages.pop_back();
  --free_;
  return page;
}

void KvPages::SetUsed(Chunk* chunk, int32_t used) {
  without_holders_ += (used == 0 ? 1 : 0) - (chunk->used == 0 ? 1 : 0);
  chunk->used = used;
}

std::vector<int32_t> KvPages::Filled() const {
  std::vector<int32_t> filled;
  for (size_t i = 0; i < pages_.size(); ++i) {
    if (pages_[i].references > 0 || pages_[i].is_cached())
      filled.push_back(static_cast<int32_t>(i));
  }
  return filled;
}

void KvPages::Acquire(int32_t page) {
  if (pages_[page].references++ > 0) return;
  RemoveCached(page);
  Chunk& chunk = ChunkOf(page);
  SetUsed(&chunk, chunk.used + 1);
}

void KvPages::Unregister(int32_t page) {
  DORAD_CHECK(pages_[page].registered);
  ForgetState(page);
  children_.erase(pages_[page].key);
  const auto siblings = by_parent_.find(pages_[page].key.parent);
  std::swap(*std::find(siblings->second.begin(), siblings->second.end(), page),
            siblings->second.back());
  siblings->second.pop_back();
  if (siblings->second.empty()) by_parent_.erase(siblings);
  pages_[page].registered = false;
}

void KvPages::AppendCached(int32_t page) {
  pages_[page].older = newest_;
  pages_[page].newer = -1;
  (newest_ >= 0 ? pages_[newest_].newer : oldest_) = page;
  newest_ = page;
  ++cached_;
}

void KvPages::RemoveCached(int32_t page) {
  const Page& p = pages_[page];
  DORAD_CHECK(p.is_cached());
  (p.older >= 0 ? pages_[p.older].newer : oldest_) = p.newer;
  (p.newer >= 0 ? pages_[p.newer].older : newest_) = p.older;
  --cached_;
}

void KvPages::CheckIntegrity() const {
  std::vector<int> lists(pages_.size(), 0);
  int64_t free = 0, released = 0, without_holders = 0;
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const Chunk& chunk = chunks_[i];
    DORAD_CHECK(chunk.begin == (i == 0 ? 0 : chunks_[i - 1].end));
    DORAD_CHECK(chunk.free.empty() || i >= first_free_);
    DORAD_CHECK(!chunk.is_shared || (chunk.free.empty() && chunk.used == 0));
    free += static_cast<int64_t>(chunk.free.size());
    released += chunk.is_shared ? chunk.size() : 0;
    without_holders += !chunk.is_shared && chunk.used == 0;
    int32_t used = 0;
    for (int32_t page = chunk.begin; page < chunk.end; ++page) {
      used += pages_[page].references > 0;
      DORAD_CHECK(!chunk.is_shared || !pages_[page].is_cached());
      if (chunk.is_shared) ++lists[page];  // its only list
    }
    DORAD_CHECK(used == chunk.used);
    for (const int32_t page : chunk.free) {
      DORAD_CHECK(page >= chunk.begin && page < chunk.end);
      DORAD_CHECK(pages_[page].references == 0 && !pages_[page].is_cached());
      ++lists[page];
    }
  }
  DORAD_CHECK(chunks_.back().end == static_cast<int32_t>(pages_.size()));
  DORAD_CHECK(free == free_ && released == released_ && without_holders == without_holders_);
  int64_t cached = 0;
  for (int32_t page = oldest_; page >= 0; page = pages_[page].newer) {
    DORAD_CHECK(pages_[page].references == 0 && pages_[page].is_cached());
    ++lists[page];
    ++cached;
  }
  DORAD_CHECK(cached == cached_);
  size_t registered = 0;
  for (size_t i = 0; i < pages_.size(); ++i) {
    DORAD_CHECK(lists[i] == (pages_[i].references == 0 ? 1 : 0));
    for (const int32_t part : pages_[i].state) {
      DORAD_CHECK(pages_[i].registered && pages_[part].state_of == static_cast<int32_t>(i));
    }
    if (const int32_t owner = pages_[i].state_of; owner >= 0) {
      const std::vector<int32_t>& state = pages_[owner].state;
      DORAD_CHECK(!pages_[i].registered);
      DORAD_CHECK(std::count(state.begin(), state.end(), static_cast<int32_t>(i)) == 1);
    }
    if (!pages_[i].registered) continue;
    ++registered;
    const auto child = children_.find(pages_[i].key);
    DORAD_CHECK(child != children_.end() && child->second.page == static_cast<int32_t>(i));
  }
  DORAD_CHECK(registered == children_.size());
  for (const auto& [parent, children] : by_parent_) {
    DORAD_CHECK(!children.empty());
    registered -= children.size();
    for (const int32_t page : children) DORAD_CHECK(pages_[page].key.parent == parent);
  }
  DORAD_CHECK(registered == 0);
}

}  // namespace dorad::engine
