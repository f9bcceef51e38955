#include "server/rpc/generate_reactor.h"

#include <utility>

#include "server/base/error.h"
#include "server/rpc/request_defaults.h"

namespace dorad::rpc {
namespace {

constexpr char kMethod[] = "Generate";

}  // namespace

grpc::ServerWriteReactor<v1::GenerateResponse>* GenerateReactor::Start(
    Services* services, grpc::CallbackServerContext* context, const v1::GenerateRequest& request) {
  auto reactor = std::make_shared<GenerateReactor>(services, context);
  reactor->self_ = reactor;
  Guarded(
      kMethod,
      [&] {
        const absl::Status status = reactor->Begin(request);
        if (!status.ok()) reactor->Abandon(status);
      },
      [&](const absl::Status& status) { reactor->Abandon(status); });
  return reactor.get();
}

GenerateReactor::GenerateReactor(Services* services, grpc::CallbackServerContext* context)
    : services_(services), record_(kMethod, context, services->metrics) {
  ++services_->open_streams;
}

absl::Status GenerateReactor::Begin(const v1::GenerateRequest& request) {
  absl::StatusOr<engine::GenerateInput> parsed =
      ParseGenerate(request, services_->limits, ChooseDefaults());
  absl::Status status = parsed.status();
  if (status.ok()) {
    absl::StatusOr<adapter::AdapterLease> lease = services_->registry->Acquire(parsed->adapter);
    status = lease.status();
    if (status.ok()) parsed->lease = *std::move(lease);
  }
  if (!status.ok()) {
    services_->metrics->RequestRefused(RequestKind::kGenerate, ReasonOf(status));
    return status;
  }
  header_.request_id = parsed->request_id;
  header_.seed = parsed->sampling.seed;
  header_.top_logprobs = parsed->logprobs.top_k;
  {
    absl::MutexLock lock(&mu_);
    record_.set_request_id(header_.request_id);
    parsed->deadline = record_.Deadline(services_->default_deadline);
  }
  const bool final_only = request.response_mode() != v1::RESPONSE_MODE_STREAM;
  stream_ = std::make_shared<engine::TokenStream>(final_only);
  stream_->SetWaker([this] { Wake(); });
  return services_->engine->Submit(*std::move(parsed), stream_);
}

// On the engine's thread, under the stream's lock: must not touch the stream or take mu_.
void GenerateReactor::Wake() {
  if (wake_posted_.exchange(true)) return;
  services_->couriers->Submit([self = shared_from_this()] {
    // Before the stream is looked at, so that nothing pushed after that goes unnoticed.
    self->wake_posted_ = false;
    self->Pump();
  });
}

void GenerateReactor::Pump() {
  Guarded(
      kMethod,
      [this] {
        absl::MutexLock lock(&mu_);
        PumpLocked();
      },
      [this](const absl::Status& status) { Abandon(status); });
}

void GenerateReactor::PumpLocked() {
  if (writing_ || ended_) return;
  if (abandoned_) {
    EndLocked(*abandoned_);
    return;
  }
  if (const std::optional<engine::SampleDelta> delta = stream_->Take()) {
    Encode(header_, *delta, &response_);
    writing_ = true;
    StartWrite(&response_);
  } else if (const std::optional<absl::Status> status = stream_->Ended()) {
    EndLocked(*status);
  }
}

// The call ends without what is still to come: now, or when the outstanding write is done.
void GenerateReactor::Abandon(const absl::Status& status) {
  if (stream_) {
    stream_->Cancel();
    services_->engine->NoteCancelled();
  }
  absl::MutexLock lock(&mu_);
  if (writing_) {
    abandoned_ = status;
  } else {
    EndLocked(status);
  }
}

void GenerateReactor::EndLocked(const absl::Status& status) {
  if (ended_) return;
  ended_ = true;
  Finish(record_.End(status));
}

void GenerateReactor::OnWriteDone(bool ok) {
  {
    absl::MutexLock lock(&mu_);
    writing_ = false;
    // OnCancel, which knows why, comes as well.
    if (!ok && !abandoned_) abandoned_ = record_.CancelStatus();
  }
  if (!ok) {
    stream_->Cancel();
    services_->engine->NoteCancelled();
  }
  Pump();
}

void GenerateReactor::OnCancel() {
  absl::Status status;
  {
    absl::MutexLock lock(&mu_);
    status = record_.CancelStatus();
  }
  Abandon(status);
}

void GenerateReactor::OnDone() {
  if (stream_) stream_->SetWaker(nullptr);
  --services_->open_streams;
  auto self = std::move(self_);
}

}  // namespace dorad::rpc
