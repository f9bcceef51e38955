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
    // Only the prompt is common to both.
    if (leader.state == Sequence::State::kRunning && leader.prompt_done() &&
        SharePages(leader, std::min(sequence->reusable(), leader.prompt_tokens - 1), sequence)) {
      return {};
    }
  }
  if (!sequence->use_prefix_cache) return {};
  const int64_t whole_blocks = sequence->reusable() / kKvPageTokens;
  pages_->MatchPrefix(
      absl::MakeConstSpan(sequence->tokens).subspan(0, whole_blocks * kKvPageTokens),
      &sequence->node, &sequence->pages);
  Reused reused;
  if (is_recurrent_) reused = ReuseState(sequence);
  sequence->registered_blocks = BlocksIn(*sequence);
  sequence->computed = sequence->registered_blocks * kKvPageTokens;
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
    std::vector<int32_t> pages;
    const int64_t part = pages_->MatchPart(sequence->node, of_page, &pages);
    CopyLater(pages, sequence);
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

bool PrefixSharing::SharePages(const Sequence& from, int64_t end, Sequence* to) {
  const int64_t held = BlocksIn(*to);
  const int64_t whole = end / kKvPageTokens;
  if (end <= held * kKvPageTokens) return true;
  const int64_t groups = pages_->groups();
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t first = std::max(held, FirstBlockSeen(pages_->windows()[group], end));
    if (first * kKvPageTokens < end && from.pages[first * groups + group] < 0) return false;
  }
  pages_->ReleaseBehind(end, held, &to->pages);
  for (int64_t block = held; block < whole; ++block) {
    for (int64_t group = 0; group < groups; ++group) {
      const bool is_seen = block >= FirstBlockSeen(pages_->windows()[group], end);
      to->pages.push_back(is_seen ? from.pages[block * groups + group] : -1);
      if (is_seen) pages_->Acquire(to->pages.back());
    }
  }
  to->computed = end;
  if (end % kKvPageTokens == 0) return true;
  // Its last block may have to be copied yet. With its last row it is copied later, after that.
  const bool awaits_copy =
      !from.copy_from.empty() && end <= from.computed && whole == from.computed / kKvPageTokens;
  CopyLater(awaits_copy ? absl::MakeConstSpan(from.copy_from) : BlockOf(from, whole), to);
  return true;
}

void PrefixSharing::CopyLater(absl::Span<const int32_t> pages, Sequence* to) {
  pages_->Share(pages, &to->copy_from);
}

void PrefixSharing::Publish(Sequence* sequence) {
  Withdraw(sequence);
  const int64_t begin = sequence->registered_blocks * kKvPageTokens;
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
  // A row behind a draft lands after the draft's.
  if (chunk.count > 0) s.landed = std::max(s.landed, chunk.end());
  // Pages of several versions are no prefix of another sequence.
  const int64_t end = std::min(chunk.end(), s.same_adapter_until(0));
  const int64_t last = (s.prompt_tokens - 1) / kKvPageTokens;  // the page that others copy
  const bool writes = s.registered_blocks < last;
  while ((s.registered_blocks + 1) * kKvPageTokens <= end) {
    if (s.registered_blocks == last) Publish(&s);
    const absl::Span<const TokenId> tokens =
        absl::MakeConstSpan(s.tokens).subspan(s.registered_blocks * kKvPageTokens, kKvPageTokens);
    const bool is_last = (s.registered_blocks + 1) * kKvPageTokens == chunk.end();
    s.node = pages_->Register(
        s.node, tokens, BlockOf(s, s.registered_blocks),
        is_last ? absl::MakeConstSpan(chunk.cached_state) : absl::Span<const int32_t>());
    ++s.registered_blocks;
  }
  if (writes && s.registered_blocks <= last) Publish(&s);
}

void PrefixSharing::Landed(const Chunk& chunk) {
  for (const auto* pages : {&chunk.copy_from, &chunk.state_from, &chunk.cached_state}) {
    for (const int32_t page : *pages) pages_->Release(page);
  }
}

void PrefixSharing::Ended(const Sequence& sequence) {
  const int64_t begin = sequence.registered_blocks * kKvPageTokens;
  const int64_t end = std::min(sequence.landed, sequence.same_adapter_until(0));
  if (is_recurrent_ || !sequence.use_prefix_cache || begin >= end) return;
  pages_->Register(sequence.node, absl::MakeConstSpan(sequence.tokens).subspan(begin, end - begin),
                   BlockOf(sequence, sequence.registered_blocks));
}

void PrefixSharing::DropCopy(Sequence* sequence) {
  if (sequence->copy_from.empty()) return;
  pages_->Release(&sequence->copy_from);
  sequence->computed = sequence->computed / kKvPageTokens * kKvPageTokens;
}

void PrefixSharing::ReleaseBehind(Sequence* sequence) {
  const int64_t registered = sequence->registered_blocks;
  const bool registers = sequence->use_prefix_cache &&
                         (registered + 1) * kKvPageTokens <= sequence->same_adapter_until(0);
  pages_->ReleaseBehind(sequence->computed, registers ? registered : BlocksIn(*sequence),
                        &sequence->pages);
}

void PrefixSharing::Rewind(Sequence* sequence) {
  Withdraw(sequence);
  pages_->Release(&sequence->copy_from);
  pages_->Release(&sequence->pages);
  pages_->Release(&sequence->recurrent);
  pages_->Release(&sequence->recurrent_from);
  sequence->computed = sequence->landed = sequence->branch = 0;
  sequence->registered_blocks = 0;
  sequence->node = sequence->root;
}

}  // namespace dorad::engine
