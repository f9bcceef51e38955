#include "server/engine/kv_pages.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "server/base/check.h"
#include "server/base/sha256.h"

namespace dorad::engine {

PrefixNode PrefixRoot(std::string_view adapter_digest, std::string_view salt) {
  Sha256 sha;
  sha.UpdateFramed(adapter_digest);
  sha.UpdateFramed(salt);
  const std::array<uint8_t, 32> digest = sha.Final();
  PrefixNode root;
  std::memcpy(&root.hi, digest.data(), sizeof(root.hi));
  std::memcpy(&root.lo, digest.data() + sizeof(root.hi), sizeof(root.lo));
  root.hi |= 1;  // inner nodes have hi = 0
  return root;
}

KvPages::KvPages(int64_t pages) : pages_(static_cast<size_t>(pages)), free_(pages_.size()) {
  DORAD_CHECK(pages > 0);
  // Pages leave from the back: hand out low numbers first.
  std::iota(free_.rbegin(), free_.rend(), 0);
}

KvPages::~KvPages() { DORAD_CHECK(used() == 0); }

bool KvPages::Allocate(int64_t count, std::vector<int32_t>* to) {
  if (count > available()) return false;
  for (int64_t i = 0; i < count; ++i) {
    if (free_.empty()) {
      const int32_t victim = oldest_;
      RemoveCached(victim);
      Unregister(victim);
      free_.push_back(victim);
    }
    const int32_t page = free_.back();
    free_.pop_back();
    pages_[page].references = 1;
    to->push_back(page);
  }
  return true;
}

void KvPages::Release(std::vector<int32_t>* pages) {
  for (auto it = pages->rbegin(); it != pages->rend(); ++it) {
    Page& page = pages_[*it];
    DORAD_CHECK(page.references > 0);
    if (--page.references > 0) continue;
    if (page.registered) {
      AppendCached(*it);
    } else {
      free_.push_back(*it);
    }
  }
  pages->clear();
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
    const auto child = children_.find(MakeKey(*node, tokens));
    if (child == children_.end()) return;
    Acquire(child->second.page);
    to->push_back(child->second.page);
    *node = child->second.node;
    tokens.remove_prefix(kKvPageTokens);
  }
}

PrefixNode KvPages::Register(const PrefixNode& parent, absl::Span<const TokenId> tokens,
                             int32_t page) {
  DORAD_CHECK(static_cast<int64_t>(tokens.size()) == kKvPageTokens);
  DORAD_CHECK(pages_[page].references > 0);
  const Key key = MakeKey(parent, tokens);
  const auto known = children_.find(key);
  if (known != children_.end()) return known->second.node;
  // A page that siblings share may still be registered after a parent that has been evicted since;
  // no path leads there any more.
  if (pages_[page].registered) Unregister(page);
  const PrefixNode node{0, next_node_++};
  children_.emplace(key, Child{node, page});
  pages_[page].registered = true;
  pages_[page].key = key;
  return node;
}

KvPages::Key KvPages::MakeKey(const PrefixNode& parent, absl::Span<const TokenId> tokens) {
  Key key{parent, {}};
  std::copy_n(tokens.begin(), kKvPageTokens, key.tokens.begin());
  return key;
}

void KvPages::DropPrefixes() {
  DORAD_CHECK(used() == 0);
  while (oldest_ >= 0) {
    const int32_t page = oldest_;
    RemoveCached(page);
    Unregister(page);
    free_.push_back(page);
  }
}

std::vector<int32_t> KvPages::Filled() const {
  std::vector<int32_t> filled;
  for (size_t i = 0; i < pages_.size(); ++i) {
    if (pages_[i].references > 0 || pages_[i].registered) filled.push_back(static_cast<int32_t>(i));
  }
  return filled;
}

void KvPages::Acquire(int32_t page) {
  if (pages_[page].references++ == 0) RemoveCached(page);
}

void KvPages::Unregister(int32_t page) {
  DORAD_CHECK(pages_[page].registered);
  children_.erase(pages_[page].key);
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
  DORAD_CHECK(p.registered);
  (p.older >= 0 ? pages_[p.older].newer : oldest_) = p.newer;
  (p.newer >= 0 ? pages_[p.newer].older : newest_) = p.older;
  --cached_;
}

void KvPages::CheckIntegrity() const {
  std::vector<int> lists(pages_.size(), 0);
  for (int32_t page : free_) {
    DORAD_CHECK(pages_[page].references == 0 && !pages_[page].registered);
    ++lists[page];
  }
  int64_t cached = 0;
  for (int32_t page = oldest_; page >= 0; page = pages_[page].newer) {
    DORAD_CHECK(pages_[page].references == 0 && pages_[page].registered);
    ++lists[page];
    ++cached;
  }
  DORAD_CHECK(cached == cached_);
  size_t registered = 0;
  for (size_t i = 0; i < pages_.size(); ++i) {
    DORAD_CHECK(lists[i] == (pages_[i].references == 0 ? 1 : 0));
    if (!pages_[i].registered) continue;
    ++registered;
    const auto child = children_.find(pages_[i].key);
    DORAD_CHECK(child != children_.end() && child->second.page == static_cast<int32_t>(i));
  }
  DORAD_CHECK(registered == children_.size());
}

}  // namespace dorad::engine
