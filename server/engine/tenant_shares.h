// Turns between the tenants that have sequences in the scheduler.
//
// Every tenant has a counter of the tokens that it was served. Among sequences of equal priority
// the tenant with the lowest counter is next (a virtual token counter for each tenant, a form of
// start-time fair queueing). A tenant gains nothing by being idle: when it comes back, its counter
// is at least the lowest one of the others, and no counter falls behind the highest one by more
// than kMostCredit steps' tokens. The sequences of one tenant keep their order. Owned by Scheduler.
// Confined to the engine thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "server/engine/sequence.h"

namespace dorad::engine {

// Lower priority values first, then arrival.
struct Earlier {
  bool operator()(const Sequence* a, const Sequence* b) const {
    if (a->priority != b->priority) return a->priority < b->priority;
    return a->arrival < b->arrival;
  }
};
using SequenceLine = std::set<Sequence*, Earlier>;

struct TenantShare {
  int64_t served = 0;     // tokens
  int64_t sequences = 0;  // in the scheduler
  int64_t places = 0;     // of sequences that run and are not frozen
  SequenceLine waiting;
};

class TenantShares {
 public:
  static constexpr int64_t kMostCredit = 64;

  explicit TenantShares(int64_t step_tokens) : most_credit_(kMostCredit * step_tokens) {}

  // Sets sequence->share.
  void Enter(Sequence* sequence);
  // The share may end with its last sequence.
  void Leave(Sequence* sequence);
  // Applies the bound of kMostCredit.
  void BoundCredit();

  bool several() const { return shares_.size() > 1; }
  // Tenants with places, and `beside`.
  int64_t Contenders(const TenantShare& beside) const;
  // Sorts by priority, then served tokens, then arrival.
  void Sort(std::vector<Sequence*>* sequences) const;

  // The waiting sequences by turns. Sequences may leave and enter their line meanwhile, except the
  // next one.
  class Turns {
   public:
    explicit Turns(TenantShares* shares);
    // nullptr: no more.
    Sequence* Next();
    // Passes over the later sequences of the tenant.
    void EndTurnsOf(const TenantShare* share);

   private:
    struct Cursor {
      TenantShare* share;
      SequenceLine::iterator next;
    };
    std::vector<Cursor> cursors_;
  };

 private:
  const int64_t most_credit_;
  std::map<std::string, TenantShare, std::less<>> shares_;  // by tenant
};

}  // namespace dorad::engine
