#include "server/engine/scheduler.h"

#include <algorithm>
#include <map>
#include <utility>

#include "server/platform/check.h"

namespace dorad::engine {
namespace {

// So few running sequences that the first of them with more than one row to compute always has room
// for its block.
Scheduler::Options WithPlaces(Scheduler::Options options) {
  DORAD_CHECK(options.block_rows <= options.max_step_tokens);
  const int64_t places = options.max_step_tokens - std::max<int64_t>(options.block_rows, 1) + 1;
  options.max_running = static_cast<int32_t>(std::min<int64_t>(options.max_running, places));
  return options;
}

}  // namespace

Scheduler::Scheduler(Options options, KvPages* pages)
    : options_(WithPlaces(std::move(options))),
      pages_(pages),
      needs_{pages->windows(), options_.state_pages, options_.max_step_tokens},
      sharing_(pages, options_.state_pages > 0),
      shares_(options_.max_step_tokens) {
  DORAD_CHECK(options_.max_step_tokens > 0 && options_.max_running > 0);
  DORAD_CHECK(options_.state_pages == 0 || needs_.windows == std::vector<int64_t>{0});
}

void Scheduler::Add(Sequence* sequence) {
  DORAD_CHECK(sequence->state == Sequence::State::kWaiting);
  DORAD_CHECK(needs_.PagesFor(sequence->goal()) <= pages_->total());
  sequence->node = sequence->root;
  shares_.Enter(sequence);
  Put(sequence, &sequence->share->waiting);
}

void Scheduler::Remove(Sequence* sequence) {
  if (sequence->share != nullptr) {
    Take(sequence, &sequence->share->waiting);
    Take(sequence, &running_);
    shares_.Leave(sequence);
  }
  if (sequence->state == Sequence::State::kRunning) sharing_.Ended(*sequence);
  sharing_.Rewind(sequence);
  sequence->state = Sequence::State::kEnded;
}

void Scheduler::Restart(Sequence* sequence, const adapter::LoadedAdapter* adapter,
                        const PrefixNode& root) {
  DORAD_CHECK(sequence->state != Sequence::State::kEnded && sequence->in_flight == 0);
  sequence->kv_spans.assign(1, {0, adapter});
  sequence->root = root;
  sharing_.Rewind(sequence);
  if (!Take(sequence, &running_)) return;
  sequence->state = Sequence::State::kWaiting;
  Put(sequence, &sequence->share->waiting);
}

void Scheduler::SetFrozen(Sequence* sequence, bool frozen) {
  SequenceLine* const waiting = sequence->share == nullptr ? nullptr : &sequence->share->waiting;
  const bool is_running = Take(sequence, &running_);
  const bool is_waiting = waiting != nullptr && Take(sequence, waiting);
  sequence->frozen = frozen;
  if (is_running) Put(sequence, &running_);
  if (is_waiting) Put(sequence, waiting);
}

void Scheduler::Put(Sequence* sequence, SequenceLine* line) {
  DORAD_CHECK(line->insert(sequence).second);
  const bool runs = line == &running_;
  (runs ? frozen_running_ : frozen_waiting_) += sequence->frozen ? 1 : 0;
  sequence->share->places += runs && !sequence->frozen ? 1 : 0;
  waiting_ += runs ? 0 : 1;
}

bool Scheduler::Take(Sequence* sequence, SequenceLine* line) {
  if (line->erase(sequence) == 0) return false;
  const bool runs = line == &running_;
  (runs ? frozen_running_ : frozen_waiting_) -= sequence->frozen ? 1 : 0;
  sequence->share->places -= runs && !sequence->frozen ? 1 : 0;
  waiting_ -= runs ? 0 : 1;
  return true;
}

bool Scheduler::CanContinue(Sequence* sequence) const {
  return sequence->state == Sequence::State::kRunning && !sequence->frozen &&
         (!options_.may_run || options_.may_run(sequence));
}

std::vector<Chunk> Scheduler::Schedule() {
  Plan plan;
  plan.budget = options_.max_step_tokens;
  shortage_ = 0;
  shares_.BoundCredit();
  // Preemption takes sequences from running_, so walk over a copy.
  std::vector<Sequence*> candidates(running_.begin(), running_.end());
  shares_.Sort(&candidates);
  std::vector<Sequence*> with_drafts;
  for (Sequence* s : candidates) {
    if (s->pending() != 1 || !CanContinue(s)) continue;
    if (!DraftOf(*s).empty()) {
      with_drafts.push_back(s);
    } else {
      Continue(s, &plan);
    }
  }
  // Drafts get what prompts leave, and a row for each sequence in any case.
  const auto reserved = std::min(static_cast<int64_t>(with_drafts.size()), plan.budget);
  plan.budget -= reserved;
  for (Sequence* s : candidates) {
    if (s->pending() > 1 && CanContinue(s)) Continue(s, &plan);
  }
  if (!plan.preempted) AdmitWaiting(&plan);
  plan.budget += reserved;
  ContinueDrafts(std::move(with_drafts), &plan);
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    Chunk& chunk = plan.chunks[i];
    Sequence& s = *chunk.sequence;
    s.computed = chunk.end() - static_cast<int64_t>(chunk.draft.size());
    s.planned = 0;
    chunk.state_from = std::exchange(s.recurrent_from, {});
    if (options_.state_pages > 0 && s.caches_state_at(chunk.end())) {
      pages_->Share(s.recurrent, &chunk.cached_state);
    }
    if (!chunk.copy_from.empty()) s.copy_from.clear();  // the chunk holds them now
    s.sampling += chunk.samples ? 1 : 0;
    s.verifies = s.verifies || !chunk.draft.empty();
    verifying_ += chunk.draft.empty() ? 0 : 1;
    s.chunk_index = static_cast<int32_t>(i);
    ++s.in_flight;
  }
  return std::move(plan.chunks);
}

void Scheduler::Computed(const Chunk& chunk) { sharing_.Computed(chunk); }

void Scheduler::AdmitWaiting(Plan* plan) {
  const int64_t max_running = options_.max_running;
  const auto no_place = [&] {
    return running() - frozen_running_ >= max_running ||
           static_cast<int64_t>(plan->chunks.size()) >= max_running;
  };
  TenantShares::Turns turns(&shares_);
  while (Sequence* const s = turns.Next()) {
    const bool full = no_place();
    if (full ? !shares_.several() : plan->budget == 0) break;
    if (s->frozen) continue;
    if (sharing_.Waits(s)) continue;
    Sequence* const victim = full ? PlaceFor(*s, max_running) : nullptr;
    if (full && victim == nullptr) {
      turns.EndTurnsOf(s->share);
      continue;
    }
    if (options_.may_run && !options_.may_run(s)) continue;
    // A step from before its preemption may still bring a token.
    if (s->in_flight > 0) {
      turns.EndTurnsOf(s->share);
      continue;
    }
    const Admitted admitted = AdmitInsteadOf(victim, s, plan);
    if (admitted != Admitted::kYes) s->DropPins();
    if (admitted == Admitted::kNoPages || admitted == Admitted::kNoRows) break;
  }
}

// Preempts the frozen sequence with the lowest priority.
bool Scheduler::PreemptFrozen(Plan* plan) {
  if (frozen_running_ == 0) return false;
  const auto last =
      std::find_if(running_.rbegin(), running_.rend(), [](const Sequence* s) { return s->frozen; });
  Preempt(*last, plan);
  return true;
}

template <typename May>
Sequence* Scheduler::LastOf(May may) const {
  Sequence* last = nullptr;
  for (auto it = running_.rbegin(); it != running_.rend(); ++it) {
    Sequence* const s = *it;
    if (last != nullptr && s->priority != last->priority) break;
    if (last != nullptr && s->share->served <= last->share->served) continue;
    if (may(*s)) last = s;
    if (last != nullptr && !shares_.several()) break;
  }
  return last;
}

Sequence* Scheduler::PlaceFor(const Sequence& wanting, int64_t places) const {
  const TenantShare& own = *wanting.share;
  const int64_t part = std::max<int64_t>(1, places / shares_.Contenders(own));
  if (own.places >= part) return nullptr;
  return LastOf([&](const Sequence& s) {
    return !s.frozen && s.priority >= wanting.priority && s.share->places > part &&
           s.share->served > own.served;
  });
}

Sequence* Scheduler::PagesFor(const Sequence& wanting) const {
  if (!shares_.several()) return nullptr;
  const TenantShare& own = *wanting.share;
  const int64_t part = pages_->total() / shares_.Contenders(own);
  std::map<const TenantShare*, int64_t> held;
  for (const Sequence* s : running_) {
    held[s->share] +=
        std::count_if(s->pages.begin(), s->pages.end(), [](int32_t page) { return page >= 0; }) +
        static_cast<int64_t>(s->recurrent.size());
  }
  if (held[&own] + Missing(wanting, wanting.goal()) + options_.state_pages > part) return nullptr;
  const auto may = [&](const Sequence& s) {
    return s.priority >= wanting.priority && held[s.share] > part && s.share->served > own.served;
  };
  // Pages that others have in common come free with the last of them: an upper bound.
  int64_t surplus = 0;
  for (const auto& [share, pages] : held) {
    if (share != &own && share->served > own.served) surplus += std::max<int64_t>(0, pages - part);
  }
  return surplus >= shortage_ ? LastOf(may) : nullptr;
}

Scheduler::Admitted Scheduler::AdmitInsteadOf(Sequence* victim, Sequence* sequence, Plan* plan) {
  std::vector<std::pair<TenantShare*, int64_t>> recomputed;
  const auto preempt = [&](Sequence* s) {
    recomputed.emplace_back(s->share, s->computed);
    Preempt(s, plan);
  };
  if (victim != nullptr) {
    const bool waits = sharing_.Reuse(sequence).waits;
    sharing_.Rewind(sequence);
    if (waits) return Admitted::kWaits;
    preempt(victim);
  }
  // A victim without rows in this step leaves no budget.
  Admitted admitted = plan->budget > 0 ? Admit(sequence, plan) : Admitted::kNoPages;
  while (admitted == Admitted::kNoPages && plan->budget > 0) {
    Sequence* const holder = frozen_running_ == 0 ? PagesFor(*sequence) : nullptr;
    if (holder != nullptr) {
      preempt(holder);
    } else if (!PreemptFrozen(plan)) {
      break;
    }
    admitted = Admit(sequence, plan);
  }
  // The tenant that wanted the room pays for the recomputation: short requests cannot make another
  // tenant's sequences begin again and again for nothing.
  for (const auto& [share, rows] : recomputed) {
    sequence->share->served += rows;
    share->served -= rows;
  }
  return admitted;
}

void Scheduler::PreemptAll() {
  Plan nothing;
  while (!running_.empty()) Preempt(*running_.rbegin(), &nothing);
}

void Scheduler::Landed(const Chunk& chunk) {
  Sequence& s = *chunk.sequence;
  --s.in_flight;
  sharing_.Landed(chunk);
  s.sampling -= chunk.samples ? 1 : 0;
  if (!chunk.draft.empty()) {
    s.verifies = false;
    --verifying_;
  }
  if (s.state == Sequence::State::kWaiting && s.in_flight == 0) s.DropPins();
}

int64_t Scheduler::StatePages(const Sequence& sequence) const {
  const bool has_own = !sequence.recurrent.empty() && !pages_->IsShared(sequence.recurrent.front());
  return has_own ? 0 : options_.state_pages;
}

Scheduler::Lack Scheduler::LackOf(const Sequence& sequence, int64_t group, int64_t end_row) const {
  const int64_t window = needs_.windows[group];
  const int64_t first = FirstBlockSeen(window, sequence.computed);
  Lack lack{0, BlocksOf(end_row)};
  if (window > 0) lack.end = std::min(lack.end, first + needs_.BlocksAtOnce(window));
  const auto has_page = [&](int64_t block) {
    const auto place = static_cast<size_t>(block * needs_.groups() + group);
    return place < sequence.pages.size() && sequence.pages[place] >= 0;
  };
  lack.begin = lack.end;
  while (lack.begin > first && !has_page(lack.begin - 1)) --lack.begin;
  return lack;
}

int64_t Scheduler::Missing(const Sequence& sequence, int64_t end_row) const {
  int64_t missing = 0;
  for (int64_t group = 0; group < needs_.groups(); ++group) {
    const Lack lack = LackOf(sequence, group, end_row);
    missing += lack.end - lack.begin;
  }
  return missing;
}

bool Scheduler::AllocatePages(Sequence* sequence, int64_t end_row) {
  const int64_t state = StatePages(*sequence);
  std::vector<int32_t> pages;
  if (!pages_->Allocate(Missing(*sequence, end_row) + state, &pages)) return false;
  if (state > 0) {
    // The old state stays as it is: it is cached, or another sequence or step reads it.
    if (!sequence->recurrent.empty()) sequence->recurrent_from = std::move(sequence->recurrent);
    sequence->recurrent.assign(pages.end() - state, pages.end());
  }
  auto next = pages.begin();
  for (int64_t group = 0; group < needs_.groups(); ++group) {
    const Lack lack = LackOf(*sequence, group, end_row);
    const auto places = static_cast<size_t>(lack.end * needs_.groups());
    if (sequence->pages.size() < places) sequence->pages.resize(places, -1);
    for (int64_t block = lack.begin; block < lack.end; ++block) {
      sequence->pages[block * needs_.groups() + group] = *next++;
    }
  }
  return true;
}

int64_t Scheduler::CoveredEnd(const Sequence& sequence) const {
  const auto is_whole = [&](int64_t block) {
    const auto begin = sequence.pages.begin() + block * needs_.groups();
    return std::all_of(begin, begin + needs_.groups(), [](int32_t page) { return page >= 0; });
  };
  int64_t blocks = static_cast<int64_t>(sequence.pages.size()) / needs_.groups();
  while (blocks > 0 && !is_whole(blocks - 1)) --blocks;
  return blocks * kKvPageTokens;
}

int64_t Scheduler::ChunkSize(const Sequence& sequence, int64_t budget) const {
  int64_t count = std::min(sequence.pending(), budget);
  // A chunk ends where its state is to be cached.
  for (const int64_t end : {sequence.branch, sequence.cached_state_end()}) {
    if (options_.state_pages == 0 || sequence.computed >= end) continue;
    count = std::min(count, end - sequence.computed);
  }
  // A chunk's rows have the same kind of output: rows that have been scored (after a preemption),
  // rows to be scored, and later ones never share a chunk.
  if (!sequence.has_scored()) {
    for (const int64_t end : {sequence.scored, sequence.to_score}) {
      if (sequence.computed < end) count = std::min(count, end - sequence.computed);
    }
  }
  count = std::min(count, sequence.same_adapter_until(sequence.computed) - sequence.computed);
  if (sequence.images == nullptr || count == 0) return count;
  const int64_t end = sequence.images->StepEnd(sequence.computed + count);
  return std::max<int64_t>(0, end - sequence.computed);
}

Chunk* Scheduler::Append(Sequence* sequence, Plan* plan) {
  Chunk chunk;
  chunk.sequence = sequence;
  chunk.position = sequence->computed;
  chunk.count = ChunkSize(*sequence, plan->budget);
  if (chunk.count > 0) {
    chunk.copy_from = sequence->copy_from;
    sequence->planned = chunk.end();
  }
  chunk.samples = chunk.end() == sequence->goal() && chunk.end() > sequence->to_score;
  const auto known = static_cast<int64_t>(sequence->tokens.size());
  if (chunk.end() > known) {
    DORAD_CHECK(chunk.position == known && chunk.count == 1);
    chunk.follows = sequence->chunk_index;
  }
  plan->chunks.push_back(chunk);
  plan->budget -= chunk.count;
  sequence->share->served += chunk.count;
  return &plan->chunks.back();
}

void Scheduler::Continue(Sequence* sequence, Plan* plan) {
  const int64_t count = ChunkSize(*sequence, plan->budget);
  // After a thaw more sequences may be running.
  if (count == 0 || static_cast<int64_t>(plan->chunks.size()) >= options_.max_running) return;
  sharing_.ReleaseBehind(sequence);
  const int64_t end = sequence->computed + count;
  while (!AllocatePages(sequence, end)) {
    shortage_ = Missing(*sequence, end) + StatePages(*sequence);
    if (PreemptFrozen(plan)) continue;
    Sequence* const victim = LastOf([](const Sequence& /*any*/) { return true; });
    Preempt(victim, plan);
    if (victim == sequence) return;
  }
  Append(sequence, plan);
}

Scheduler::Admitted Scheduler::Admit(Sequence* sequence, Plan* plan) {
  const PrefixSharing::Reused reused = sharing_.Reuse(sequence);
  if (reused.waits) {
    sharing_.Rewind(sequence);
    return Admitted::kWaits;
  }
  if (reused.row_of == nullptr && ChunkSize(*sequence, plan->budget) == 0) {
    sharing_.Rewind(sequence);
    return Admitted::kNoRows;
  }
  // All pages of the prompt at once: a half-admitted prompt would only be preempted again. Of a
  // window those that it has at once: they move on with it. One block of every running sequence
  // stays in reserve, so that admission does not cause preemption in the next steps.
  //
  // Alone it always finds room: if need be without a copy, whose source would be held beside it.
  const int64_t goal = sequence->goal();
  if (running_.empty() && pages_->available() < Missing(*sequence, goal)) {
    sharing_.DropCopy(sequence);
  }
  sharing_.ReleaseBehind(sequence);
  const int64_t missing = Missing(*sequence, goal);
  // The same for the second state of one that will cache its first.
  const bool has_two = sequence->computed < sequence->cached_state_end();
  const int64_t in_reserve = reserve() + (has_two ? options_.state_pages : 0);
  const int64_t available = pages_->available();
  const int64_t state = StatePages(*sequence);
  if (available < missing + state + in_reserve || !AllocatePages(sequence, goal)) {
    sharing_.Rewind(sequence);
    // The prefix's pages count as available again, but the sequence needs them too.
    shortage_ = missing + state + pages_->available() - available;
    return Admitted::kNoPages;
  }
  if (sequence->preemptions == 0 && sequence->generated() == 0) {
    sequence->cached_tokens = sequence->computed;
    sequence->looked_up = reused.looked_up;
  }
  sequence->state = Sequence::State::kRunning;
  Take(sequence, &sequence->share->waiting);
  Put(sequence, &running_);
  Append(sequence, plan)->row_of = reused.row_of;
  // Others may share what this step computes in the next one only.
  if (reused.row_of != nullptr) sequence->computed = 0;
  sharing_.Publish(sequence);
  return Admitted::kYes;
}

void Scheduler::Preempt(Sequence* sequence, Plan* plan) {
  const auto chunk = std::find_if(plan->chunks.begin(), plan->chunks.end(),
                                  [sequence](const Chunk& c) { return c.sequence == sequence; });
  if (chunk != plan->chunks.end()) {
    plan->budget += chunk->count;
    sequence->share->served -= chunk->count;
    plan->chunks.erase(chunk);
    sequence->planned = 0;
    for (;;) {  // those without a row now
      const auto joined = std::find_if(plan->chunks.begin(), plan->chunks.end(),
                                       [sequence](const Chunk& c) { return c.row_of == sequence; });
      if (joined == plan->chunks.end()) break;
      Preempt(joined->sequence, plan);
    }
  }
  sharing_.Rewind(sequence);
  Take(sequence, &running_);
  sequence->state = Sequence::State::kWaiting;
  Put(sequence, &sequence->share->waiting);
  // A sequence without pages keeps no pins: other sequences may have pages and need the weights.
  if (sequence->in_flight == 0) sequence->DropPins();
  ++sequence->preemptions;
  ++preemptions_;
  plan->preempted = true;
}

}  // namespace dorad::engine
