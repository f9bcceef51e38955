#include "server/engine/prefix_sharing.h"

#include <algorithm>
#include <utility>

#include "server/platform/check.h"

namespace dorad::engine {
namespace {

// A sequence waits for one that will get its rows, and not behind its own priority.
bool MayAwait(const Sequence& sequence, const Sequence& writer) {
  return !writer.frozen && writer.priority <= sequence.priority;
}

// Whether the leader computes, or has computed, the sequence's prompt under the same version.
bool HasLeader(const Sequence& sequence) {
  const Sequence* leader = sequence.leader;
  return leader != nullptr && leader->state != Sequence::State::kEnded &&
         leader->adapter_at(0) == sequence.adapter_at(0);
}

}  // namespace

// Whether the step under construction computes the other one's last row, and it is the sequence's.
bool PrefixSharing::CanTakeRowOf(const Sequence& other, const Sequence& sequence) const {
  return !is_recurrent_ && other.planned > 0 && other.planned == other.goal() &&
         other.generated() == 0 && other.to_score == 0 && sequence.generated() == 0 &&
         sequence.to_score == 0 && other.sampling == 0 && other.tokens == sequence.tokens;
}

bool PrefixSharing::Waits(Sequence* sequence) const {
  if (HasLeader(*sequence)) {
    const Sequence& leader = *sequence->leader;
    return !leader.prompt_done() && !CanTakeRowOf(leader, *sequence);
  }
  if (!sequence->awaits.has_value()) return false;
  const Sequence* const writer = Writer(*sequence->awaits);
  if (writer != nullptr && MayAwait(*sequence, *writer) &&
      (is_recurrent_ ? writer->landed : writer->computed) < sequence->awaited_end &&
      !CanTakeRowOf(*writer, *sequence)) {
    return true;
  }
  sequence->awaits.reset();
  return false;
}

PrefixSharing::Reused PrefixSharing::Reuse(Sequence* sequence) {
  if (HasLeader(*sequence) && !is_recurrent_) {
    const Sequence& leader = *sequence->leader;
    if (CanTakeRowOf(leader, *sequence)) {
      SharePages(leader, leader.prompt_tokens, sequence);
      return {.row_of = &leader};
    }
    if (leader.state == Sequence::State::kRunning && leader.prompt_done()) {
      // Only the prompt is common to both.
      SharePages(leader, std::min(sequence->reusable(), leader.prompt_tokens - 1), sequence);
      return {};
    }
  }
  if (!sequence->use_prefix_cache) return {};
  const int64_t whole_pages = sequence->reusable() / kKvPageTokens;
  pages_->MatchPrefix(absl::MakeConstSpan(sequence->tokens).subspan(0, whole_pages * kKvPageTokens),
                      &sequence->node, &sequence->pages);
  Reused reused;
  if (is_recurrent_) reused = ReuseState(sequence);
  sequence->registered_pages = static_cast<int64_t>(sequence->pages.size());
  sequence->computed = sequence->registered_pages * kKvPageTokens;
  if (!is_recurrent_) reused = ReuseBeyondCache(sequence);
  reused.looked_up = sequence->has_scored();  // else its rows are needed
  return reused;
}

// Cuts the pages of the cache back to the last state, unless a running sequence will cache one that
// is further on.
PrefixSharing::Reused PrefixSharing::ReuseState(Sequence* sequence) {
  const absl::Span<const TokenId> tokens =
      absl::MakeConstSpan(sequence->tokens).first(std::max<int64_t>(sequence->reusable(), 0));
  const size_t matched = sequence->pages.size() * kKvPageTokens;
  const PrefixKey next(sequence->node,
                       tokens.subspan(std::min(matched, tokens.size()), kKvPageTokens));
  const Sequence* const writer = Writer(next);
  pages_->CutToState(sequence->root, &sequence->pages, &sequence->node, &sequence->recurrent_from);
  const bool is_cut = sequence->pages.size() * kKvPageTokens < matched;
  if (is_cut && static_cast<int64_t>(matched) < sequence->cached_state_end()) {
    sequence->branch = static_cast<int64_t>(matched);
  }
  if (writer == nullptr || !MayAwait(*sequence, *writer)) return {};
  const int64_t end = writer->cached_state_end();
  const bool is_common = end <= std::min<int64_t>(tokens.size(), writer->same_adapter_until(0)) &&
                         std::equal(tokens.begin(), tokens.begin() + end, writer->tokens.begin());
  if (!is_common || writer->landed >= end) return {};
  sequence->awaits = next;
  sequence->awaited_end = end;
  return {.waits = true};
}

// Beyond the whole pages of the cache.
PrefixSharing::Reused PrefixSharing::ReuseBeyondCache(Sequence* sequence) {
  const absl::Span<const TokenId> tokens =
      absl::MakeConstSpan(sequence->tokens).first(std::max<int64_t>(sequence->reusable(), 0));
  const auto begin = static_cast<size_t>(sequence->computed);
  if (begin >= tokens.size()) return {};
  const auto of_page = tokens.subspan(begin, kKvPageTokens);
  const PrefixKey next(sequence->node, of_page);
  const Sequence* const writer = Writer(next);
  if (writer == nullptr) {
    int32_t page = -1;
    const int64_t part = pages_->MatchPart(sequence->node, of_page, &page);
    if (part > 0) CopyLater(page, sequence);
    sequence->computed += part;
    return {};
  }
  if (CanTakeRowOf(*writer, *sequence)) {
    SharePages(*writer, writer->prompt_tokens, sequence);
    return {.row_of = writer};
  }
  const auto end = std::mismatch(tokens.begin() + begin, tokens.end(),
                                 writer->tokens.begin() + begin, writer->tokens.end());
  const int64_t common = std::min<int64_t>(end.first - tokens.begin(),
                                           std::min(writer->goal(), writer->same_adapter_until(0)));
  if (writer->computed < common && MayAwait(*sequence, *writer)) {
    sequence->awaits = next;
    sequence->awaited_end = common;
    return {.waits = true};
  }
  SharePages(*writer, std::min(common, writer->computed), sequence);
  return {};
}

void PrefixSharing::SharePages(const Sequence& from, int64_t end, Sequence* to) {
  const auto held = static_cast<int64_t>(to->pages.size());
  const int64_t whole = end / kKvPageTokens;
  if (end <= held * kKvPageTokens) return;
  pages_->Share(absl::MakeConstSpan(from.pages).subspan(held, whole - held), &to->pages);
  to->computed = end;
  if (end % kKvPageTokens == 0) return;
  // Its last page may have to be copied yet. With its last row it is copied later, after that.
  const bool awaits_copy =
      from.copy_from >= 0 && end <= from.computed && whole == from.computed / kKvPageTokens;
  CopyLater(awaits_copy ? from.copy_from : from.pages[whole], to);
}

void PrefixSharing::CopyLater(int32_t page, Sequence* to) {
  pages_->Acquire(page);
  to->copy_from = page;
}

void PrefixSharing::Publish(Sequence* sequence) {
  Withdraw(sequence);
  const int64_t begin = sequence->registered_pages * kKvPageTokens;
  const int64_t count = std::min(kKvPageTokens, sequence->prompt_tokens - 1 - begin);
  if (!sequence->use_prefix_cache || count <= 0) return;
  sequence->writes.emplace(sequence->node,
                           absl::MakeConstSpan(sequence->tokens).subspan(begin, count));
  writers_[*sequence->writes].push_back(sequence);
}

void PrefixSharing::Withdraw(Sequence* sequence) {
  if (!sequence->writes.has_value()) return;
  const auto found = writers_.find(*sequence->writes);
  DORAD_CHECK(found != writers_.end());
  auto& writers = found->second;
  writers.erase(std::find(writers.begin(), writers.end(), sequence));
  if (writers.empty()) writers_.erase(found);
  sequence->writes.reset();
}

const Sequence* PrefixSharing::Writer(const PrefixKey& next) const {
  const auto found = writers_.find(next);
  return found == writers_.end() ? nullptr : found->second.front();
}

void PrefixSharing::Computed(const Chunk& chunk) {
  Sequence& s = *chunk.sequence;
  // After a preemption the pages are free.
  if (s.state != Sequence::State::kRunning || !s.use_prefix_cache) return;
  if (chunk.count > 0) s.landed = chunk.end();
  // Pages of several versions are no prefix of another sequence.
  const int64_t end = std::min(chunk.end(), s.same_adapter_until(0));
  const int64_t last = (s.prompt_tokens - 1) / kKvPageTokens;  // the page that others copy
  const bool writes = s.registered_pages < last;
  while ((s.registered_pages + 1) * kKvPageTokens <= end) {
    if (s.registered_pages == last) Publish(&s);
    const absl::Span<const TokenId> tokens =
        absl::MakeConstSpan(s.tokens).subspan(s.registered_pages * kKvPageTokens, kKvPageTokens);
    const bool is_last = (s.registered_pages + 1) * kKvPageTokens == chunk.end();
    s.node = pages_->Register(
        s.node, tokens, s.pages[s.registered_pages],
        is_last ? absl::MakeConstSpan(chunk.cached_state) : absl::Span<const int32_t>());
    ++s.registered_pages;
  }
  if (writes && s.registered_pages <= last) Publish(&s);
}

void PrefixSharing::Landed(const Chunk& chunk) {
  if (chunk.copy_from >= 0) pages_->Release(chunk.copy_from);
  for (const std::vector<int32_t>* pages : {&chunk.state_from, &chunk.cached_state}) {
    for (const int32_t page : *pages) pages_->Release(page);
  }
}

void PrefixSharing::Ended(const Sequence& sequence) {
  const int64_t begin = sequence.registered_pages * kKvPageTokens;
  const int64_t end = std::min(sequence.landed, sequence.same_adapter_until(0));
  if (is_recurrent_ || !sequence.use_prefix_cache || begin >= end) return;
  pages_->Register(sequence.node, absl::MakeConstSpan(sequence.tokens).subspan(begin, end - begin),
                   sequence.pages[sequence.registered_pages]);
}

void PrefixSharing::Rewind(Sequence* sequence) {
  Withdraw(sequence);
  const int32_t copied = std::exchange(sequence->copy_from, -1);
  if (copied >= 0) pages_->Release(copied);
  pages_->Release(&sequence->pages);
  pages_->Release(&sequence->recurrent);
  pages_->Release(&sequence->recurrent_from);
  sequence->computed = sequence->landed = sequence->branch = 0;
  sequence->registered_pages = 0;
  sequence->node = sequence->root;
}

}  // namespace dorad::engine
