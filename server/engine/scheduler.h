// Chooses the rows of the next step: decodes first, then prefill chunks, under a token budget, with
// admission by KV pages and preemption by recomputation. Tenants of equal priority take turns
// (tenant_shares.h), and sequences share what they have in common (prefix_sharing.h). It may
// schedule a step before the last one has finished: the decodes then follow tokens that are not
// known yet. Freed pages are reused at once, since steps are computed in order. Drafts are in
// scheduler_drafts.cc. Pure logic: no torch, no clock, no I/O. Confined to the engine thread.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "server/engine/kv_needs.h"
#include "server/engine/kv_pages.h"
#include "server/engine/prefix_sharing.h"
#include "server/engine/sequence.h"
#include "server/engine/tenant_shares.h"

namespace dorad::engine {

class Scheduler {
 public:
  struct Options {
    int64_t max_step_tokens = 512;
    int32_t max_running = 256;
    // False: the sequence gets no rows now and keeps its place and its pages; others may pass it.
    // Null: always true.
    std::function<bool(Sequence*)> may_run;
    // Rows that one step must be able to compute beside one of every other running sequence: those
    // of a bidirectional image; 0: none.
    int64_t block_rows = 0;
    int64_t state_pages = 0;  // of the state of a recurrence; 0: the model has none
  };

  // pages is borrowed.
  Scheduler(Options options, KvPages* pages);

  // Queues a sequence. REQUIRES: the pages that it needs at most (KvNeeds) are not more than all.
  void Add(Sequence* sequence);
  // Removes a sequence from any state and frees its pages.
  void Remove(Sequence* sequence);
  // Frees the sequence's pages and queues it again, to be recomputed under one version with the
  // given prefix root. REQUIRES: it has not ended and none of its chunks is in flight.
  void Restart(Sequence* sequence, const adapter::LoadedAdapter* adapter, const PrefixNode& root);
  // A frozen sequence gets no rows. It keeps its place, and its pages until others need them.
  void SetFrozen(Sequence* sequence, bool frozen);

  // Frees the pages of all sequences; they are recomputed later. REQUIRES: no step is in flight.
  void PreemptAll();

  // Chooses the chunks of the next step, counts them as in flight and allocates their pages. May
  // preempt. Empty when no sequence can run before a step finishes. REQUIRES: at most one step is
  // in flight.
  std::vector<Chunk> Schedule();
  // A chunk with a draft has been computed and cut to its right part; its sequence has not ended.
  // Returns whether the row behind it, in the step in flight, is superfluous: the draft has brought
  // that row's token, and the row must not sample.
  bool Verified(const Chunk& chunk);
  // The chunk's keys and values are in its pages: registers full pages. Of a draft, the chunk has
  // the right part only.
  void Computed(const Chunk& chunk);
  // The chunk's step has finished or failed.
  void Landed(const Chunk& chunk);

  int64_t running() const { return static_cast<int64_t>(running_.size()); }
  int64_t waiting() const { return waiting_; }
  const SequenceLine& running_sequences() const { return running_; }
  int64_t frozen() const { return frozen_running_ + frozen_waiting_; }
  uint64_t preemptions() const { return preemptions_; }
  // Whether the next step should wait for the one in flight: half of the sequences verify a draft
  // there, and could have no more than one row in it.
  bool awaits_drafts() const { return 2 * verifying_ >= running() - frozen_running_ && verifying_; }
  // Whether the last step had not the rows for all drafts.
  bool drafts_wait() const { return drafts_wait_; }
  // Pages that the next steps of the running sequences may need: of each a block.
  int64_t reserve() const { return running() * pages_->groups(); }
  // Pages that the last Schedule lacked for the next sequence.
  int64_t shortage() const { return shortage_; }

 private:
  // The step under construction.
  struct Plan {
    std::vector<Chunk> chunks;
    int64_t budget = 0;
    bool preempted = false;
  };

  bool CanContinue(Sequence* sequence) const;
  // The sequence's draft after the tokens that the step in flight brings.
  absl::Span<const TokenId> DraftOf(const Sequence& sequence) const;
  // Sequences with drafts take turns when a step has not the rows for all: a long draft for a few
  // costs less than a token or two for each, because a step reads the keys and values of each once.
  void ContinueDrafts(std::vector<Sequence*> sequences, Plan* plan);
  // Adds what rows and free pages are left for.
  void AddDraft(Chunk* chunk, Plan* plan);
  // 0: the next rows, of an image, do not fit.
  int64_t ChunkSize(const Sequence& sequence, int64_t budget) const;
  // Pages for the state after the next chunk, if those that the sequence has are not its own.
  int64_t StatePages(const Sequence& sequence) const;
  // The blocks [begin, end) of a group that lack a page, of those that the sequence needs at once
  // for its rows up to `end_row`.
  struct Lack {
    int64_t begin = 0;
    int64_t end = 0;
  };
  Lack LackOf(const Sequence& sequence, int64_t group, int64_t end_row) const;
  // The pages that it lacks, without those of its state.
  int64_t Missing(const Sequence& sequence, int64_t end_row) const;
  // Gives the sequence the pages that it lacks for its rows up to `end_row` and for its state.
  bool AllocatePages(Sequence* sequence, int64_t end_row);
  // The positions whose blocks have pages of all groups.
  int64_t CoveredEnd(const Sequence& sequence) const;
  Chunk* Append(Sequence* sequence, Plan* plan);
  // The running sequence to preempt first, among those for which may(sequence) holds: of the lowest
  // priority, of the tenant that was served most, the last to arrive. nullptr: none.
  template <typename May>
  Sequence* LastOf(May may) const;
  void Continue(Sequence* sequence, Plan* plan);
  void AdmitWaiting(Plan* plan);
  enum class Admitted { kYes, kWaits, kNoPages, kNoRows };
  Admitted Admit(Sequence* sequence, Plan* plan);
  // Both return a sequence of a tenant that was served more and has more than its equal part of the
  // places or pages, for a tenant that has less; nullptr: there is none.
  Sequence* PlaceFor(const Sequence& wanting, int64_t places) const;
  Sequence* PagesFor(const Sequence& wanting) const;
  // Preempts the victim, if there is one, and more for pages.
  Admitted AdmitInsteadOf(Sequence* victim, Sequence* sequence, Plan* plan);
  void Preempt(Sequence* sequence, Plan* plan);
  bool PreemptFrozen(Plan* plan);
  void Put(Sequence* sequence, SequenceLine* line);
  bool Take(Sequence* sequence, SequenceLine* line);

  const Options options_;
  KvPages* const pages_;
  const KvNeeds needs_;
  PrefixSharing sharing_;
  TenantShares shares_;
  int64_t waiting_ = 0;  // in the lines of shares_
  SequenceLine running_;
  int64_t frozen_running_ = 0;
  int64_t frozen_waiting_ = 0;
  uint64_t preemptions_ = 0;
  int64_t shortage_ = 0;
  int64_t verifying_ = 0;  // chunks with drafts in flight
  bool drafts_wait_ = false;
  uint64_t last_drafted_ = 0;  // arrival of the last sequence that had its turn
};

}  // namespace dorad::engine
