#include "server/engine/tenant_shares.h"

#include <algorithm>
#include <limits>

#include "server/platform/check.h"

namespace dorad::engine {
namespace {

bool IsFirst(const Sequence* a, const Sequence* b) {
  if (a->priority != b->priority) return a->priority < b->priority;
  if (a->share->served != b->share->served) return a->share->served < b->share->served;
  return a->arrival < b->arrival;
}

}  // namespace

void TenantShares::Enter(Sequence* sequence) {
  auto found = shares_.find(sequence->tenant);
  if (found == shares_.end()) found = shares_.emplace(sequence->tenant, TenantShare()).first;
  TenantShare& share = found->second;
  if (share.sequences == 0) {
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const auto& [tenant, other] : shares_) {
      if (other.sequences > 0) least = std::min(least, other.served);
    }
    if (least < std::numeric_limits<int64_t>::max()) share.served = std::max(share.served, least);
  }
  ++share.sequences;
  sequence->share = &share;
}

void TenantShares::Leave(Sequence* sequence) {
  DORAD_CHECK(--sequence->share->sequences >= 0);
  sequence->share = nullptr;
  const bool all_idle = std::all_of(shares_.begin(), shares_.end(),
                                    [](const auto& entry) { return entry.second.sequences == 0; });
  if (all_idle) shares_.clear();
}

void TenantShares::BoundCredit() {
  if (!several()) return;
  int64_t most = 0;
  for (const auto& [tenant, share] : shares_) most = std::max(most, share.served);
  const int64_t least = most - most_credit_;
  for (auto it = shares_.begin(); it != shares_.end();) {
    TenantShare& share = it->second;
    share.served = std::max(share.served, least);
    // An idle tenant at the lowest counter would return to the same one.
    it = share.sequences == 0 && share.served == least ? shares_.erase(it) : std::next(it);
  }
}

int64_t TenantShares::Contenders(const TenantShare& beside) const {
  return std::count_if(shares_.begin(), shares_.end(), [&](const auto& entry) {
    return entry.second.places > 0 || &entry.second == &beside;
  });
}

void TenantShares::Sort(std::vector<Sequence*>* sequences) const {
  if (several()) std::sort(sequences->begin(), sequences->end(), IsFirst);
}

TenantShares::Turns::Turns(TenantShares* shares) {
  for (auto& [tenant, share] : shares->shares_) {
    if (!share.waiting.empty()) cursors_.push_back({&share, share.waiting.begin()});
  }
}

Sequence* TenantShares::Turns::Next() {
  const auto first =
      std::min_element(cursors_.begin(), cursors_.end(),
                       [](const Cursor& a, const Cursor& b) { return IsFirst(*a.next, *b.next); });
  if (first == cursors_.end()) return nullptr;
  Sequence* const sequence = *first->next++;
  if (first->next == first->share->waiting.end()) cursors_.erase(first);
  return sequence;
}

void TenantShares::Turns::EndTurnsOf(const TenantShare* share) {
  std::erase_if(cursors_, [share](const Cursor& cursor) { return cursor.share == share; });
}

}  // namespace dorad::engine
