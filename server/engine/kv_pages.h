// The pages of the KV cache: reference counts, and the trie of reusable prefixes.
//
// A page is free, held by sequences (references >= 1), or cached (no reference, but its content is
// the registered continuation of a prefix). Cached pages are reused by content and evicted, least
// recently used first, when pages are needed.
//
// Pages are grouped in chunks. A chunk's memory can be released while none of its pages is held.
// Low chunks are filled first, so that high ones become empty.
//
// A block is kKvPageTokens positions. It has a page for each group of layers
// (ModelRunner::windows); of a group with a window, blocks that no row sees any more have none.
//
// A model with a recurrence has a state after each prefix, too: some whole pages. A prefix's state
// is cached with the prefix's last page, and forgotten before it or with it.
//
// A prefix is named by a node: (parent node, the block's tokens). Nodes are compared token by
// token, so a hash collision cannot mix contents up; the root stands for one adapter version, one
// tenant and one salt (SHA-256 of all three), never for a name. A prefix is known while it has a
// cached page or a longer one is known: a page is evicted by itself, and what sees past it through
// a window remains of use. Confined to the engine thread; no torch.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "server/engine/model_runner.h"
#include "server/engine/types.h"

namespace dorad::engine {

// A place in the trie of prefixes. Node ids are never reused, so a node of a forgotten prefix
// matches nothing.
struct PrefixNode {
  uint64_t hi = 0;
  uint64_t lo = 0;
  bool operator==(const PrefixNode&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const PrefixNode& node) {
    return H::combine(std::move(h), node.hi, node.lo);
  }
};

// The tokens after `parent`: a block's, or fewer, then followed by -1.
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
  // windows: ModelRunner's.
  KvPages(int64_t pages, Chunks chunks, std::vector<int64_t> windows = {0});
  ~KvPages();  // CHECKs that no reference is left
  KvPages(const KvPages&) = delete;
  KvPages& operator=(const KvPages&) = delete;

  // Appends `count` pages with one reference each to *to, evicting cached pages if needed; false
  // and no change if there are not enough.
  [[nodiscard]] bool Allocate(int64_t count, std::vector<int32_t>* to);
  // Drops one reference of each page, last page first (so that the ends of prefixes are evicted
  // before their beginnings), and clears the list. -1 stands for no page.
  void Release(std::vector<int32_t>* pages);
  void Release(int32_t page);
  // One more reference of each page, appended to *to.
  void Share(absl::Span<const int32_t> pages, std::vector<int32_t>* to);
  void Acquire(int32_t page);
  // Releases those of a sequence's pages, below block `end`, that no row from `position` on sees.
  // REQUIRES: the blocks with pages of a group follow one another.
  void ReleaseBehind(int64_t position, int64_t end, std::vector<int32_t>* pages);

  int64_t groups() const { return static_cast<int64_t>(windows_.size()); }
  const std::vector<int64_t>& windows() const { return windows_; }

  // Walks the trie from *node along whole blocks of tokens, as far as all pages that the next row
  // sees are there. Adds a reference to each of these, appends the blocks' pages to *to (-1 for
  // those that no later row sees) and advances *node. REQUIRES: *node is a root, *to empty.
  void MatchPrefix(absl::Span<const TokenId> tokens, PrefixNode* node, std::vector<int32_t>* to);
  // The block with the most of these tokens after the node, from the first one on, and all its
  // pages. Returns their number; 0: there is none.
  int64_t MatchPart(const PrefixNode& node, absl::Span<const TokenId> tokens,
                    std::vector<int32_t>* pages) const;
  // Makes held pages with these tokens after `parent`, at most a block, reusable: one of each
  // group, or -1. And held pages with the state after them, if there are any. Returns their node;
  // an equal one registered earlier keeps the pages and the state that it has. MatchPrefix does not
  // find blocks with fewer tokens. After a forgotten prefix nothing is registered.
  PrefixNode Register(const PrefixNode& parent, absl::Span<const TokenId> tokens,
                      absl::Span<const int32_t> pages, absl::Span<const int32_t> state = {});
  // Releases pages from the end of a list by MatchPrefix until the last page has a state. Adds a
  // reference to each page of that state, appends them to *state and moves *node back. `root`: the
  // node of the first page's beginning. REQUIRES: there is one group.
  void CutToState(const PrefixNode& root, std::vector<int32_t>* pages, PrefixNode* node,
                  std::vector<int32_t>* state);
  // Whether others may read the page: it is held more than once, or its content is cached.
  bool IsShared(int32_t page) const {
    return pages_[page].references > 1 || pages_[page].prefix != nullptr;
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
  // A known prefix, by its last block; or a root, with prefixes below it.
  struct Prefix {
    PrefixNode node;
    PrefixKey key;
    Prefix* parent = nullptr;  // nullptr: it is a root
    absl::InlinedVector<Prefix*, 2> children;
    absl::InlinedVector<int32_t, 1> pages;  // of each group; -1: not cached. A root has none.
    std::vector<int32_t> state;             // empty: not cached
  };
  struct Page {
    int32_t references = 0;
    Prefix* prefix = nullptr;  // whose page, or part of the state, it is
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
  // Frees a cached page; of a state, all pages.
  void Evict(int32_t page);
  void Unregister(int32_t page);
  // Its pages that are not held become free.
  void ForgetState(Prefix* prefix);
  // Forgets the prefix, and those before it, if nothing makes it known.
  void Prune(Prefix* prefix);
  Prefix* AddPrefix(const PrefixKey& key);
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
  const std::vector<int64_t> windows_;
  absl::flat_hash_map<PrefixNode, std::unique_ptr<Prefix>> prefixes_;
  absl::flat_hash_map<PrefixKey, Prefix*> by_key_;  // without roots
  int32_t oldest_ = -1;
  int32_t newest_ = -1;
  int64_t cached_ = 0;
  uint64_t next_node_ = 1;
};

}  // namespace dorad::engine
