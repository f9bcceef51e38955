// The ends of requests: deadline, cancel, abort, missing weights. An end does not delay the steps
// in flight. BeginEnd takes the request out of the scheduler at once; CompleteEnd closes its stream
// after its last row has landed.
#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/engine_loop.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::engine {

// Frees the pages at once: steps are computed in order, so a new owner writes after the rows in
// flight. Leases and weights stay until those rows have landed. The first of several ends counts.
void EngineLoop::BeginEnd(Request* request, Request::Ending how) {
  if (request->ending) return;
  request->ending = std::move(how);
  deadlines_.erase({request->wake_up, request});
  NoteStarted(request, SteadyNow());  // ends its queue time if it never ran
  for (const auto& sequence : request->sequences) {
    if (sequence->state == Sequence::State::kEnded) continue;
    scheduler_.Remove(sequence.get());
    if (sequence->in_flight > 0) continue;
    sequence->DropPins();
    --request->unfinished_sequences;
  }
  if (request->unfinished_sequences == 0) CompleteEnd(request);
}

// The only way out of the engine. Releases pages and leases before the client learns of the end.
// The request stays allocated until the end of the turn: the current step may still refer to it.
// REQUIRES: none of its chunks is in flight.
void EngineLoop::CompleteEnd(Request* request) {
  for (const auto& sequence : request->sequences) {
    DORAD_CHECK(sequence->state == Sequence::State::kEnded && sequence->in_flight == 0);
    weights_.NoteGone(sequence.get());
  }
  deadlines_.erase({request->wake_up, request});
  frozen_requests_ -= request->frozen ? 1 : 0;
  finished_requests_.push_back(admission_->Ended(request));
  request->End(request->ending.value_or(Request::Ending()), SteadyNow(), metrics_);
}

// A request that is stopped ends a little before its deadline, so that the explanation reaches the
// caller before his own clock ends the call. It must have been stopped for longer than the time
// that is left: it would most likely not run again.
void EngineLoop::EndOverdue() {
  const Instant now = SteadyNow();
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    Request* const request = deadlines_.begin()->second;
    const std::optional<Hindrance> hindrance = HindranceOf(*request, now);
    if (hindrance && now - hindrance->since >= request->deadline - now) {
      BeginEnd(request,
               {WithMetadata(MakeError(absl::StatusCode::kDeadlineExceeded, "DEADLINE_EXCEEDED",
                                       absl::StrCat("the deadline came while the request "
                                                    "waited: ",
                                                    hindrance->text)),
                             "waited_for", hindrance->waited_for),
                {}});
    } else if (request->deadline <= now) {
      BeginEnd(request, {MakeError(absl::StatusCode::kDeadlineExceeded, "DEADLINE_EXCEEDED",
                                   "the deadline passed"),
                         {}});
    } else {
      deadlines_.erase(deadlines_.begin());
      request->wake_up = request->deadline;
      deadlines_.insert({request->wake_up, request});
    }
  }
}

std::optional<EngineLoop::Hindrance> EngineLoop::HindranceOf(const Request& request,
                                                             Instant now) const {
  if (asleep_since_) {
    return Hindrance{*asleep_since_, "sleep",
                     absl::StrCat("the server has slept for ", ShortTime(*asleep_since_, now),
                                  "; Wake ends the sleep")};
  }
  if (const auto stop = pauses_.StopOf(request)) {
    return Hindrance{stop->since, "pause", Pauses::Explain(*stop, now)};
  }
  if (const auto since = weights_.StalledSince(request)) {
    return Hindrance{*since, "weights",
                     absl::StrCat("its adapter's weights were evicted, and there has been no room "
                                  "for them for ",
                                  ShortTime(*since, now))};
  }
  return std::nullopt;
}

void EngineLoop::Cancel(const RequestHandle& handle) {
  Request* const request = admission_->Find(handle.key);
  if (request == nullptr || request->number != handle.number) return;
  BeginEnd(request, {MakeError(absl::StatusCode::kCancelled, "CLIENT_CANCELLED",
                               "the client cancelled the request"),
                     {}});
}

// Ends the requests that wait for weights whose reload failed.
void EngineLoop::EndWithoutWeights() {
  for (const auto& [entries, status] : weights_.TakeFailures()) {
    std::vector<Request*> waiting;
    for (Request* request : admission_->Live()) {
      if (WeightsGate::IsConcerned(*request, entries)) waiting.push_back(request);
    }
    for (Request* request : waiting) BeginEnd(request, {status, {}});
  }
}

// Returns the number of requests it ends.
int EngineLoop::AbortMatching(const AbortTarget& target, const std::string& detail) {
  std::vector<Request*> matching;
  for (Request* request : admission_->Live()) {
    if (request->ending) continue;
    if (target.tenant && *target.tenant != request->base().tenant) continue;
    if (target.all || (!target.adapter.is_base() && request->Holds(target.adapter)) ||
        std::find(target.request_ids.begin(), target.request_ids.end(),
                  request->base().request_id) != target.request_ids.end()) {
      matching.push_back(request);
    }
  }
  for (Request* request : matching) BeginEnd(request, {absl::OkStatus(), detail});
  return static_cast<int>(matching.size());
}

void EngineLoop::Abort(const AbortTarget& target, const std::string& detail,
                       const std::function<void(int)>& done) {
  const int aborted = AbortMatching(target, detail);
  AfterStepsInFlight([this, aborted, done] { Answer(done, aborted); });
}

}  // namespace dorad::engine
