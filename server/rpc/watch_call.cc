#include "server/rpc/watch_call.h"

#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/platform/error.h"
#include "server/rpc/encode.h"
#include "server/security/authority.h"

namespace dorad::rpc {
namespace {

constexpr int kBatch = 64;  // events held at once

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

absl::Status WatchCall::OnMessage(grpc::ByteBuffer* bytes) {
  v1::WatchRequest request;
  DORAD_RETURN_IF_ERROR(Parse(bytes, &request));
  DORAD_ASSIGN_OR_RETURN(const int64_t from,
                         StartGeneration(request, services_->registry->generation()));
  // Events that are dropped or still to come are refused before the stream opens.
  DORAD_RETURN_IF_ERROR(services_->registry->EventsAfter(from, 1).status());
  {
    absl::MutexLock lock(&mu_);
    generation_ = from;
    // Tells the client that the subscription is active.
    StartSendInitialMetadata();
  }
  subscription_ = services_->registry->Subscribe([this] { Wake(); });
  if (services_->authority != nullptr) {
    rights_subscription_ = services_->authority->Subscribe([this] { Wake(); });
  }
  Pump();
  return absl::OkStatus();
}

WatchCall::Turn WatchCall::Next() {
  // Without this check a watch could outlive its token by months.
  if (const absl::Status rights = record_.CheckRights(); !rights.ok()) return {.end = rights};
  while (true) {
    if (events_.empty()) {
      absl::StatusOr<std::vector<adapter::RegistryEvent>> events =
          services_->registry->EventsAfter(generation_, kBatch);
      if (!events.ok()) return {.end = events.status()};
      events_.assign(std::make_move_iterator(events->begin()),
                     std::make_move_iterator(events->end()));
    }
    if (events_.empty()) return {};
    const adapter::RegistryEvent event = std::move(events_.front());
    events_.pop_front();
    generation_ = event.generation;
    // Hides other tenants' adapters.
    if (!caller().MayTouch(event.adapter.name)) continue;
    Encode(event, &response_);
    return {.message = &response_};
  }
}

void WatchCall::Release() {
  if (subscription_) services_->registry->Unsubscribe(*subscription_);
  if (rights_subscription_) services_->authority->Unsubscribe(*rights_subscription_);
}

}  // namespace dorad::rpc
