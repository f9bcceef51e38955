#include "server/engine/engine_loop.h"

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string_view>

#include "server/engine/kv_needs.h"
#include "server/platform/check.h"
#include "server/platform/error.h"
#include "server/platform/log.h"
#include "server/platform/metrics/metrics.h"
#include "server/platform/process/failpoint.h"

namespace dorad::engine {
namespace {

constexpr absl::Duration kIdleHeartbeat = absl::Seconds(1);
// Poll interval for evicted weights when no step can run.
constexpr absl::Duration kAskForWeights = absl::Milliseconds(2);

KvPages::Chunks ChunksOf(ModelRunner& runner) {
  const KvChunks* const chunks = runner.kv_chunks();
  return chunks == nullptr ? KvPages::Chunks() : KvPages::Chunks{chunks->pages(), chunks->lead()};
}

// A smaller cache could never finish the longest sequence.
int64_t LeastPages(const EngineOptions& options, int64_t max_length, const ModelRunner& runner) {
  return std::max(options.kv_min_pages,
                  NeedsOf(runner, options.max_step_tokens).PagesFor(max_length));
}

}  // namespace

EngineLoop::EngineLoop(const EngineOptions& options, StopRules rules,
                       std::unique_ptr<ModelRunner> runner, Admission* admission, StatsBoard* board,
                       Metrics* metrics)
    : rules_(std::move(rules)),
      on_generated_(options.on_generated),
      gpu_share_(options.gpu_share),
      admission_(admission),
      board_(board),
      metrics_(metrics),
      pages_(runner->kv_pages(), ChunksOf(*runner), runner->windows()),
      balloon_(&pages_, runner->kv_chunks(), LeastPages(options, rules_.max_length, *runner),
               options.kv_shrink_hold, metrics),
      weights_(metrics),
      images_(runner.get(), options.image_cache_bytes, metrics),
      scheduler_({options.max_step_tokens, options.max_running_sequences,
                  [this](Sequence* sequence) {
                    return weights_.MayRun(sequence) && images_.MayRun(sequence);
                  },
                  options.images.block_rows(), runner->state_pages()},
                 &pages_),
      pipeline_(std::move(runner), metrics) {
  ApplyGpuShare(SteadyNow());
  PublishStats();
}

void EngineLoop::Run() {
  while (true) {
    bool stop = false;
    std::vector<Admission::Message> messages = TakeMessages(&stop);
    for (Admission::Message& message : messages) message();
    if (stop) break;
    EndOverdue();
    FollowActiveVersions();
    ApplyGpuShare(SteadyNow());
    // A step that hangs must not hide the requests in it. Only messages add requests.
    if (!messages.empty()) PublishStats();
    Step();
    CompletePauses();
    finished_requests_.clear();
    PublishStats();
  }
  FinishAll();  // nothing follows
  for (Request* request : admission_->Live()) BeginEnd(request, {ShuttingDown(), {}});
  finished_requests_.clear();
  Supersede(pauses_.RemoveWaiters({}));
  PublishStats();
}

// Waits while no step may begin, at most until the next deadline.
std::vector<Admission::Message> EngineLoop::TakeMessages(bool* stop) {
  const Instant now = SteadyNow();
  absl::Duration patience = kIdleHeartbeat;
  if (!deadlines_.empty()) patience = std::min(patience, Between(now, deadlines_.begin()->first));
  if (!gpu_share_limits_.empty())
    patience = std::min(patience, Between(now, gpu_share_limits_.next_end()));
  if (stalled_) patience = std::min(patience, kAskForWeights);
  const bool can_step =
      !stalled_ && may_step() && scheduler_.running() + scheduler_.waiting() > scheduler_.frozen();
  const bool busy = can_step || !pipeline_.empty();
  if (!busy) return admission_->Take(patience, stop);
  const absl::Duration wait = pipeline_.empty() ? limiter_.Wait(now) : absl::ZeroDuration();
  std::vector<Admission::Message> messages = admission_->Take(std::min(patience, wait), stop);
  if (wait > absl::ZeroDuration()) metrics_->StepsThrottled(Between(now, SteadyNow()));
  return messages;
}

void EngineLoop::Enter(Request* request) {
  request->entered = true;
  request->wake_up = request->ExplainAt();
  if (request->deadline != Instant::max()) deadlines_.insert({request->wake_up, request});
  request->Enter(&next_arrival_);
  // An activation may have come between the request's admission and its entry.
  Follow(request, request->NewerVersion());
  // So may a pause and a retirement.
  if (const auto refusal = pauses_.RefusalOf(*request)) {
    BeginEnd(request, {EnginePaused(*refusal), {}});
    return;
  }
  if (const adapter::LoadedAdapter* revoked = request->Revoked()) {
    BeginEnd(request,
             {absl::OkStatus(), adapter::RetiredByForce({revoked->name(), revoked->version()})});
    return;
  }
  FreezeOrThaw(request);
  if (request->unfinished_sequences == 0) {
    BeginEnd(request, {});
    return;
  }
  for (const auto& sequence : request->sequences) {
    if (sequence->state == Sequence::State::kWaiting) scheduler_.Add(sequence.get());
  }
}

// Moves the requests that follow their name's active version over to it.
void EngineLoop::FollowActiveVersions() {
  if (!std::exchange(activations_noted_, false)) return;
  std::vector<std::pair<Request*, adapter::AdapterLease>> moving;
  for (Request* request : admission_->Live()) {
    if (request->ending) continue;
    adapter::AdapterLease lease = request->NewerVersion();
    if (lease.get() != nullptr) moving.emplace_back(request, std::move(lease));
  }
  if (moving.empty()) return;
  // A request switches between two tokens: all its rows must have landed. It may end by that.
  FinishAll();
  for (auto& [request, lease] : moving) {
    if (admission_->Find(request->key()) == request) Follow(request, std::move(lease));
  }
}

void EngineLoop::Follow(Request* request, adapter::AdapterLease lease) {
  if (lease.get() == nullptr) return;
  request->Switch(std::move(lease), &scheduler_);
  FreezeOrThaw(request);  // pauses may cover the new version
  metrics_->VersionSwitched();
}

// Keeps the runner busy: while it computes one step, the next one is scheduled and begun and the
// results of the last one are delivered. Steps in flight land also during a pause.
void EngineLoop::Step() {
  if (may_step()) BeginSteps();
  if (!pipeline_.empty()) FinishStep();
}

void EngineLoop::BeginSteps() {
  if (pipeline_.empty() && limiter_.Wait(SteadyNow()) > absl::ZeroDuration()) {
    stalled_ = false;  // unknown until the next schedule
    return;
  }
  if (pages_.released() > 0) {
    balloon_.Grow(scheduler_.reserve() + scheduler_.shortage(), SteadyNow());
  }
  if (!HasRoom()) return;  // a step that awaits drafts
  while (HasRoom() && BeginStep()) {
  }
  EndWithoutWeights();
  const bool encodes = images_.waiting() != nullptr;
  if (encodes) EncodeImages();
  stalled_ = pipeline_.empty() && weights_.any_away() && !encodes;
}

// Beside the steps in flight: they delay one another, but none waits for more than one piece. With
// none in flight, all images that wait for one another may go at once.
void EngineLoop::EncodeImages() {
  Request* const request = images_.waiting()->request;
  if (request->ending) return;
  const absl::Status status = images_.Encode(/*alone=*/pipeline_.empty());
  if (!status.ok()) BeginEnd(request, {status, {}});
}

bool EngineLoop::HasRoom() const {
  const bool alone = limiter_.paces() || scheduler_.awaits_drafts();
  return alone ? pipeline_.empty() : !pipeline_.full();
}

// False when no step has begun.
bool EngineLoop::BeginStep() {
  const uint64_t preemptions = scheduler_.preemptions();
  const Instant begin = SteadyNow();
  weights_.BeginStep(begin);
  images_.BeginStep();
  std::vector<Chunk> chunks = scheduler_.Schedule();
  metrics_->Preemptions(static_cast<int64_t>(scheduler_.preemptions() - preemptions));
  if (chunks.empty()) {
    DORAD_CHECK(!pipeline_.empty() || weights_.any_away() || images_.waiting() != nullptr ||
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
  FinishAll();  // earlier steps are valid: their tokens precede the end
  Fail(chunks, status);
  return false;
}

void EngineLoop::FinishStep() {
  StepPipeline::Finished step = pipeline_.Finish();
  limiter_.Ran(step.time, step.now);
  if (!step.outputs.ok()) {
    for (const Chunk& chunk : step.chunks) Land(chunk);
    Fail(step.chunks, step.outputs.status());
  } else {
    const StepRowCounts rows = CountRows(step.chunks);
    if (!rows.has_prompt) cost_.Observe(rows.count, step.time);
    DeliverAll(&step);
    ObserveTrial(rows, step.time, step.now);
    metrics_->StepPhaseDone(StepPhase::kProcess, Between(step.now, SteadyNow()));
  }
  while (!after_steps_.empty() && after_steps_.front().step <= pipeline_.steps_landed()) {
    const std::function<void()> then = std::move(after_steps_.front().then);
    after_steps_.pop_front();
    then();
  }
}

EngineLoop::StepRowCounts EngineLoop::CountRows(const std::vector<Chunk>& chunks) {
  StepRowCounts rows;
  for (const Chunk& chunk : chunks) {
    rows.count += chunk.count;
    rows.has_prompt |= chunk.count > 1 + static_cast<int64_t>(chunk.draft.size());
    if (!chunk.draft.empty()) rows.has_drafts[DraftTrial::Index(chunk.draft_source)] = true;
  }
  return rows;
}

void EngineLoop::DeliverAll(StepPipeline::Finished* step) {
  const DraftPrice price = cost_.PriceOfDraft(scheduler_.running());
  const Request::StepEnd end = {rules_, step->now, metrics_, price, &trial_};
  for (size_t i = 0; i < step->chunks.size(); ++i) {
    Chunk& chunk = step->chunks[i];
    chunk.sequence->request->CutDraft(&chunk, &(*step->outputs)[i], end);
  }
  ReportGenerated(*step);
  for (size_t i = 0; i < step->chunks.size(); ++i) {
    Deliver(step->chunks[i], std::move((*step->outputs)[i]), end);
  }
}

void EngineLoop::ObserveTrial(const StepRowCounts& rows, absl::Duration step_time, Instant now) {
  // From end to end: a step may wait for drafts. More is a time without a step.
  constexpr int kMostGap = 4;
  absl::Duration time = Between(last_step_end_, now);
  // A step with a prompt tells nothing.
  if (rows.has_prompt || time > kMostGap * step_time) time = absl::ZeroDuration();
  const bool others_wait = scheduler_.waiting() > 0 || scheduler_.drafts_wait();
  const DraftTrial::Step tried = {scheduler_.running(), rows.has_drafts, others_wait, time};
  const auto may_verify = trial_.Observe(tried, [this] { return Progress(); });
  if (std::ranges::count(may_verify, false) > 0) {
    for (Sequence* s : scheduler_.running_sequences()) {
      if (s->draft.empty() || may_verify[DraftTrial::Index(s->draft_source)]) continue;
      s->request->CompareDraft(s);
    }
  }
  last_step_end_ = now;
}

std::vector<DraftTrial::Progress> EngineLoop::Progress() const {
  std::vector<DraftTrial::Progress> all;
  all.reserve(scheduler_.running());
  for (const Sequence* s : scheduler_.running_sequences()) {
    if (!s->frozen) all.push_back({s->arrival, s->generated()});
  }
  return all;
}

void EngineLoop::FinishAll() {
  while (!pipeline_.empty()) FinishStep();
}

void EngineLoop::AfterStepsInFlight(std::function<void()> then) {
  if (pipeline_.empty()) return then();
  after_steps_.push_back({pipeline_.steps_begun(), std::move(then)});
}

void EngineLoop::ReportGenerated(const StepPipeline::Finished& step) const {
  if (on_generated_ == nullptr) return;
  std::map<std::string_view, int64_t> tokens;  // by tenant
  for (size_t i = 0; i < step.chunks.size(); ++i) {
    const Sequence& sequence = *step.chunks[i].sequence;
    if (sequence.state == Sequence::State::kEnded || !step.chunks[i].samples) continue;
    const std::vector<TokenId>& sampled = (*step.outputs)[i].tokens;
    const bool finite = !sampled.empty() && sampled.back() != StepOutput::kNotFinite;
    const int64_t count = static_cast<int64_t>(sampled.size()) - (finite ? 0 : 1);
    if (count > 0) tokens[sequence.request->base().tenant] += count;
  }
  for (const auto& [tenant, count] : tokens) on_generated_(std::string(tenant), count);
}

void EngineLoop::NoteStarted(Request* request, Instant now) {
  if (request->started) return;
  request->started = now;
  metrics_->QueueTime(Between(request->admitted, now));
  admission_->Started(*request);
}

void EngineLoop::Deliver(const Chunk& chunk, StepOutput output, const Request::StepEnd& step) {
  Sequence* const sequence = chunk.sequence;
  Request* const request = sequence->request;
  // The row of an ended sequence was computed in vain.
  if (sequence->state != Sequence::State::kEnded) {
    const int64_t generated = sequence->generated();
    if (chunk.samples && generated == 0) {
      metrics_->PromptTokens(sequence->prompt_tokens - sequence->cached_tokens,
                             sequence->cached_tokens);
      if (sequence->looked_up) {
        metrics_->PrefixCache(sequence->prompt_tokens, sequence->cached_tokens);
      }
    }
    const int64_t scored = sequence->scored;
    if (scheduler_.Verified(chunk)) pipeline_.Drop(*sequence);
    const bool ended = request->Accept(chunk, std::move(output), step);
    scheduler_.Computed(chunk);
    if (ended) scheduler_.Remove(sequence);
    metrics_->GeneratedTokens(sequence->generated() - generated);
    if (request->score) metrics_->ScoredTokens(sequence->scored - scored);
  }
  Land(chunk);
}

// Completes the request's end with the last of its chunks: they need its leases and weights.
void EngineLoop::Land(const Chunk& chunk) {
  const Sequence& sequence = *chunk.sequence;
  Request* const request = sequence.request;
  scheduler_.Landed(chunk);
  if (sequence.state != Sequence::State::kEnded || sequence.in_flight > 0) return;
  chunk.sequence->DropPins();
  if (--request->unfinished_sequences == 0) CompleteEnd(request);
}

// Ends the requests whose chunks are lost, except sequences that have already ended. REQUIRES: no
// step is in flight.
void EngineLoop::Fail(const std::vector<Chunk>& chunks, const absl::Status& status) {
  LogError("step failed", {{"error", std::string(status.message())}});
  std::set<Request*> failed;
  for (const Chunk& chunk : chunks) {
    if (chunk.sequence->state != Sequence::State::kEnded) failed.insert(chunk.sequence->request);
  }
  for (Request* request : failed) BeginEnd(request, {status, {}});
}

void EngineLoop::Sleep(const Engine::SleepOptions& options,
                       const std::function<void(absl::StatusOr<int64_t>)>& done) {
  // Rows in flight use the weights and the KV memory that sleep releases.
  FinishAll();
  if (!asleep_since_) asleep_since_ = SteadyNow();
  stalled_ = false;
  for (Request* request : admission_->Live()) {
    for (const auto& sequence : request->sequences) {
      sequence->DropPins();
      weights_.NoteGone(sequence.get());
    }
  }
  images_.Clear();
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
  if (go_on) asleep_since_.reset();
  PublishStats();
  return absl::OkStatus();
}

void EngineLoop::LimitGpuShare(const Engine::GpuShareLimit& options,
                               const std::function<void(absl::StatusOr<double>)>& done) {
  const Instant now = SteadyNow();
  const absl::Status status = gpu_share_limits_.Set(options.id, options.share,
                                                    now + absl::ToChronoNanoseconds(options.time));
  ApplyGpuShare(now);
  Answer(done, status.ok() ? absl::StatusOr<double>(limiter_.share()) : status);
}

void EngineLoop::EndGpuShareLimit(const std::string& id, const std::function<void(bool)>& done) {
  const bool ended = gpu_share_limits_.End(id);
  ApplyGpuShare(SteadyNow());
  Answer(done, ended);
}

void EngineLoop::ApplyGpuShare(Instant now) {
  gpu_share_limits_.EndOverdue(now);
  limiter_.SetShare(takes_all_time_ ? 1 : std::min(gpu_share_, gpu_share_limits_.share()), now);
}

void EngineLoop::SetGpuShare(double share) {
  gpu_share_ = share;
  ApplyGpuShare(SteadyNow());
}

void EngineLoop::TakeAllTime() {
  takes_all_time_ = true;
  ApplyGpuShare(SteadyNow());
}

void EngineLoop::ShrinkKv(int64_t bytes, const std::function<void(int64_t)>& done) {
  FinishAll();  // rows in flight may still write to free pages
  Answer(done, kv_released_ ? 0 : balloon_.Shrink(bytes, SteadyNow()));
}

void EngineLoop::PublishStats() {
  EngineStats stats;
  stats.running_sequences = static_cast<int>(scheduler_.running());
  stats.waiting_sequences = scheduler_.waiting();
  stats.kv_pages_total = pages_.total();
  stats.kv_pages_used = pages_.used();
  stats.kv_pages_cached = pages_.cached();
  stats.kv_pages_released = pages_.released();
  stats.kv_shrinkable_bytes = kv_released_ ? 0 : balloon_.shrinkable_bytes();
  stats.kv_short = may_step() && pages_.released() > 0 && scheduler_.shortage() > 0;
  stats.kv_page_tokens = static_cast<int>(kKvPageTokens);
  stats.kv_layer_groups = static_cast<int>(pages_.groups());
  stats.steps = pipeline_.steps_finished();
  stats.paused = pauses_.all();
  stats.asleep = asleep_since_.has_value();
  stats.gpu_share = limiter_.share();
  stats.paused_adapters = pauses_.stopped();
  stats.pending_pauses = pauses_.waiting();
  stats.frozen_requests = static_cast<int>(frozen_requests_);
  board_->Publish(std::move(stats));
}

}  // namespace dorad::engine
