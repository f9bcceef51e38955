// The running sequences whose next page of a prefix is not reusable yet: others with the same
// tokens wait for it, and share the pages, instead of computing them again. Owned by Scheduler.
// Confined to the engine thread.
#pragma once

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "server/engine/kv_pages.h"
#include "server/engine/sequence.h"

namespace dorad::engine {

class PrefixWriters {
 public:
  // The sequence computes, or has computed, the tokens after its node (the last page of its prompt
  // without the last token, if those are fewer). Replaces its earlier entry.
  void Publish(Sequence* sequence);
  void Withdraw(Sequence* sequence);
  // nullptr: there is none.
  const Sequence* Find(const PrefixKey& next) const;

 private:
  absl::flat_hash_map<PrefixKey, absl::InlinedVector<const Sequence*, 1>> writers_;
};

}  // namespace dorad::engine
