// The keys and values that a sequence takes over instead of computing them: whole pages and parts
// of pages from the prefix cache, pages of a running sequence with the same beginning, and its last
// row if both have the same prompt. A sequence waits for a running one that computes tokens which
// both need. With a recurrence, a sequence takes over whole pages up to a cached state and no more.
// Owned by Scheduler. Confined to the engine thread.
#pragma once

#include <cstdint>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "server/engine/kv_pages.h"
#include "server/engine/sequence.h"

namespace dorad::engine {

class PrefixSharing {
 public:
  // pages is borrowed. is_recurrent: the model has a recurrence.
  PrefixSharing(KvPages* pages, bool is_recurrent) : pages_(pages), is_recurrent_(is_recurrent) {}

  // Whether another sequence computes tokens that this one needs.
  bool Waits(Sequence* sequence) const;

  // What a sequence need not compute.
  struct Reused {
    bool looked_up = false;            // in the prefix cache
    bool waits = false;                // for another sequence; the others do not count
    const Sequence* row_of = nullptr;  // as Chunk's
  };
  // Gives the sequence the pages of what it need not compute. REQUIRES: it is rewound.
  Reused Reuse(Sequence* sequence);
  // The sequence computes, or has computed, the tokens after its node (the last page of its prompt
  // without the last token, if those are fewer): others may wait for it from now on.
  void Publish(Sequence* sequence);
  // The chunk's keys and values are in its pages: registers full pages in the prefix cache.
  void Computed(const Chunk& chunk);
  // The chunk's step has finished or failed: the pages that it held are free again.
  void Landed(const Chunk& chunk);
  // A running sequence ends: registers its last page, which is not full.
  void Ended(const Sequence& sequence);
  // Computes the tokens that its next chunk would copy.
  void DropCopy(Sequence* sequence);
  // Gives back the pages that no later row of the sequence sees, except those that are not in the
  // prefix cache yet.
  void ReleaseBehind(Sequence* sequence);
  // Frees the sequence's pages: it computes from its first position again.
  void Rewind(Sequence* sequence);

 private:
  void Withdraw(Sequence* sequence);
  // A running sequence that computes these tokens; nullptr: there is none.
  const Sequence* Writer(const PrefixKey& next) const;
  Reused ReuseBeyondCache(Sequence* sequence);
  Reused ReuseState(Sequence* sequence);
  // Whether a step computes the sequence's last row for another one.
  bool CanTakeRowOf(const Sequence& other, const Sequence& sequence) const;
  // Shares the pages of `from`, after those that *to has, up to the position `end`. False: `from`
  // has given back pages that *to would need, and nothing is shared.
  bool SharePages(const Sequence& from, int64_t end, Sequence* to);
  // The sequence's next chunk begins with a copy of these pages, one of each group.
  void CopyLater(absl::Span<const int32_t> pages, Sequence* to);
  absl::Span<const int32_t> BlockOf(const Sequence& sequence, int64_t block) const {
    return absl::MakeConstSpan(sequence.pages).subspan(block * pages_->groups(), pages_->groups());
  }
  int64_t BlocksIn(const Sequence& sequence) const {
    return static_cast<int64_t>(sequence.pages.size()) / pages_->groups();
  }

  KvPages* const pages_;
  const bool is_recurrent_;
  // The running sequences whose next page is not in the prefix cache yet, by that page's tokens.
  absl::flat_hash_map<PrefixKey, absl::InlinedVector<const Sequence*, 1>> writers_;
};

}  // namespace dorad::engine
