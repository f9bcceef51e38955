#include "server/engine/engine.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/any_invocable.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/base/check.h"
#include "server/base/error.h"
#include "server/base/log.h"
#include "server/base/metrics.h"
#include "server/engine/model_runner.h"
#include "server/engine/pauses.h"
#include "server/engine/request.h"
#include "server/engine/scheduler.h"

namespace dorad::engine {
namespace {

constexpr absl::Duration kIdleHeartbeat = absl::Seconds(1);
// Between two questions whether weights have come, when there is nothing else to do.
constexpr absl::Duration kAskForWeights = absl::Milliseconds(2);
constexpr absl::Duration kRetryQueueFull = absl::Milliseconds(200);
constexpr absl::Duration kRetryPaused = absl::Seconds(1);

using Message = absl::AnyInvocable<void()>;

absl::Status ShuttingDown() {
  return MakeError(absl::StatusCode::kUnavailable, "SHUTTING_DOWN", "the server is shutting down");
}

EngineLimits LimitsOf(const EngineOptions& options, int64_t kv_tokens) {
  EngineLimits limits;
  limits.vocab_size = options.vocab_size;
  // A sequence that does not fit into all pages together could never finish.
  limits.context_length = std::min(options.context_length, kv_tokens);
  limits.max_tokens = options.max_tokens > 0 ? std::min(options.max_tokens, limits.context_length)
                                             : limits.context_length;
  limits.max_n = options.max_n;
  limits.max_logprobs_k = options.max_logprobs_k;
  limits.max_chosen_ids = options.max_chosen_ids;
  limits.max_stop_ids = options.max_stop_ids;
  limits.max_score_tokens = options.max_score_tokens;
  limits.max_queued_requests = options.max_queued_requests;
  limits.max_queued_tokens = options.max_queued_tokens;
  return limits;
}

}  // namespace

struct Engine::Impl {
  Impl(EngineOptions engine_options, std::unique_ptr<ModelRunner> model_runner,
       Metrics* engine_metrics)
      : options(std::move(engine_options)),
        runner(std::move(model_runner)),
        metrics(engine_metrics),
        limits(LimitsOf(options, runner->kv_pages() * kKvPageTokens)),
        rules{options.eos_token_ids, limits.context_length},
        pages(runner->kv_pages()),
        scheduler({options.max_step_tokens, options.max_running_sequences,
                   [this](Sequence* sequence) { return MayRun(sequence); }},
                  &pages) {
    // A third step could not tell which of two others samples the token that it follows.
    DORAD_CHECK(runner->max_steps_in_flight() == 1 || runner->max_steps_in_flight() == 2);
    PublishStats();
    thread = std::thread([this] { Loop(); });
  }

  ~Impl() {
    {
      absl::MutexLock lock(&mu);
      closing = true;
    }
    thread.join();
  }

  using Entries = std::vector<adapter::Residency::Entry*>;  // sorted

  // --- Any thread.

  absl::Status Admit(std::unique_ptr<Request> request) ABSL_LOCKS_EXCLUDED(mu) {
    // Here rather than on the engine's thread: a large Score has thousands.
    request->MakeSequences(rules, options.prefix_cache);
    const int64_t tokens = request->load_tokens();
    const RequestKind kind = request->generate ? RequestKind::kGenerate : RequestKind::kScore;
    absl::MutexLock lock(&mu);
    absl::Status status = CheckAdmission(*request, tokens);
    if (!status.ok()) {
      metrics->RequestRefused(kind, ReasonOf(status));
      return status;
    }
    ids.insert(request->base().request_id);
    ++queued_requests;
    queued_tokens += tokens;
    metrics->RequestAdmitted(kind);
    inbox.push_back(
        [this, request = std::move(request)]() mutable { Enqueue(std::move(request)); });
    return absl::OkStatus();
  }

  void Post(Message message) ABSL_LOCKS_EXCLUDED(mu) {
    absl::MutexLock lock(&mu);
    inbox.push_back(std::move(message));
  }

  void StopRefusing(const adapter::AdapterRef& scope) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    const auto is_meant = [&](const adapter::AdapterRef& ref) {
      return scope.is_base() || ref == scope;
    };
    refusing.erase(std::remove_if(refusing.begin(), refusing.end(), is_meant), refusing.end());
  }

  absl::Status CheckAdmission(const Request& request, int64_t tokens)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (closing || draining) {
      return ShuttingDown();
    }
    const bool refused = std::any_of(
        refusing.begin(), refusing.end(),
        [&](const adapter::AdapterRef& scope) { return Pauses::Covers(scope, request); });
    if (refused) {
      return WithRetryAfter(MakeError(absl::StatusCode::kUnavailable, "ENGINE_PAUSED",
                                      "the engine is paused and refuses new requests"),
                            kRetryPaused);
    }
    if (request.deadline <= request.admitted) {
      return MakeError(absl::StatusCode::kDeadlineExceeded, "DEADLINE_EXCEEDED",
                       "the deadline passed before admission");
    }
    if (ids.contains(request.base().request_id)) {
      return MakeError(absl::StatusCode::kAlreadyExists, "REQUEST_ID_IN_USE",
                       absl::StrCat("a running request has the id ", request.base().request_id));
    }
    // One request is always let in, however large: it was validated, and nobody is before it.
    if (queued_requests > 0 && (queued_requests >= limits.max_queued_requests ||
                                queued_tokens + tokens > limits.max_queued_tokens)) {
      return WithRetryAfter(MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                                      absl::StrCat("the queue holds ", queued_requests,
                                                   " requests and ", queued_tokens, " tokens")),
                            kRetryQueueFull);
    }
    return absl::OkStatus();
  }

  // --- The engine thread.

  void Loop() {
    while (true) {
      bool stop = false;
      std::vector<Message> messages = TakeMessages(&stop);
      for (Message& message : messages) message();
      if (stop) break;
      EndDeadRequests();
      FollowActiveVersions();
      if (!pauses.all()) Step();
      CompletePauses();
      graveyard.clear();
      PublishStats();
    }
    FinishAll();
    while (!requests.empty()) {
      EndRequest(requests.begin()->second.get(), ShuttingDown());
    }
    graveyard.clear();
    Supersede({});
    PublishStats();
  }

  // Waits while there is nothing to do, but not longer than until the next deadline.
  std::vector<Message> TakeMessages(bool* stop) ABSL_LOCKS_EXCLUDED(mu) {
    absl::Duration patience = kIdleHeartbeat;
    if (!deadlines.empty()) {
      patience = std::min(patience, Between(SteadyNow(), deadlines.begin()->first));
    }
    if (stalled) patience = std::min(patience, kAskForWeights);
    const bool busy =
        !stalled && !pauses.all() && static_cast<int64_t>(requests.size()) > frozen_requests;
    absl::MutexLock lock(&mu);
    if (!busy) {
      const auto wake = [this]()
                            ABSL_SHARED_LOCKS_REQUIRED(mu) { return closing || !inbox.empty(); };
      mu.AwaitWithTimeout(absl::Condition(&wake), std::max(patience, absl::ZeroDuration()));
    }
    *stop = closing;
    return std::exchange(inbox, {});
  }

  void Enqueue(std::unique_ptr<Request> owned) {
    Request* const request = owned.get();
    requests.emplace(request->base().request_id, std::move(owned));
    if (request->deadline != Instant::max()) deadlines.insert({request->deadline, request});
    request->Enter(&next_arrival);
    // So may the note of an activation.
    Follow(request, request->NewerVersion());
    FreezeOrThaw(request);
    // The note of a cancel may have come before the request.
    cancels_noted = cancels_noted || request->cancelled();
    if (request->unfinished_sequences == 0) {
      NoteStarted(request, SteadyNow());
      EndRequest(request, absl::OkStatus());
      return;
    }
    for (const auto& sequence : request->sequences) {
      if (sequence->state == Sequence::State::kWaiting) scheduler.Add(sequence.get());
    }
  }

  void EndDeadRequests() {
    const Instant now = SteadyNow();
    const bool late = !deadlines.empty() && deadlines.begin()->first <= now;
    if (!late && !cancels_noted) return;
    FinishAll();
    while (!deadlines.empty() && deadlines.begin()->first <= now) {
      EndRequest(deadlines.begin()->second, MakeError(absl::StatusCode::kDeadlineExceeded,
                                                      "DEADLINE_EXCEEDED", "the deadline passed"));
    }
    cancels_noted = false;
    std::vector<Request*> cancelled;
    for (const auto& [id, request] : requests) {
      if (request->cancelled()) cancelled.push_back(request.get());
    }
    for (Request* request : cancelled) {
      EndRequest(request, MakeError(absl::StatusCode::kCancelled, "CLIENT_CANCELLED",
                                    "the client cancelled the request"));
    }
  }

  // Moves the requests that follow their name's active version over to it.
  void FollowActiveVersions() {
    if (!std::exchange(activations_noted, false)) return;
    std::vector<std::pair<Request*, adapter::AdapterLease>> moving;
    for (const auto& [id, request] : requests) {
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
  void Follow(Request* request, adapter::AdapterLease lease) {
    if (lease.get() == nullptr) return;
    request->Switch(std::move(lease), &scheduler);
    FreezeOrThaw(request);  // it may hold other versions now
    metrics->VersionSwitched();
  }

  bool IsHere(const Request* request) const {
    const auto it = requests.find(request->base().request_id);
    return it != requests.end() && it->second.get() == request;
  }

  // Keeps the runner busy: while it computes one step the next one is scheduled and begun, and what
  // the step before brought is delivered.
  void Step() {
    while (static_cast<int>(in_flight.size()) < runner->max_steps_in_flight() && BeginStep()) {
    }
    EndWithoutWeights();
    stalled = in_flight.empty() && !away.empty();
    if (!in_flight.empty()) FinishStep();
  }

  // Whether the weights that a sequence's rows need are there; then it has uses of them.
  bool MayRun(Sequence* sequence) {
    if (sequence->has_uses) return true;
    Entries entries;
    for (const KvSpan& span : sequence->kv_spans) {
      if (span.adapter == nullptr || span.adapter->entry() == nullptr) continue;
      entries.push_back(span.adapter->entry());
    }
    std::sort(entries.begin(), entries.end());
    entries.erase(std::unique(entries.begin(), entries.end()), entries.end());
    // Many may wait for the same: one of them asks in each step.
    if (away.contains(entries)) return false;
    absl::StatusOr<std::optional<adapter::Residency::Uses>> uses =
        adapter::Residency::UseAll(entries);
    if (!uses.ok() || !uses->has_value()) {
      if (!uses.ok()) without_weights.emplace(entries, uses.status());
      away.insert(std::move(entries));
      return false;
    }
    sequence->uses = **std::move(uses);
    sequence->has_uses = true;
    return true;
  }

  // Ends the requests that wait for weights which could not be brought.
  void EndWithoutWeights() {
    if (without_weights.empty()) return;
    FinishAll();
    for (const auto& [entries, status] : std::exchange(without_weights, {})) {
      std::vector<Request*> waiting;
      for (const auto& [id, request] : requests) {
        if (WaitsForOneOf(*request, entries)) waiting.push_back(request.get());
      }
      for (Request* request : waiting) EndRequest(request, status);
    }
  }

  static bool WaitsForOneOf(const Request& request, const Entries& entries) {
    for (const auto& sequence : request.sequences) {
      if (sequence->state == Sequence::State::kEnded || sequence->has_uses || sequence->frozen) {
        continue;
      }
      for (const KvSpan& span : sequence->kv_spans) {
        if (span.adapter == nullptr) continue;
        if (std::find(entries.begin(), entries.end(), span.adapter->entry()) != entries.end()) {
          return true;
        }
      }
    }
    return false;
  }

  // False when nothing has begun.
  bool BeginStep() {
    const uint64_t preemptions = scheduler.preemptions();
    away.clear();
    std::vector<Chunk> chunks = scheduler.Schedule();
    metrics->Preemptions(static_cast<int64_t>(scheduler.preemptions() - preemptions));
    if (chunks.empty()) {
      DORAD_CHECK(!in_flight.empty() || !away.empty() ||
                  scheduler.running() + scheduler.waiting() == scheduler.frozen());
      return false;
    }
    const Instant now = SteadyNow();
    std::vector<Request::Want> wants;
    std::vector<StepSequence> rows;
    wants.reserve(chunks.size());  // rows point into it
    rows.reserve(chunks.size());
    for (const Chunk& chunk : chunks) {
      NoteStarted(chunk.sequence->request, now);
      rows.push_back(RowsOf(chunk, &wants));
    }
    const absl::Status status = runner->Begin(rows);
    if (!status.ok()) {
      for (const Chunk& chunk : chunks) scheduler.Landed(chunk);
      FinishAll();  // what began before does not depend on it
      Fail(chunks, status);
      return false;
    }
    in_flight.push_back({std::move(chunks), now});
    return true;
  }

  static StepSequence RowsOf(const Chunk& chunk, std::vector<Request::Want>* wants) {
    static constexpr TokenId kUnknown = -1;
    const Sequence& s = *chunk.sequence;
    wants->push_back(s.request->WantOf(chunk));
    StepSequence rows;
    rows.tokens = chunk.follows >= 0
                      ? absl::MakeConstSpan(&kUnknown, 1)
                      : absl::MakeConstSpan(s.tokens).subspan(chunk.position, chunk.count);
    rows.follows = chunk.follows;
    rows.position = chunk.position;
    rows.pages = s.pages;
    rows.adapter = s.adapter_at(chunk.position);
    const Request::Want& want = wants->back();
    rows.sample = want.sample ? &*want.sample : nullptr;
    rows.score = want.score ? &*want.score : nullptr;
    return rows;
  }

  void FinishStep() {
    StepInFlight step = std::move(in_flight.front());
    in_flight.pop_front();
    absl::StatusOr<std::vector<StepOutput>> outputs = runner->Finish();
    ++steps;
    if (!outputs.ok()) {
      // The steps behind it stand on what it did not compute.
      for (StepInFlight& behind : std::exchange(in_flight, {})) {
        (void)runner->Finish();
        step.chunks.insert(step.chunks.end(), behind.chunks.begin(), behind.chunks.end());
      }
      for (const Chunk& chunk : step.chunks) Land(chunk);
      Fail(step.chunks, outputs.status());
      return;
    }
    const Instant now = SteadyNow();
    RecordStep(step.chunks, Between(std::max(step.begun, last_finished), now));
    last_finished = now;
    for (size_t i = 0; i < step.chunks.size(); ++i) {
      Deliver(step.chunks[i], std::move((*outputs)[i]), now);
    }
  }

  void FinishAll() {
    while (!in_flight.empty()) FinishStep();
  }

  void NoteStarted(Request* request, Instant now) {
    if (request->started) return;
    request->started = now;
    metrics->QueueTime(Between(request->admitted, now));
    LeaveQueue(*request);
  }

  void LeaveQueue(const Request& request) ABSL_LOCKS_EXCLUDED(mu) {
    absl::MutexLock lock(&mu);
    --queued_requests;
    queued_tokens -= request.load_tokens();
  }

  void RecordStep(const std::vector<Chunk>& chunks, absl::Duration time) {
    Metrics::Step step;
    step.time = time;
    absl::flat_hash_set<const adapter::LoadedAdapter*> adapters;
    int64_t scored = 0;
    for (const Chunk& chunk : chunks) {
      const Sequence& s = *chunk.sequence;
      const bool decode = !s.is_score && chunk.position >= s.prompt_tokens;
      (decode ? step.decode_rows : step.prefill_rows) += chunk.count;
      if (s.is_score) scored += chunk.count;
      const adapter::LoadedAdapter* const adapter = s.adapter_at(chunk.position);
      if (adapter != nullptr) adapters.insert(adapter);
    }
    step.distinct_adapters = static_cast<int>(adapters.size());
    metrics->StepDone(step);
    metrics->ScoredTokens(scored);
  }

  void Deliver(const Chunk& chunk, StepOutput output, Instant now) {
    Sequence* const sequence = chunk.sequence;
    Request* const request = sequence->request;
    // A row of a sequence that ended meanwhile was computed in vain.
    if (sequence->state != Sequence::State::kEnded) {
      scheduler.Computed(chunk);
      const int64_t generated = sequence->generated();
      if (chunk.samples && generated == 0) {
        metrics->PromptTokens(sequence->prompt_tokens - sequence->cached_tokens,
                              sequence->cached_tokens);
        metrics->PrefixCache(sequence->prompt_tokens, sequence->cached_tokens);
      }
      if (request->Accept(chunk, std::move(output), rules, now, metrics)) {
        scheduler.Remove(sequence);
      }
      metrics->GeneratedTokens(sequence->generated() - generated);
    }
    Land(chunk);
  }

  // Ends the request when this was the last of all its chunks: its leases must outlast them.
  void Land(const Chunk& chunk) {
    const Sequence& sequence = *chunk.sequence;
    Request* const request = sequence.request;
    scheduler.Landed(chunk);
    if (sequence.state != Sequence::State::kEnded || sequence.in_flight > 0) return;
    chunk.sequence->DropUses();
    if (--request->unfinished_sequences == 0) EndRequest(request, absl::OkStatus());
  }

  // Ends the requests whose chunks are lost, but for sequences that have ended without them.
  // REQUIRES: no step is in flight.
  void Fail(const std::vector<Chunk>& chunks, const absl::Status& status) {
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
  void EndWith(Request* request, Ending ending) {
    if (!request->started) {
      request->started = SteadyNow();
      LeaveQueue(*request);
    }
    for (const auto& sequence : request->sequences) {
      DORAD_CHECK(sequence->in_flight == 0);
      scheduler.Remove(sequence.get());
      sequence->DropUses();
    }
    auto node = requests.extract(request->base().request_id);
    DORAD_CHECK(!node.empty());
    graveyard.push_back(std::move(node.mapped()));
    deadlines.erase({request->deadline, request});
    frozen_requests -= request->frozen ? 1 : 0;
    {
      absl::MutexLock lock(&mu);
      ids.erase(request->base().request_id);
    }
    ending(request);
  }

  void EndRequest(Request* request, const absl::Status& status) {
    EndWith(request, [&](Request* r) { r->End(status, SteadyNow(), metrics); });
  }

  void AbortRequest(Request* request, const std::string& detail) {
    EndWith(request, [&](Request* r) { r->EndAborted(detail, SteadyNow(), metrics); });
  }

  // --- Messages, on the engine thread.

  int Abort(const AbortTarget& target, const std::string& detail) {
    FinishAll();
    std::vector<Request*> matching;
    for (const auto& [id, request] : requests) {
      if (target.all || (!target.adapter.is_base() && request->Holds(target.adapter)) ||
          std::find(target.request_ids.begin(), target.request_ids.end(), id) !=
              target.request_ids.end()) {
        matching.push_back(request.get());
      }
    }
    for (Request* request : matching) AbortRequest(request, detail);
    return static_cast<int>(matching.size());
  }

  void Pause(PauseMode mode, const adapter::AdapterRef& scope, PauseDone done) {
    const auto in_scope = [this, &scope] {
      return std::count_if(requests.begin(), requests.end(),
                           [&](const auto& entry) { return Pauses::Covers(scope, *entry.second); });
    };
    switch (mode) {
      case PauseMode::kAbort: {
        Supersede(scope);
        pauses.Begin(scope);
        const int aborted =
            Abort({.adapter = scope, .all = scope.is_base()}, "the engine was paused");
        Answer(done, aborted);
        return;
      }
      case PauseMode::kKeep:
        Supersede(scope);
        FinishAll();
        pauses.Begin(scope);
        FreezeAndThaw();
        Answer(done, static_cast<int>(in_scope()));
        return;
      case PauseMode::kWait:
        // Frozen requests could never finish: a pause that waits lets them run.
        pauses.End(scope);
        FreezeAndThaw();
        pauses.Wait({scope, std::move(done), static_cast<int>(in_scope())});
        return;
    }
  }

  void Resume(const adapter::AdapterRef& scope, const std::function<void()>& done) {
    pauses.End(scope);
    FreezeAndThaw();
    Supersede(scope);
    Answer(done);
  }

  // Ends the pauses that still wait: another word has come in between.
  void Supersede(const adapter::AdapterRef& scope) {
    for (const Pauses::Waiting& pause : pauses.TakeOvertaken(scope)) {
      Answer(pause.done, MakeError(absl::StatusCode::kAborted, "PAUSE_SUPERSEDED",
                                   "another pause or a resume came before the engine was idle"));
    }
  }

  void FreezeAndThaw() {
    for (const auto& [id, request] : requests) FreezeOrThaw(request.get());
  }

  // As pauses of adapters say; a pause of everything stops the engine instead.
  void FreezeOrThaw(Request* request) {
    const bool frozen = pauses.Freezes(*request);
    if (frozen == request->frozen) return;
    request->frozen = frozen;
    frozen_requests += frozen ? 1 : -1;
    for (const auto& sequence : request->sequences) {
      scheduler.SetFrozen(sequence.get(), frozen);
      // Its weights may make room meanwhile.
      if (frozen && sequence->in_flight == 0) sequence->DropUses();
    }
  }

  // Who gets an answer also sees its effect in stats().
  template <typename Done, typename... Args>
  void Answer(const Done& done, Args... args) {
    PublishStats();
    done(args...);
  }

  // Pause(WAIT) is in effect when the last admitted request of its scope has ended.
  void CompletePauses() {
    if (!pauses.anyone_waits()) return;
    {
      absl::MutexLock lock(&mu);
      if (!inbox.empty()) return;  // requests admitted before the pause may be among them
    }
    const auto is_over = [this](const adapter::AdapterRef& scope) {
      return std::none_of(requests.begin(), requests.end(),
                          [&](const auto& entry) { return Pauses::Covers(scope, *entry.second); });
    };
    for (const Pauses::Waiting& pause : pauses.TakeOver(is_over)) {
      pauses.Begin(pause.scope);
      Answer(pause.done, pause.requests);
    }
  }

  void PublishStats() ABSL_LOCKS_EXCLUDED(mu) {
    absl::MutexLock lock(&mu);
    published.running_sequences = static_cast<int>(scheduler.running());
    published.kv_pages_total = pages.total();
    published.kv_pages_used = pages.used();
    published.kv_pages_cached = pages.cached();
    published.kv_page_tokens = static_cast<int>(kKvPageTokens);
    published.steps = steps;
    published.paused = pauses.all();
    published.paused_adapters = pauses.adapters();
    published.frozen_requests = static_cast<int>(frozen_requests);
    heartbeat = SteadyNow();
  }

  struct StepInFlight {
    std::vector<Chunk> chunks;
    Instant begun;
  };

  const EngineOptions options;
  const std::unique_ptr<ModelRunner> runner;
  Metrics* const metrics;
  const EngineLimits limits;
  const StopRules rules;

  // Confined to the engine thread.
  KvPages pages;
  Scheduler scheduler;
  std::unordered_map<std::string, std::unique_ptr<Request>> requests;
  std::set<std::pair<Instant, Request*>> deadlines;
  std::vector<std::unique_ptr<Request>> graveyard;
  Pauses pauses;
  // In the step that is scheduled: weights that are not there, as some sequence needs them
  // together.
  std::set<Entries> away;
  std::map<Entries, absl::Status> without_weights;  // could not be brought
  bool stalled = false;                             // nobody can run before weights come
  int64_t frozen_requests = 0;
  std::deque<StepInFlight> in_flight;  // oldest first
  Instant last_finished;               // of a step
  bool cancels_noted = false;          // since cancelled requests were last looked for
  bool activations_noted = false;      // likewise, active versions
  uint64_t next_arrival = 0;
  uint64_t steps = 0;

  mutable absl::Mutex mu;
  std::vector<Message> inbox ABSL_GUARDED_BY(mu);
  absl::flat_hash_set<std::string> ids ABSL_GUARDED_BY(mu);
  int64_t queued_requests ABSL_GUARDED_BY(mu) = 0;
  int64_t queued_tokens ABSL_GUARDED_BY(mu) = 0;
  bool closing ABSL_GUARDED_BY(mu) = false;
  bool draining ABSL_GUARDED_BY(mu) = false;                      // StopAdmission
  std::vector<adapter::AdapterRef> refusing ABSL_GUARDED_BY(mu);  // Pause(WAIT) until Resume
  EngineStats published ABSL_GUARDED_BY(mu);
  Instant heartbeat ABSL_GUARDED_BY(mu);

  std::thread thread;  // last: starts when everything else exists
};

Engine::Engine(EngineOptions options, std::unique_ptr<ModelRunner> runner, Metrics* metrics)
    : impl_(std::make_unique<Impl>(std::move(options), std::move(runner), metrics)) {}

Engine::~Engine() = default;

const EngineLimits& Engine::limits() const { return impl_->limits; }

absl::Status Engine::Submit(GenerateInput input, std::shared_ptr<TokenStream> stream) {
  return impl_->Admit(std::make_unique<Request>(std::move(input), std::move(stream), SteadyNow()));
}

absl::Status Engine::Submit(ScoreInput input, std::shared_ptr<ScoreTicket> ticket) {
  return impl_->Admit(std::make_unique<Request>(std::move(input), std::move(ticket), SteadyNow()));
}

void Engine::NoteCancelled() {
  impl_->Post([impl = impl_.get()] { impl->cancels_noted = true; });
}

void Engine::NoteActivated() {
  impl_->Post([impl = impl_.get()] { impl->activations_noted = true; });
}

void Engine::Abort(AbortTarget target, std::string detail, std::function<void(int)> done) {
  impl_->Post([impl = impl_.get(), target = std::move(target), detail = std::move(detail),
               done = std::move(done)] {
    const int aborted = impl->Abort(target, detail);
    impl->Answer(done, aborted);
  });
}

void Engine::Pause(PauseMode mode, adapter::AdapterRef scope, PauseDone done) {
  Message message = [impl = impl_.get(), mode, scope, done = std::move(done)]() mutable {
    impl->Pause(mode, scope, std::move(done));
  };
  absl::MutexLock lock(&impl_->mu);
  impl_->StopRefusing(scope);
  if (mode == PauseMode::kWait) impl_->refusing.push_back(std::move(scope));
  impl_->inbox.push_back(std::move(message));
}

void Engine::Resume(adapter::AdapterRef scope, std::function<void()> done) {
  Message message = [impl = impl_.get(), scope, done = std::move(done)] {
    impl->Resume(scope, done);
  };
  absl::MutexLock lock(&impl_->mu);
  impl_->StopRefusing(scope);
  impl_->inbox.push_back(std::move(message));
}

EngineStats Engine::stats() const {
  absl::MutexLock lock(&impl_->mu);
  EngineStats stats = impl_->published;
  stats.queued_requests = static_cast<int>(impl_->queued_requests);
  stats.queued_tokens = impl_->queued_tokens;
  return stats;
}

absl::Duration Engine::time_since_heartbeat() const {
  absl::MutexLock lock(&impl_->mu);
  return Between(impl_->heartbeat, SteadyNow());
}

void Engine::StopAdmission() {
  absl::MutexLock lock(&impl_->mu);
  impl_->draining = true;
}

bool Engine::idle() const {
  absl::MutexLock lock(&impl_->mu);
  return impl_->inbox.empty() && impl_->ids.empty();
}

}  // namespace dorad::engine
