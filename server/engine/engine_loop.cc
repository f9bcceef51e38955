#include "server/engine/engine_loop.h"

#include <algorithm>
#include <map>
#include <optional>

#include "server/base/check.h"
#include "server/base/error.h"
#include "server/base/failpoint.h"
#include "server/base/log.h"
#include "server/base/metrics.h"

namespace dorad::engine {
namespace {

constexpr absl::Duration kIdleHeartbeat = absl::Seconds(1);
// Between two questions whether weights have come, when there is nothing else to do.
constexpr absl::Duration kAskForWeights = absl::Milliseconds(2);

KvPages::Chunks ChunksOf(ModelRunner& runner) {
  const KvChunks* const chunks = runner.kv_chunks();
  return chunks == nullptr ? KvPages::Chunks() : KvPages::Chunks{chunks->pages(), chunks->lead()};
}

absl::Status Superseded(std::string_view why) {
  return MakeError(absl::StatusCode::kAborted, "PAUSE_SUPERSEDED", why);
}

// A sequence that does not fit could never finish, whatever comes back.
int64_t LeastPages(const EngineOptions& options, int64_t max_length) {
  const int64_t longest = (max_length + kKvPageTokens - 1) / kKvPageTokens;
  return std::max(options.kv_min_pages, longest);
}

}  // namespace

EngineLoop::EngineLoop(const EngineOptions& options, StopRules rules,
                       std::unique_ptr<ModelRunner> runner, Admission* admission, StatsBoard* board,
                       Metrics* metrics)
    : rules_(std::move(rules)),
      gpu_share_(options.gpu_share),
      admission_(admission),
      board_(board),
      metrics_(metrics),
      pages_(runner->kv_pages(), ChunksOf(*runner)),
      lending_(&pages_, runner->kv_chunks(), LeastPages(options, rules_.max_length),
               options.kv_least_loan, metrics),
      weights_(metrics),
      scheduler_({options.max_step_tokens, options.max_running_sequences,
                  [this](Sequence* sequence) { return weights_.MayRun(sequence); }},
                 &pages_),
      pipeline_(std::move(runner), metrics) {
  FollowYields(SteadyNow());
  PublishStats();
}

void EngineLoop::Run() {
  while (true) {
    bool stop = false;
    std::vector<Admission::Message> messages = TakeMessages(&stop);
    for (Admission::Message& message : messages) message();
    if (stop) break;
    EndDeadRequests();
    FollowActiveVersions();
    FollowYields(SteadyNow());
    if (may_step()) {
      // A step that hangs must not hide for whom. Without messages nobody has come.
      if (!messages.empty()) PublishStats();
      Step();
    }
    CompletePauses();
    graveyard_.clear();
    PublishStats();
  }
  FinishAll();
  while (!requests_.empty()) {
    EndRequest(requests_.begin()->second.get(), ShuttingDown());
  }
  graveyard_.clear();
  Supersede(pauses_.TakeOf({}));
  PublishStats();
}

// Waits while there is nothing to do or the next step has to wait, but not longer than until the
// next deadline.
std::vector<Admission::Message> EngineLoop::TakeMessages(bool* stop) {
  const Instant now = SteadyNow();
  absl::Duration patience = kIdleHeartbeat;
  if (!deadlines_.empty()) patience = std::min(patience, Between(now, deadlines_.begin()->first));
  if (!yields_.empty()) patience = std::min(patience, Between(now, yields_.next_end()));
  if (stalled_) patience = std::min(patience, kAskForWeights);
  const bool busy =
      !stalled_ && may_step() && static_cast<int64_t>(requests_.size()) > frozen_requests_;
  if (!busy) return admission_->Take(patience, stop);
  const absl::Duration wait = pipeline_.empty() ? pacer_.Wait(now) : absl::ZeroDuration();
  std::vector<Admission::Message> messages = admission_->Take(std::min(patience, wait), stop);
  if (wait > absl::ZeroDuration()) metrics_->StepsHeldBack(Between(now, SteadyNow()));
  return messages;
}

void EngineLoop::Enter(std::unique_ptr<Request> owned) {
  Request* const request = owned.get();
  requests_.emplace(request->key(), std::move(owned));
  if (request->deadline != Instant::max()) deadlines_.insert({request->deadline, request});
  request->Enter(&next_arrival_);
  // So may the note of an activation.
  Follow(request, request->NewerVersion());
  // Both may have come between its admission and its entrance.
  if (pauses_.Refuses(*request)) {
    EndRequest(request, EnginePaused());
    return;
  }
  if (request->HoldsRevoked()) {
    AbortRequest(request, "an adapter version of it was retired by force");
    return;
  }
  FreezeOrThaw(request);
  // The note of a cancel may have come before the request.
  cancels_noted_ = cancels_noted_ || request->cancelled();
  if (request->unfinished_sequences == 0) {
    NoteStarted(request, SteadyNow());
    EndRequest(request, absl::OkStatus());
    return;
  }
  for (const auto& sequence : request->sequences) {
    if (sequence->state == Sequence::State::kWaiting) scheduler_.Add(sequence.get());
  }
}

void EngineLoop::EndDeadRequests() {
  const Instant now = SteadyNow();
  const bool late = !deadlines_.empty() && deadlines_.begin()->first <= now;
  if (!late && !cancels_noted_) return;
  FinishAll();
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    EndRequest(deadlines_.begin()->second, MakeError(absl::StatusCode::kDeadlineExceeded,
                                                     "DEADLINE_EXCEEDED", "the deadline passed"));
  }
  cancels_noted_ = false;
  std::vector<Request*> cancelled;
  for (const auto& [id, request] : requests_) {
    if (request->cancelled()) cancelled.push_back(request.get());
  }
  for (Request* request : cancelled) {
    EndRequest(request, MakeError(absl::StatusCode::kCancelled, "CLIENT_CANCELLED",
                                  "the client cancelled the request"));
  }
}

// Moves the requests that follow their name's active version over to it.
void EngineLoop::FollowActiveVersions() {
  if (!std::exchange(activations_noted_, false)) return;
  std::vector<std::pair<Request*, adapter::AdapterLease>> moving;
  for (const auto& [id, request] : requests_) {
    adapter::AdapterLease lease = request->NewerVersion();
    if (lease.get() != nullptr) moving.emplace_back(request.get(), std::move(lease));
  }
  if (moving.empty()) return;
  FinishAll();  // which may end some of them
  for (auto& [request, lease] : moving) {
    if (IsHere(request)) Follow(request, std::move(lease));
  }
}

// Without a lease there is nothing to follow.
void EngineLoop::Follow(Request* request, adapter::AdapterLease lease) {
  if (lease.get() == nullptr) return;
  request->Switch(std::move(lease), &scheduler_);
  FreezeOrThaw(request);  // it may hold other versions now
  metrics_->VersionSwitched();
}

bool EngineLoop::IsHere(const Request* request) const {
  const auto it = requests_.find(request->key());
  return it != requests_.end() && it->second.get() == request;
}

// Keeps the runner busy: while it computes one step the next one is scheduled and begun, and what
// the step before brought is delivered.
void EngineLoop::Step() {
  if (pipeline_.empty() && pacer_.Wait(SteadyNow()) > absl::ZeroDuration()) {
    stalled_ = false;  // somebody may be able to run when its turn comes
    return;
  }
  if (pages_.lent() > 0) {
    lending_.TakeBack(scheduler_.running() + scheduler_.shortage(), SteadyNow());
  }
  while (HasRoom() && BeginStep()) {
  }
  EndWithoutWeights();
  stalled_ = pipeline_.empty() && weights_.any_away();
  if (!pipeline_.empty()) FinishStep();
}

bool EngineLoop::HasRoom() const { return pacer_.paces() ? pipeline_.empty() : !pipeline_.full(); }

// Ends the requests that wait for weights which could not be brought.
void EngineLoop::EndWithoutWeights() {
  const std::map<WeightsGate::Entries, absl::Status> failures = weights_.TakeFailures();
  if (failures.empty()) return;
  FinishAll();
  for (const auto& [entries, status] : failures) {
    std::vector<Request*> waiting;
    for (const auto& [id, request] : requests_) {
      if (WeightsGate::IsConcerned(*request, entries)) waiting.push_back(request.get());
    }
    for (Request* request : waiting) EndRequest(request, status);
  }
}

// False when nothing has begun.
bool EngineLoop::BeginStep() {
  const uint64_t preemptions = scheduler_.preemptions();
  const Instant begin = SteadyNow();
  weights_.BeginStep(begin);
  std::vector<Chunk> chunks = scheduler_.Schedule();
  metrics_->Preemptions(static_cast<int64_t>(scheduler_.preemptions() - preemptions));
  if (chunks.empty()) {
    DORAD_CHECK(!pipeline_.empty() || weights_.any_away() ||
                scheduler_.running() + scheduler_.waiting() == scheduler_.frozen());
    return false;
  }
  const Instant now = SteadyNow();
  metrics_->StepPhaseDone(StepPhase::kSchedule, Between(begin, now));
  for (const Chunk& chunk : chunks) NoteStarted(chunk.sequence->request, now);
  Failpoint("engine_step");
  const absl::Status status = pipeline_.Begin(&chunks, now);
  if (status.ok()) return true;
  for (const Chunk& chunk : chunks) scheduler_.Landed(chunk);
  FinishAll();  // what began before does not depend on it
  Fail(chunks, status);
  return false;
}

void EngineLoop::FinishStep() {
  StepPipeline::Finished step = pipeline_.Finish();
  pacer_.Ran(step.time, step.now);
  if (!step.outputs.ok()) {
    for (const Chunk& chunk : step.chunks) Land(chunk);
    Fail(step.chunks, step.outputs.status());
    return;
  }
  for (size_t i = 0; i < step.chunks.size(); ++i) {
    Deliver(step.chunks[i], std::move((*step.outputs)[i]), step.now);
  }
  metrics_->StepPhaseDone(StepPhase::kProcess, Between(step.now, SteadyNow()));
}

void EngineLoop::FinishAll() {
  while (!pipeline_.empty()) FinishStep();
}

void EngineLoop::NoteStarted(Request* request, Instant now) {
  if (request->started) return;
  request->started = now;
  metrics_->QueueTime(Between(request->admitted, now));
  admission_->Started(*request);
}

void EngineLoop::Deliver(const Chunk& chunk, StepOutput output, Instant now) {
  Sequence* const sequence = chunk.sequence;
  Request* const request = sequence->request;
  // A row of a sequence that ended meanwhile was computed in vain.
  if (sequence->state != Sequence::State::kEnded) {
    scheduler_.Computed(chunk);
    const int64_t generated = sequence->generated();
    if (chunk.samples && generated == 0) {
      metrics_->PromptTokens(sequence->prompt_tokens - sequence->cached_tokens,
                             sequence->cached_tokens);
      if (sequence->looked_up) {
        metrics_->PrefixCache(sequence->prompt_tokens, sequence->cached_tokens);
      }
    }
    const int64_t scored = sequence->scored;
    if (request->Accept(chunk, std::move(output), rules_, now, metrics_)) {
      scheduler_.Remove(sequence);
    }
    metrics_->GeneratedTokens(sequence->generated() - generated);
    metrics_->ScoredTokens(sequence->scored - scored);
  }
  Land(chunk);
}

// Ends the request when this was the last of all its chunks: its leases must outlast them.
void EngineLoop::Land(const Chunk& chunk) {
  const Sequence& sequence = *chunk.sequence;
  Request* const request = sequence.request;
  scheduler_.Landed(chunk);
  if (sequence.state != Sequence::State::kEnded || sequence.in_flight > 0) return;
  chunk.sequence->DropUses();
  if (--request->unfinished_sequences == 0) EndRequest(request, absl::OkStatus());
}

// Ends the requests whose chunks are lost, but for sequences that have ended without them.
// REQUIRES: no step is in flight.
void EngineLoop::Fail(const std::vector<Chunk>& chunks, const absl::Status& status) {
  LogError("step failed", {{"error", std::string(status.message())}});
  std::set<Request*> failed;
  for (const Chunk& chunk : chunks) {
    if (chunk.sequence->state != Sequence::State::kEnded) failed.insert(chunk.sequence->request);
  }
  for (Request* request : failed) EndRequest(request, status);
}

// Every way out of the engine. Pages and leases are back before the client learns of the end. The
// request stays allocated until the end of the turn: the step at hand may still refer to it.
// REQUIRES: none of its chunks is in flight.
template <typename Ending>
void EngineLoop::EndWith(Request* request, Ending ending) {
  // Who never had a turn has waited as well.
  NoteStarted(request, SteadyNow());
  for (const auto& sequence : request->sequences) {
    DORAD_CHECK(sequence->in_flight == 0);
    scheduler_.Remove(sequence.get());
    sequence->DropUses();
    weights_.NoteGone(sequence.get());
  }
  auto node = requests_.extract(request->key());
  DORAD_CHECK(!node.empty());
  graveyard_.push_back(std::move(node.mapped()));
  deadlines_.erase({request->deadline, request});
  frozen_requests_ -= request->frozen ? 1 : 0;
  admission_->Ended(*request);
  ending(request);
}

void EngineLoop::EndRequest(Request* request, const absl::Status& status) {
  EndWith(request, [&](Request* r) { r->End(status, SteadyNow(), metrics_); });
}

void EngineLoop::AbortRequest(Request* request, const std::string& detail) {
  EndWith(request, [&](Request* r) { r->EndAborted(detail, SteadyNow(), metrics_); });
}

int EngineLoop::AbortMatching(const AbortTarget& target, const std::string& detail) {
  FinishAll();
  std::vector<Request*> matching;
  for (const auto& [key, request] : requests_) {
    if (target.tenant && *target.tenant != request->base().tenant) continue;
    if (target.all || (!target.adapter.is_base() && request->Holds(target.adapter)) ||
        std::find(target.request_ids.begin(), target.request_ids.end(),
                  request->base().request_id) != target.request_ids.end()) {
      matching.push_back(request.get());
    }
  }
  for (Request* request : matching) AbortRequest(request, detail);
  return static_cast<int>(matching.size());
}

// Who gets an answer also sees its effect in stats().
template <typename Done, typename... Args>
void EngineLoop::Answer(const Done& done, Args... args) {
  PublishStats();
  done(args...);
}

void EngineLoop::Abort(const AbortTarget& target, const std::string& detail,
                       const std::function<void(int)>& done) {
  const int aborted = AbortMatching(target, detail);
  Answer(done, aborted);
}

void EngineLoop::Pause(const Engine::PauseOptions& options, uint64_t ticket,
                       Engine::PauseDone done) {
  const adapter::AdapterRef& scope = options.scope;
  if (const absl::Status room = pauses_.CheckRoom(scope, options.tenant); !room.ok()) {
    Answer(done, room);
    return;
  }
  switch (options.mode) {
    case PauseMode::kAbort: {
      Supersede(pauses_.TakeWithin(scope));
      pauses_.Begin(scope, options.tenant);
      const int aborted =
          AbortMatching({.adapter = scope, .all = scope.is_base()}, "the engine was paused");
      FollowPauses();
      Answer(done, aborted);
      return;
    }
    case PauseMode::kKeep:
      if (pauses_.IsPartOfWait(scope)) {
        // Frozen requests would never end, and the wider pause would wait for them.
        Answer(done, Superseded("a pause of more than these requests waits for them to end"));
        return;
      }
      Supersede(pauses_.TakeWithin(scope));
      FinishAll();
      pauses_.Begin(scope, options.tenant);
      FollowPauses();
      Answer(done, CountCovered(scope));
      return;
    case PauseMode::kWait:
      pauses_.Wait(scope, options.tenant, {ticket, CountCovered(scope), std::move(done)});
      FollowPauses();
      return;
  }
}

void EngineLoop::WithdrawPause(uint64_t ticket) {
  const std::optional<Pauses::Waiter> withdrawn = pauses_.Withdraw(ticket);
  if (!withdrawn) return;
  FollowPauses();
  Answer(withdrawn->done,
         MakeError(absl::StatusCode::kCancelled, "CLIENT_CANCELLED", "the pause was withdrawn"));
}

void EngineLoop::Resume(const adapter::AdapterRef& scope, const std::function<void()>& done) {
  pauses_.End(scope);
  Supersede(pauses_.TakeOf(scope));
  FollowPauses();
  Answer(done);
}

void EngineLoop::Sleep(const Engine::SleepOptions& options,
                       const std::function<void(absl::StatusOr<int64_t>)>& done) {
  FinishAll();
  asleep_ = true;
  stalled_ = false;
  for (const auto& [id, request] : requests_) {
    for (const auto& sequence : request->sequences) {
      sequence->DropUses();
      weights_.NoteGone(sequence.get());
    }
  }
  absl::StatusOr<int64_t> released = 0;
  if (options.kv && !kv_released_) {
    if (!options.keep_kv) {
      scheduler_.PreemptAll();
      pages_.DropPrefixes();
    }
    released = pipeline_.runner().ReleaseKv(pages_.Filled());
    kv_released_ = released.ok();
  }
  Answer(done, released);
}

absl::Status EngineLoop::Wake(bool kv, bool go_on) {
  if (kv && kv_released_) {
    DORAD_RETURN_IF_ERROR(pipeline_.runner().RestoreKv());
    kv_released_ = false;
  }
  DORAD_CHECK(!(go_on && kv_released_));
  asleep_ = asleep_ && !go_on;
  PublishStats();
  return absl::OkStatus();
}

void EngineLoop::Yield(const Engine::YieldOptions& options,
                       const std::function<void(absl::StatusOr<double>)>& done) {
  const Instant now = SteadyNow();
  const absl::Status status =
      yields_.Set(options.id, options.share, now + absl::ToChronoNanoseconds(options.time));
  FollowYields(now);
  Answer(done, status.ok() ? absl::StatusOr<double>(pacer_.share()) : status);
}

void EngineLoop::EndYield(const std::string& id, const std::function<void(bool)>& done) {
  const bool ended = yields_.End(id);
  FollowYields(SteadyNow());
  Answer(done, ended);
}

void EngineLoop::FollowYields(Instant now) {
  yields_.EndOverdue(now);
  pacer_.SetShare(takes_all_time_ ? 1 : std::min(gpu_share_, yields_.share()), now);
}

void EngineLoop::SetGpuShare(double share) {
  gpu_share_ = share;
  FollowYields(SteadyNow());
}

void EngineLoop::TakeAllTime() {
  takes_all_time_ = true;
  FollowYields(SteadyNow());
}

void EngineLoop::LendKv(int64_t bytes, const std::function<void(int64_t)>& done) {
  FinishAll();  // which may still write to pages that are free by now
  Answer(done, kv_released_ ? 0 : lending_.Lend(bytes, SteadyNow()));
}

// Another word has come in between.
void EngineLoop::Supersede(const std::vector<Pauses::Waiter>& waiters) {
  for (const Pauses::Waiter& waiter : waiters) {
    Answer(waiter.done, Superseded("another pause or a resume came before the engine was idle"));
  }
}

// To be called whenever pauses have come or gone.
void EngineLoop::FollowPauses() {
  const bool stops_some = std::any_of(requests_.begin(), requests_.end(), [&](const auto& entry) {
    return !entry.second->frozen && pauses_.Freezes(*entry.second);
  });
  if (stops_some) FinishAll();  // who stands still has nothing in flight
  for (const auto& [id, request] : requests_) FreezeOrThaw(request.get());
  admission_->SetRefused(pauses_.refused());
}

// As pauses of adapters say; a pause of everything stops the engine instead.
void EngineLoop::FreezeOrThaw(Request* request) {
  const bool frozen = pauses_.Freezes(*request);
  if (frozen == request->frozen) return;
  request->frozen = frozen;
  frozen_requests_ += frozen ? 1 : -1;
  for (const auto& sequence : request->sequences) {
    scheduler_.SetFrozen(sequence.get(), frozen);
    if (frozen) weights_.NoteGone(sequence.get());
    // Its weights may make room meanwhile.
    if (frozen && sequence->in_flight == 0) sequence->DropUses();
  }
}

int EngineLoop::CountCovered(const adapter::AdapterRef& scope) const {
  return static_cast<int>(std::count_if(requests_.begin(), requests_.end(), [&](const auto& entry) {
    return Pauses::Covers(scope, *entry.second);
  }));
}

// The witness is one that had not at the last question: most often it still has not.
bool EngineLoop::AllHaveEnded(const adapter::AdapterRef& scope, std::string* witness) const {
  const auto known = requests_.find(*witness);
  if (known != requests_.end() && Pauses::Covers(scope, *known->second)) return false;
  const auto other = std::find_if(requests_.begin(), requests_.end(), [&](const auto& entry) {
    return Pauses::Covers(scope, *entry.second);
  });
  if (other == requests_.end()) return true;
  *witness = other->first;
  return false;
}

// Pause(WAIT) is in effect when the last admitted request of its scope has ended.
void EngineLoop::CompletePauses() {
  if (pauses_.waiting().empty()) return;
  const std::vector<Pauses::Waiter> over = pauses_.Complete(
      [this](const auto& scope, std::string* witness) { return AllHaveEnded(scope, witness); });
  if (over.empty()) return;
  FollowPauses();
  for (const Pauses::Waiter& waiter : over) Answer(waiter.done, waiter.requests);
}

void EngineLoop::PublishStats() {
  EngineStats stats;
  stats.requests = static_cast<int>(requests_.size());
  stats.running_sequences = static_cast<int>(scheduler_.running());
  stats.waiting_sequences = scheduler_.waiting();
  stats.kv_pages_total = pages_.total();
  stats.kv_pages_used = pages_.used();
  stats.kv_pages_cached = pages_.cached();
  stats.kv_pages_lent = pages_.lent();
  stats.kv_lendable_bytes = kv_released_ ? 0 : lending_.lendable_bytes();
  stats.kv_short = may_step() && pages_.lent() > 0 && scheduler_.shortage() > 0;
  stats.kv_page_tokens = static_cast<int>(kKvPageTokens);
  stats.steps = pipeline_.steps_finished();
  stats.paused = pauses_.all();
  stats.asleep = asleep_;
  stats.gpu_share = pacer_.share();
  stats.paused_adapters = pauses_.stopped();
  stats.awaited_pauses = pauses_.waiting();
  stats.frozen_requests = static_cast<int>(frozen_requests_);
  board_->Publish(std::move(stats));
}

}  // namespace dorad::engine
