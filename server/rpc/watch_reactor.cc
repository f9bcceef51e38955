#include "server/rpc/watch_reactor.h"

#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/rpc/encode.h"

namespace dorad::rpc {
namespace {

constexpr char kMethod[] = "Watch";

absl::StatusOr<int64_t> StartGeneration(const v1::WatchRequest& request, int64_t current) {
  if (!request.has_from_generation()) return current;
  const int64_t from = request.from_generation();
  if (from < 0) {
    return MakeInvalid("WatchRequest", {{"from_generation", "GENERATION_INVALID",
                                         absl::StrCat(from, " is negative")}});
  }
  return from;
}

}  // namespace

grpc::ServerWriteReactor<v1::WatchResponse>* WatchReactor::Start(
    Services* services, grpc::CallbackServerContext* context, const v1::WatchRequest& request) {
  auto reactor = std::make_shared<WatchReactor>(services, context);
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

WatchReactor::WatchReactor(Services* services, grpc::CallbackServerContext* context)
    : services_(services), record_(kMethod, context, services->metrics) {}

absl::Status WatchReactor::Begin(const v1::WatchRequest& request) {
  DORAD_ASSIGN_OR_RETURN(const int64_t from,
                         StartGeneration(request, services_->registry->generation()));
  // Events that are gone or have not happened are refused before the stream opens.
  DORAD_RETURN_IF_ERROR(services_->registry->EventsAfter(from, 1).status());
  {
    absl::MutexLock lock(&mu_);
    generation_ = from;
    // Tells the client that from now on no event will be missed.
    StartSendInitialMetadata();
  }
  subscription_ = services_->registry->Subscribe([this] { Wake(); });
  Pump();
  return absl::OkStatus();
}

void WatchReactor::Wake() {
  if (wake_posted_.exchange(true)) return;
  services_->couriers->Submit([self = shared_from_this()] {
    self->wake_posted_ = false;
    self->Pump();
  });
}

void WatchReactor::Pump() {
  Guarded(
      kMethod,
      [this] {
        absl::MutexLock lock(&mu_);
        PumpLocked();
      },
      [this](const absl::Status& status) { Abandon(status); });
}

void WatchReactor::PumpLocked() {
  if (writing_ || ended_) return;
  if (abandoned_) {
    EndLocked(*abandoned_);
    return;
  }
  if (events_.empty()) {
    absl::StatusOr<std::vector<adapter::RegistryEvent>> events =
        services_->registry->EventsAfter(generation_, kBatch);
    if (!events.ok()) {
      EndLocked(events.status());
      return;
    }
    events_.assign(std::make_move_iterator(events->begin()),
                   std::make_move_iterator(events->end()));
  }
  if (events_.empty()) return;
  Encode(events_.front(), &response_);
  generation_ = events_.front().generation;
  events_.pop_front();
  writing_ = true;
  StartWrite(&response_);
}

void WatchReactor::Abandon(const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  if (writing_) {
    abandoned_ = status;
  } else {
    EndLocked(status);
  }
}

void WatchReactor::EndLocked(const absl::Status& status) {
  if (ended_) return;
  ended_ = true;
  Finish(record_.End(status));
}

void WatchReactor::OnWriteDone(bool ok) {
  {
    absl::MutexLock lock(&mu_);
    writing_ = false;
    if (!ok && !abandoned_) abandoned_ = record_.CancelStatus();
  }
  Pump();
}

void WatchReactor::OnCancel() {
  absl::Status status;
  {
    absl::MutexLock lock(&mu_);
    status = record_.CancelStatus();
  }
  Abandon(status);
}

void WatchReactor::OnDone() {
  if (subscription_) services_->registry->Unsubscribe(*subscription_);
  auto self = std::move(self_);
}

}  // namespace dorad::rpc
