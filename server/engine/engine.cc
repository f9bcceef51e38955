#include "server/engine/engine.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "server/engine/admission.h"
#include "server/engine/engine_loop.h"
#include "server/engine/kv_needs.h"
#include "server/engine/model_runner.h"
#include "server/engine/request.h"
#include "server/engine/stats_board.h"

namespace dorad::engine {
namespace {

EngineLimits LimitsOf(const EngineOptions& options, int64_t kv_tokens) {
  EngineLimits limits;
  limits.vocab_size = options.vocab_size;
  limits.image_token_ids = options.image_token_ids;
  limits.images = options.images;
  // A sequence that does not fit into all pages together could never finish.
  limits.context_length = std::min(options.context_length, kv_tokens);
  limits.max_tokens = options.max_tokens > 0 ? std::min(options.max_tokens, limits.context_length)
                                             : limits.context_length;
  limits.max_n = options.max_n;
  limits.max_logprobs_k = options.max_logprobs_k;
  limits.max_chosen_ids = options.max_chosen_ids;
  limits.max_stop_ids = options.max_stop_ids;
  limits.max_stop_sequences = options.max_stop_sequences;
  limits.max_stop_sequence_tokens = options.max_stop_sequence_tokens;
  limits.max_logit_biases = options.max_logit_biases;
  limits.max_allowed_ids = options.max_allowed_ids;
  limits.max_bad_word_tokens = options.max_bad_word_tokens;
  limits.max_draft_tokens = options.max_draft_tokens;
  limits.ngram_drafts = options.ngram_drafts;
  limits.max_score_tokens = options.max_score_tokens;
  limits.max_queued_requests = options.max_queued_requests;
  limits.max_queued_tokens = options.max_queued_tokens;
  return limits;
}

}  // namespace

struct Engine::Impl {
  Impl(const EngineOptions& options, std::unique_ptr<ModelRunner> runner, Metrics* metrics)
      : prefix_cache(options.prefix_cache),
        kv_tokens(NeedsOf(*runner, options.max_step_tokens).TokensIn(runner->kv_pages())),
        rules{options.eos_token_ids, LimitsOf(options, kv_tokens).context_length},
        admission(LimitsOf(options, kv_tokens), metrics),
        loop(options, rules, std::move(runner), &admission, &board, metrics),
        thread([this] {
          pthread_setname_np(pthread_self(), "engine");
          loop.Run();
        }) {}

  ~Impl() {
    admission.Close();
    thread.join();
  }

  absl::StatusOr<RequestHandle> Submit(std::unique_ptr<Request> request) {
    // Not on the engine thread: a large Score has thousands of sequences.
    request->MakeSequences(rules, prefix_cache);
    return admission.Admit(std::move(request), [this](Request* entering) { loop.Enter(entering); });
  }

  const bool prefix_cache;
  const int64_t kv_tokens;
  const StopRules rules;
  std::atomic<uint64_t> pause_ids{0};
  Admission admission;
  StatsBoard board;
  EngineLoop loop;
  std::thread thread;  // last: starts when everything else exists
};

Engine::Engine(const EngineOptions& options, std::unique_ptr<ModelRunner> runner, Metrics* metrics)
    : impl_(std::make_unique<Impl>(options, std::move(runner), metrics)) {}

Engine::~Engine() = default;

EngineLimits Engine::limits() const { return impl_->admission.limits(); }

void Engine::SetLimits(const EngineOptions& options) {
  impl_->admission.SetLimits(LimitsOf(options, impl_->kv_tokens));
}

void Engine::SetGpuShare(double share) {
  impl_->admission.Post([loop = &impl_->loop, share] { loop->SetGpuShare(share); });
}

absl::StatusOr<RequestHandle> Engine::Submit(GenerateInput input,
                                             std::shared_ptr<TokenStream> stream) {
  return impl_->Submit(std::make_unique<Request>(std::move(input), std::move(stream), SteadyNow()));
}

absl::StatusOr<RequestHandle> Engine::Submit(ScoreInput input,
                                             std::shared_ptr<ScoreTicket> ticket) {
  return impl_->Submit(std::make_unique<Request>(std::move(input), std::move(ticket), SteadyNow()));
}

void Engine::Cancel(RequestHandle request) {
  impl_->admission.Post(
      [loop = &impl_->loop, request = std::move(request)] { loop->Cancel(request); });
}

void Engine::NoteActivated() {
  impl_->admission.Post([loop = &impl_->loop] { loop->NoteActivated(); });
}

void Engine::Abort(AbortTarget target, std::string detail, std::function<void(int)> done) {
  impl_->admission.Post([loop = &impl_->loop, target = std::move(target),
                         detail = std::move(detail),
                         done = std::move(done)] { loop->Abort(target, detail, done); });
}

uint64_t Engine::Pause(PauseOptions options, PauseDone done) {
  const uint64_t pause_id = ++impl_->pause_ids;
  impl_->admission.Post(
      [loop = &impl_->loop, pause_id, options = std::move(options),
       done = std::move(done)]() mutable { loop->Pause(options, pause_id, std::move(done)); });
  return pause_id;
}

void Engine::CancelPause(uint64_t pause_id) {
  impl_->admission.Post([loop = &impl_->loop, pause_id] { loop->CancelPause(pause_id); });
}

void Engine::Resume(const adapter::AdapterRef& scope, std::function<void()> done) {
  impl_->admission.Post(
      [loop = &impl_->loop, scope, done = std::move(done)] { loop->Resume(scope, done); });
}

void Engine::Sleep(SleepOptions options, std::function<void(absl::StatusOr<int64_t>)> done) {
  if (options.refuse) impl_->admission.SetSleeping(/*refuses=*/true);
  impl_->admission.Post(
      [loop = &impl_->loop, options, done = std::move(done)] { loop->Sleep(options, done); });
}

void Engine::Wake(bool kv, bool go_on, std::function<void(absl::Status)> done) {
  impl_->admission.Post(
      [admission = &impl_->admission, loop = &impl_->loop, kv, go_on, done = std::move(done)] {
        const absl::Status status = loop->Wake(kv, go_on);
        if (status.ok() && go_on) admission->SetSleeping(/*refuses=*/false);
        done(status);
      });
}

void Engine::LimitGpuShare(GpuShareLimit options,
                           std::function<void(absl::StatusOr<double>)> done) {
  impl_->admission.Post([loop = &impl_->loop, options = std::move(options),
                         done = std::move(done)] { loop->LimitGpuShare(options, done); });
}

void Engine::EndGpuShareLimit(std::string id, std::function<void(bool)> done) {
  impl_->admission.Post([loop = &impl_->loop, id = std::move(id), done = std::move(done)] {
    loop->EndGpuShareLimit(id, done);
  });
}

void Engine::ShrinkKv(int64_t bytes, std::function<void(int64_t)> done) {
  impl_->admission.Post(
      [loop = &impl_->loop, bytes, done = std::move(done)] { loop->ShrinkKv(bytes, done); });
}

EngineStats Engine::stats() const {
  EngineStats stats = impl_->board.stats();
  const Admission::Queue queue = impl_->admission.queue();
  stats.requests = static_cast<int>(impl_->admission.live_count());
  stats.queued_requests = static_cast<int>(queue.requests);
  stats.queued_tokens = queue.tokens;
  return stats;
}

AdaptersInUse Engine::adapters_in_use() const { return impl_->admission.adapters_in_use(); }

absl::Duration Engine::time_since_heartbeat() const { return impl_->board.age(); }

void Engine::StopAdmission() {
  impl_->admission.StopAdmission();
  impl_->admission.Post([loop = &impl_->loop] { loop->TakeAllTime(); });
}

bool Engine::idle() const { return impl_->admission.idle(); }

}  // namespace dorad::engine
