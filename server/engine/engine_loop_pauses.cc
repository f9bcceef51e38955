// The effect of pauses on requests, and the answers to their callers.
#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "server/engine/engine_loop.h"
#include "server/platform/error.h"

namespace dorad::engine {
namespace {

absl::Status Superseded(std::string_view why) {
  return MakeError(absl::StatusCode::kAborted, "PAUSE_SUPERSEDED", why);
}

}  // namespace

void EngineLoop::Pause(const Engine::PauseOptions& options, uint64_t pause_id,
                       Engine::PauseDone done) {
  const adapter::AdapterRef& scope = options.scope;
  if (const absl::Status room = pauses_.CheckRoom(scope, options.tenant); !room.ok()) {
    Answer(done, room);
    return;
  }
  switch (options.mode) {
    case PauseMode::kAbort: {
      Supersede(pauses_.RemoveWaitersWithin(scope));
      pauses_.Begin(scope, options.tenant);
      const int aborted =
          AbortMatching({.adapter = scope, .all = scope.is_base()}, "the engine was paused");
      FollowPauses();
      AfterStepsInFlight([this, aborted, done = std::move(done)] { Answer(done, aborted); });
      return;
    }
    case PauseMode::kKeep:
      if (pauses_.IsPartOfWait(scope)) {
        // Frozen requests would never end; the wider pause would wait forever.
        Answer(done, Superseded("a wider pause waits for these requests to end"));
        return;
      }
      Supersede(pauses_.RemoveWaitersWithin(scope));
      FinishAll();  // no token may follow the answer
      pauses_.Begin(scope, options.tenant);
      FollowPauses();
      Answer(done, CountCovered(scope));
      return;
    case PauseMode::kWait:
      pauses_.Wait(scope, options.tenant, {pause_id, CountCovered(scope), std::move(done)});
      FollowPauses();
      return;
  }
}

void EngineLoop::CancelPause(uint64_t pause_id) {
  const std::optional<Pauses::Waiter> cancelled = pauses_.Cancel(pause_id);
  if (!cancelled) return;
  FollowPauses();
  Answer(cancelled->done,
         MakeError(absl::StatusCode::kCancelled, "CLIENT_CANCELLED", "the pause was cancelled"));
}

void EngineLoop::Resume(const adapter::AdapterRef& scope, const std::function<void()>& done) {
  pauses_.End(scope);
  Supersede(pauses_.RemoveWaiters(scope));
  FollowPauses();
  Answer(done);
}

// Fails the waiters of a superseded pause.
void EngineLoop::Supersede(const std::vector<Pauses::Waiter>& waiters) {
  for (const Pauses::Waiter& waiter : waiters) {
    Answer(waiter.done, Superseded("another pause or a resume came before the engine was idle"));
  }
}

// Call after every change of pauses_.
void EngineLoop::FollowPauses() {
  const std::vector<Request*> live = admission_->Live();
  const bool stops_some = std::any_of(live.begin(), live.end(), [&](const Request* request) {
    return !request->ending && !request->frozen && pauses_.Freezes(*request);
  });
  if (stops_some) FinishAll();  // a frozen request has no row in flight
  for (Request* request : stops_some ? admission_->Live() : live) FreezeOrThaw(request);
  admission_->SetRefused(pauses_.refused());
}

// Only for pauses of adapters; a pause of everything stops the engine instead.
void EngineLoop::FreezeOrThaw(Request* request) {
  if (request->ending) return;
  const bool frozen = pauses_.Freezes(*request);
  if (frozen == request->frozen) return;
  request->frozen = frozen;
  frozen_requests_ += frozen ? 1 : -1;
  for (const auto& sequence : request->sequences) {
    scheduler_.SetFrozen(sequence.get(), frozen);
    if (frozen) weights_.NoteGone(sequence.get());
    // Its weights may be evicted meanwhile.
    if (frozen && sequence->in_flight == 0) sequence->DropPins();
  }
}

int EngineLoop::CountCovered(const adapter::AdapterRef& scope) const {
  const std::vector<Request*> live = admission_->Live();
  return static_cast<int>(std::count_if(live.begin(), live.end(), [&](const Request* request) {
    return Pauses::Covers(scope, *request);
  }));
}

// The witness is a request that had not ended at the last call: usually it still has not.
bool EngineLoop::AllHaveEnded(const adapter::AdapterRef& scope, std::string* witness) const {
  const Request* const known = admission_->Find(*witness);
  if (known != nullptr && Pauses::Covers(scope, *known)) return false;
  for (const Request* request : admission_->Live()) {
    if (!Pauses::Covers(scope, *request)) continue;
    *witness = request->key();
    return false;
  }
  return true;
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

}  // namespace dorad::engine
