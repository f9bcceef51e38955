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

KvPages::KvPages(int64_t pages, Chunks chunks, std::vector<int64_t> windows)
    : pages_(static_cast<size_t>(pages)),
      lead_(chunks.lead),
      shift_(std::bit_width(
          static_cast<uint64_t>(chunks.pages > 0 ? chunks.pages - 1 : pages + chunks.lead - 1))),
      windows_(std::move(windows)) {
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
  for (auto it = pages->rbegin(); it != pages->rend(); ++it) {
    if (*it >= 0) Release(*it);
  }
  pages->clear();
}

void KvPages::Release(int32_t page) {
  DORAD_CHECK(pages_[page].references > 0);
  if (--pages_[page].references > 0) return;
  Chunk& chunk = ChunkOf(page);
  SetUsed(&chunk, chunk.used - 1);
  if (pages_[page].prefix != nullptr) {
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

void KvPages::ReleaseBehind(int64_t position, int64_t end, std::vector<int32_t>* pages) {
  for (int64_t group = 0; group < groups(); ++group) {
    for (int64_t block = std::min(end, FirstBlockSeen(windows_[group], position)); block-- > 0;) {
      int32_t& page = (*pages)[block * groups() + group];
      if (page < 0) break;
      Release(std::exchange(page, -1));
    }
  }
}

void KvPages::MatchPrefix(absl::Span<const TokenId> tokens, PrefixNode* node,
                          std::vector<int32_t>* to) {
  std::vector<const Prefix*> path;
  // Of each group, the block from which on no page is missing.
  std::vector<int64_t> whole_from(windows_.size());
  size_t usable = 0;
  for (PrefixNode at = *node; static_cast<int64_t>(tokens.size()) >= kKvPageTokens;) {
    const auto found = by_key_.find({at, tokens.first(kKvPageTokens)});
    if (found == by_key_.end()) break;
    const Prefix* const prefix = found->second;
    path.push_back(prefix);
    const auto end = static_cast<int64_t>(path.size());
    bool is_usable = true;
    for (size_t group = 0; group < windows_.size(); ++group) {
      if (prefix->pages[group] < 0) whole_from[group] = end;
      is_usable =
          is_usable && whole_from[group] <= FirstBlockSeen(windows_[group], end * kKvPageTokens);
    }
    if (is_usable) usable = path.size();
    at = prefix->node;
    tokens.remove_prefix(kKvPageTokens);
  }
  if (usable == 0) return;
  *node = path[usable - 1]->node;
  const int64_t end = static_cast<int64_t>(usable) * kKvPageTokens;
  for (size_t block = 0; block < usable; ++block) {
    for (size_t group = 0; group < windows_.size(); ++group) {
      const bool is_seen = static_cast<int64_t>(block) >= FirstBlockSeen(windows_[group], end);
      to->push_back(is_seen ? path[block]->pages[group] : -1);
      if (to->back() >= 0) Acquire(to->back());
    }
  }
}

int64_t KvPages::MatchPart(const PrefixNode& node, absl::Span<const TokenId> tokens,
                           std::vector<int32_t>* pages) const {
  const auto found = prefixes_.find(node);
  if (found == prefixes_.end()) return 0;
  const auto& children = found->second->children;
  constexpr size_t kMost = 64;  // of a prefix with very many continuations
  int64_t best = 0;
  const size_t count = std::min(children.size(), kMost);
  for (size_t i = 0; i < count; ++i) {
    const Prefix& child = *children[i];
    const auto& held = child.key.tokens;
    const auto end = std::mismatch(tokens.begin(), tokens.end(), held.begin(), held.end());
    if (end.first - tokens.begin() <= best) continue;
    if (std::count(child.pages.begin(), child.pages.end(), -1) > 0) continue;
    best = end.first - tokens.begin();
    pages->assign(child.pages.begin(), child.pages.end());
  }
  return best;
}

KvPages::Prefix* KvPages::AddPrefix(const PrefixKey& key) {
  std::unique_ptr<Prefix>& parent = prefixes_[key.parent];
  if (parent == nullptr) {
    parent = std::make_unique<Prefix>();
    parent->node = key.parent;
  }
  auto added = std::make_unique<Prefix>();
  Prefix* const prefix = added.get();
  prefix->node = {0, next_node_++};
  prefix->key = key;
  prefix->parent = parent.get();
  prefix->pages.assign(windows_.size(), -1);
  parent->children.push_back(prefix);
  by_key_.emplace(key, prefix);
  prefixes_.emplace(prefix->node, std::move(added));
  return prefix;
}

PrefixNode KvPages::Register(const PrefixNode& parent, absl::Span<const TokenId> tokens,
                             absl::Span<const int32_t> pages, absl::Span<const int32_t> state) {
  DORAD_CHECK(pages.size() == windows_.size());
  const PrefixKey key(parent, tokens);
  const auto known = by_key_.find(key);
  const bool is_root = parent.hi != 0;
  const bool is_reachable = is_root || prefixes_.contains(parent);
  const bool has_pages = std::any_of(pages.begin(), pages.end(), [](int32_t p) { return p >= 0; });
  if (known == by_key_.end() && !(is_reachable && has_pages)) return {0, next_node_++};
  Prefix* const prefix = known == by_key_.end() ? AddPrefix(key) : known->second;
  for (size_t group = 0; group < pages.size(); ++group) {
    const int32_t page = pages[group];
    if (page < 0 || prefix->pages[group] >= 0) continue;
    DORAD_CHECK(pages_[page].references > 0 && pages_[page].prefix == nullptr);
    pages_[page].prefix = prefix;
    prefix->pages[group] = page;
  }
  if (!state.empty() && prefix->state.empty()) {
    for (const int32_t part : state) {
      DORAD_CHECK(pages_[part].references > 0 && pages_[part].prefix == nullptr);
      pages_[part].prefix = prefix;
    }
    prefix->state.assign(state.begin(), state.end());
  }
  return prefix->node;
}

void KvPages::CutToState(const PrefixNode& root, std::vector<int32_t>* pages, PrefixNode* node,
                         std::vector<int32_t>* state) {
  while (!pages->empty() && pages_[pages->back()].prefix->state.empty()) {
    const int32_t page = pages->back();
    pages->pop_back();
    *node = pages->empty() ? root : pages_[page].prefix->key.parent;
    Release(page);
  }
  if (!pages->empty()) Share(pages_[pages->back()].prefix->state, state);
}

void KvPages::Evict(int32_t page) {
  Prefix* const prefix = pages_[page].prefix;
  if (std::count(prefix->pages.begin(), prefix->pages.end(), page) == 0) {
    return ForgetState(prefix);
  }
  RemoveCached(page);
  Unregister(page);
  Free(page);
}

void KvPages::ForgetState(Prefix* prefix) {
  for (const int32_t part : std::exchange(prefix->state, {})) {
    if (pages_[part].references == 0) {
      RemoveCached(part);
      Free(part);
    }
    pages_[part].prefix = nullptr;
  }
}

void KvPages::Unregister(int32_t page) {
  Prefix* const prefix = std::exchange(pages_[page].prefix, nullptr);
  ForgetState(prefix);
  *std::find(prefix->pages.begin(), prefix->pages.end(), page) = -1;
  Prune(prefix);
}

void KvPages::Prune(Prefix* prefix) {
  while (prefix != nullptr && prefix->children.empty() &&
         std::all_of(prefix->pages.begin(), prefix->pages.end(), [](int32_t p) { return p < 0; })) {
    Prefix* const parent = prefix->parent;
    if (parent != nullptr) {
      std::swap(*std::find(parent->children.begin(), parent->children.end(), prefix),
                parent->children.back());
      parent->children.pop_back();
      by_key_.erase(prefix->key);
    }
    prefixes_.erase(PrefixNode(prefix->node));
    prefix = parent;
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
      if (pages_[page].prefix != nullptr) Evict(page);
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
    if (pages_[i].references > 0 || pages_[i].prefix != nullptr)
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

void KvPages::AppendCached(int32_t page) {
  pages_[page].older = newest_;
  pages_[page].newer = -1;
  (newest_ >= 0 ? pages_[newest_].newer : oldest_) = page;
  newest_ = page;
  ++cached_;
}

void KvPages::RemoveCached(int32_t page) {
  const Page& p = pages_[page];
  DORAD_CHECK(p.prefix != nullptr);
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
      DORAD_CHECK(!chunk.is_shared || pages_[page].prefix == nullptr);
      if (chunk.is_shared) ++lists[page];  // its only list
    }
    DORAD_CHECK(used == chunk.used);
    for (const int32_t page : chunk.free) {
      DORAD_CHECK(page >= chunk.begin && page < chunk.end);
      DORAD_CHECK(pages_[page].references == 0 && pages_[page].prefix == nullptr);
      ++lists[page];
    }
  }
  DORAD_CHECK(chunks_.back().end == static_cast<int32_t>(pages_.size()));
  DORAD_CHECK(free == free_ && released == released_ && without_holders == without_holders_);
  int64_t cached = 0;
  for (int32_t page = oldest_; page >= 0; page = pages_[page].newer) {
    DORAD_CHECK(pages_[page].references == 0 && pages_[page].prefix != nullptr);
    ++lists[page];
    ++cached;
  }
  DORAD_CHECK(cached == cached_);
  size_t of_prefixes = 0;
  for (size_t i = 0; i < pages_.size(); ++i) {
    DORAD_CHECK(lists[i] == (pages_[i].references == 0 ? 1 : 0));
    of_prefixes += pages_[i].prefix != nullptr;
  }
  size_t children = 0;
  for (const auto& [node, prefix] : prefixes_) {
    DORAD_CHECK(node == prefix->node);
    const bool has_pages = std::any_of(prefix->pages.begin(), prefix->pages.end(),
                                       [](int32_t page) { return page >= 0; });
    DORAD_CHECK(has_pages || (prefix->state.empty() && !prefix->children.empty()));
    for (const auto& list :
         {absl::MakeConstSpan(prefix->pages), absl::MakeConstSpan(prefix->state)}) {
      for (const int32_t page : list) {
        if (page < 0) continue;
        DORAD_CHECK(pages_[page].prefix == prefix.get());
        --of_prefixes;
      }
    }
    children += prefix->children.size();
    for (const Prefix* child : prefix->children) {
      DORAD_CHECK(child->parent == prefix.get() && child->key.parent == node);
      DORAD_CHECK(by_key_.at(child->key) == child);
    }
  }
  DORAD_CHECK(of_prefixes == 0 && children == by_key_.size());
  DORAD_CHECK(std::all_of(prefixes_.begin(), prefixes_.end(), [](const auto& of_node) {
    return (of_node.first.hi != 0) == (of_node.second->parent == nullptr);
  }));
}

}  // namespace dorad::engine
