// Which rows the next step computes: decodes first, then prefill chunks, under a token budget, with
// admission by KV pages and preemption by recomputation. A step may be scheduled before the last
// one has finished: its decodes then follow tokens that nobody has seen yet. Pages that a sequence
// gives back go to others at once, since steps are computed in order. Pure logic: no torch, no
// clock, no I/O. Confined to the engine thread.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <vector>

#include "server/engine/kv_pages.h"
#include "server/engine/sequence.h"

namespace dorad::engine {

class Scheduler {
 public:
  struct Options {
    int64_t max_step_tokens = 512;
    int32_t max_running = 256;
    // Whether a sequence may get rows now. If not it keeps its place and its pages, and others go
    // first. Null: always.
    std::function<bool(Sequence*)> may_run;
  };

  // pages is borrowed.
  Scheduler(Options options, KvPages* pages);

  // Puts a sequence in line. REQUIRES: its goal fits into all pages together.
  void Add(Sequence* sequence);
  // Takes a sequence out of wherever it is and gives its pages back.
  void Remove(Sequence* sequence);
  // Gives the pages of a sequence back and puts it in line again, to be computed anew under one
  // version with the root of its prefixes. REQUIRES: it has not ended and nothing of it is in
  // flight.
  void Restart(Sequence* sequence, const adapter::LoadedAdapter* adapter, const PrefixNode& root);
  // A frozen sequence keeps its place and its pages (until others need them) and gets no rows.
  void SetFrozen(Sequence* sequence, bool frozen);

  // Takes the pages of all sequences, which are to be computed again. REQUIRES: no step is in
  // flight.
  void PreemptAll();

  // Chooses the next step's chunks and counts them as in flight; every chunk's pages are allocated.
  // May preempt. Empty when nothing can run before a step finishes. REQUIRES: at most one step is
  // in flight.
  std::vector<Chunk> Schedule();
  // A chunk of a sequence that has not ended is in its pages: registers full ones.
  void Computed(const Chunk& chunk);
  // A chunk is in flight no more: its step has finished or failed.
  void Landed(const Chunk& chunk);

  int64_t running() const { return static_cast<int64_t>(running_.size()); }
  int64_t waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t frozen() const { return frozen_running_ + frozen_waiting_; }
  uint64_t preemptions() const { return preemptions_; }
  // Pages that the last Schedule lacked to admit or to go on with the next sequence.
  int64_t shortage() const { return shortage_; }

 private:
  struct Earlier {
    bool operator()(const Sequence* a, const Sequence* b) const {
      if (a->priority != b->priority) return a->priority < b->priority;
      return a->arrival < b->arrival;
    }
  };
  using Line = std::set<Sequence*, Earlier>;

  // The step under construction.
  struct Plan {
    std::vector<Chunk> chunks;
    int64_t budget = 0;
    bool preempted = false;
  };

  bool CanContinue(Sequence* sequence) const;
  static bool HasLeader(const Sequence& sequence);
  static bool WaitsForLeader(const Sequence& sequence);
  static int64_t ChunkSize(const Sequence& sequence, int64_t budget);
  static void Append(Sequence* sequence, Plan* plan);
  void Continue(Sequence* sequence, Plan* plan);
  void AdmitWaiting(Plan* plan);
  bool Admit(Sequence* sequence, Plan* plan);
  // Whether the prefix cache was asked.
  bool ReusePrefix(Sequence* sequence);
  void Preempt(Sequence* sequence, Plan* plan);
  bool PreemptFrozen(Plan* plan);
  void Put(Sequence* sequence, Line* line);
  bool Take(Sequence* sequence, Line* line);
  void Rewind(Sequence* sequence);

  const Options options_;
  KvPages* const pages_;
  Line waiting_;
  Line running_;
  int64_t frozen_running_ = 0;
  int64_t frozen_waiting_ = 0;
  uint64_t preemptions_ = 0;
  int64_t shortage_ = 0;
};

}  // namespace dorad::engine
