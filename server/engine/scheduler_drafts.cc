// Drafts in a step, and what follows them.
#include <algorithm>
#include <utility>

#include "server/engine/scheduler.h"

namespace dorad::engine {

absl::Span<const TokenId> Scheduler::DraftOf(const Sequence& sequence) const {
  // The state of a recurrence after a wrong token has no way back. Behind a draft a sequence goes
  // on as if there were none: its row is needed only if the draft is wrong.
  const bool may = options_.state_pages == 0 && sequence.generated() > 0 && !sequence.verifies;
  return may ? absl::MakeConstSpan(sequence.draft)
                   .subspan(std::min<size_t>(sequence.sampling, sequence.draft.size()))
             : absl::Span<const TokenId>();
}

void Scheduler::ContinueDrafts(std::vector<Sequence*> sequences, Plan* plan) {
  drafts_wait_ = false;
  const auto has_waited = [this](const Sequence* s) { return s->arrival > last_drafted_; };
  std::sort(sequences.begin(), sequences.end(), [&](const Sequence* a, const Sequence* b) {
    return std::pair(!has_waited(a), a->arrival) < std::pair(!has_waited(b), b->arrival);
  });
  for (Sequence* s : sequences) {
    if (plan->budget == 0) {
      drafts_wait_ = true;
      return;
    }
    if (s->state != Sequence::State::kRunning) continue;  // preempted
    const size_t chunks = plan->chunks.size();
    Continue(s, plan);
    if (plan->chunks.size() <= chunks) continue;
    AddDraft(&plan->chunks.back(), plan);
    last_drafted_ = s->arrival;
  }
}

void Scheduler::AddDraft(Chunk* chunk, Plan* plan) {
  Sequence& s = *chunk->sequence;
  const absl::Span<const TokenId> draft = DraftOf(s);
  int64_t count = std::min(static_cast<int64_t>(draft.size()), plan->budget);
  drafts_wait_ = drafts_wait_ || count < static_cast<int64_t>(draft.size());
  // No row for the last possible token.
  count = std::min(count, s.most_tokens - 1 - chunk->end());
  const int64_t end = chunk->end() + count;
  // One block of every running sequence stays in reserve.
  const bool has_pages =
      pages_->available() >= Missing(s, end) + reserve() && AllocatePages(&s, end);
  if (!has_pages) count = std::min(count, CoveredEnd(s) - chunk->end());
  if (count <= 0) return;
  chunk->draft.assign(draft.begin(), draft.begin() + count);
  chunk->draft_source = s.draft_source;
  chunk->count += count;
  plan->budget -= count;
  s.share->served += count;
}

bool Scheduler::Verified(const Chunk& chunk) {
  Sequence& s = *chunk.sequence;
  const bool is_right = !chunk.draft.empty() && chunk.count > 1;
  if (!is_right) return false;
  if (s.state == Sequence::State::kRunning) s.computed = chunk.end();
  if (s.in_flight == 1) return false;
  --s.sampling;
  return true;
}

}  // namespace dorad::engine
