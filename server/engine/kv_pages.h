// The pages of the KV cache: reference counts, and the trie of reusable prefixes.
//
// A page is free, held by sequences (references >= 1), or cached (no reference, but its content is
// the registered continuation of a prefix). Cached pages are reused by content and evicted, least
// recently used first, when pages are needed.
//
// Pages are grouped in chunks. A chunk's memory can be released while none of its pages is held.
// Low chunks are filled first, so that high ones become empty.
//
// A model with a recurrence has a state after each prefix, too: some whole pages. A prefix's state
// is cached with the prefix's last page, and forgotten before it or with it.
//
// A prefix is named by a node: (parent node, the page's tokens). Nodes are compared token by token,
// so a hash collision cannot mix contents up; the root stands for one adapter version, one tenant
// and one salt (SHA-256 of all three), never for a name. Confined to the engine thread; no torch.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "server/engine/model_runner.h"
#include "server/engine/types.h"

namespace dorad::engine {

// A place in the trie of prefixes. Node ids are never reused, so a node of an evicted page matches
// nothing.
struct PrefixNode {
  uint64_t hi = 0;
  uint64_t lo = 0;
  bool operator==(const PrefixNode&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const PrefixNode& node) {
    return H::combine(std::move(h), node.hi, node.lo);
  }
};

// The tokens after `parent`: a page's, or fewer, then followed by -1.
struct PrefixKey {
  PrefixKey() = default;
  PrefixKey(const PrefixNode& parent, absl::Span<const TokenId> next);
  bool operator==(const PrefixKey&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const PrefixKey& key) {
    return H::combine(std::move(h), key.parent, key.tokens);
  }

  PrefixNode parent;
  std::array<TokenId, kKvPageTokens> tokens = {};
};

// The root of all prefixes computed under one adapter version ("" for the base) for one tenant and
// one salt.
PrefixNode PrefixRoot(std::string_view adapter_digest, std::string_view salt,
                      std::string_view tenant = "");

class KvPages {
 public:
  // Chunks of `pages` pages, a power of two; the first one has `lead` fewer: page p lies in chunk
  // (p + lead) / pages.
  struct Chunks {
    int64_t pages = 0;  // 0: all are one chunk
    int64_t lead = 0;
  };
  explicit KvPages(int64_t pages) : KvPages(pages, Chunks()) {}
  KvPages(int64_t pages, Chunks chunks);
  ~KvPages();  // CHECKs that no reference is left
  KvPages(const KvPages&) = delete;
  KvPages& operator=(const KvPages&) = delete;

  // Appends `count` pages with one reference each to *to, evicting cached pages if needed; false
  // and no change if there are not enough.
  [[nodiscard]] bool Allocate(int64_t count, std::vector<int32_t>* to);
  // Drops one reference of each page, last page first (so that the ends of prefixes are evicted
  // before their beginnings), and clears the list.
  void Release(std::vector<int32_t>* pages);
  void Release(int32_t page);
  // One more reference of each page, appended to *to.
  void Share(absl::Span<const int32_t> pages, std::vector<int32_t>* to);
  void Acquire(int32_t page);

  // Walks the trie from *node along whole pages of tokens. Adds a reference to each page found,
  // appends it to *to and advances *node.
  void MatchPrefix(absl::Span<const TokenId> tokens, PrefixNode* node, std::vector<int32_t>* to);
  // The page with the most of these tokens after the node, from the first one on. Returns their
  // number; 0: there is none.
  int64_t MatchPart(const PrefixNode& node, absl::Span<const TokenId> tokens, int32_t* page) const;
  // Makes a held page with these tokens after `parent`, at most kKvPageTokens, reusable, and held
  // pages with the state after them, if there are any. Returns its node; an equal one registered
  // earlier keeps its page, and its state. MatchPrefix does not find a page with fewer tokens.
  PrefixNode Register(const PrefixNode& parent, absl::Span<const TokenId> tokens, int32_t page,
                      absl::Span<const int32_t> state = {});
  // Releases pages from the end of a list by MatchPrefix until the last page has a state. Adds a
  // reference to each page of that state, appends them to *state and moves *node back. `root`: the
  // node of the first page's beginning.
  void CutToState(const PrefixNode& root, std::vector<int32_t>* pages, PrefixNode* node,
                  std::vector<int32_t>* state);
  // Whether others may read the page: it is held more than once, or its content is cached.
  bool IsShared(int32_t page) const {
    return pages_[page].references > 1 || pages_[page].is_cached();
  }

  // Forgets all prefixes: cached pages become free. REQUIRES: no page is held.
  void DropPrefixes();
  // Pages that are held or cached, in ascending order.
  std::vector<int32_t> Filled() const;

  // --- Chunks.

  // Chunks that can be released while at least `floor` pages stay.
  int64_t Shrinkable(int64_t floor) const;
  // Releases `count` chunks, or as many as possible, and drops the prefixes in them. Returns the
  // chunks, those with the fewest prefixes first.
  std::vector<int32_t> Shrink(int64_t count, int64_t floor);
  // The lowest released chunk; -1: none.
  int32_t FirstReleased() const;
  // Makes the chunk's pages free. REQUIRES: it was released.
  void Grow(int32_t chunk);

  int64_t total() const { return static_cast<int64_t>(pages_.size()); }
  int64_t released() const { return released_; }
  int64_t available() const { return free_ + cached_; }
  int64_t free() const { return free_; }
  int64_t used() const { return total() - released_ - available(); }
  int64_t cached() const { return cached_; }

  // CHECKs the counts, the lists and the trie against each other. O(pages).
  void CheckIntegrity() const;

 private:
  struct Child {
    PrefixNode node;
    int32_t page = -1;
  };
  struct Page {
    int32_t references = 0;
    bool registered = false;
    PrefixKey key;               // valid if registered
    std::vector<int32_t> state;  // after a registered page; empty: not cached
    int32_t state_of = -1;       // the page whose state this one is part of
    bool is_cached() const { return registered || state_of >= 0; }
    // Neighbours in the list of cached pages, oldest first; -1 at the ends.
    int32_t older = -1;
    int32_t newer = -1;
  };

  struct Chunk {
    int32_t begin = 0;  // pages [begin, end)
    int32_t end = 0;
    std::vector<int32_t> free;
    int32_t used = 0;  // pages with references
    bool is_shared = false;
    int32_t size() const { return end - begin; }
    int32_t cached() const { return size() - used - static_cast<int32_t>(free.size()); }
  };

  Chunk& ChunkOf(int32_t page) { return chunks_[(page + lead_) >> shift_]; }
  void Free(int32_t page);
  int32_t TakeFree();
  void SetUsed(Chunk* chunk, int32_t used);
  // Frees a cached page and what cannot be found without it.
  void Evict(int32_t page);
  void Unregister(int32_t page);
  // Its pages that are not held become free.
  void ForgetState(int32_t page);
  void AppendCached(int32_t page);
  void RemoveCached(int32_t page);

  std::vector<Page> pages_;
  const int64_t lead_;
  const int shift_;
  std::vector<Chunk> chunks_;
  size_t first_free_ = 0;        // below it no chunk has free pages
  int64_t free_ = 0;             // in all chunks
  int64_t released_ = 0;         // pages of released chunks
  int64_t without_holders_ = 0;  // chunks that are not released and hold no used page
  absl::flat_hash_map<PrefixKey, Child> children_;
  absl::flat_hash_map<PrefixNode, absl::InlinedVector<int32_t, 2>> by_parent_;  // registered pages
  int32_t oldest_ = -1;
  int32_t newest_ = -1;
  int64_t cached_ = 0;
  uint64_t next_node_ = 1;
};

}  // namespace dorad::engine
