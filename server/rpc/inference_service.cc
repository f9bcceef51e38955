#include "server/rpc/inference_service.h"

#include <memory>
#include <string>
#include <utility>

#include "server/base/error.h"
#include "server/rpc/access.h"
#include "server/rpc/encode.h"
#include "server/rpc/generate_reactor.h"
#include "server/rpc/request_defaults.h"
#include "server/rpc/unary_call.h"

namespace dorad::rpc {
namespace {

using ScoreCall = UnaryCall<v1::ScoreResponse>;

// The ticket of a score: encodes the result on a courier, because the engine's thread, which
// delivers it, has the next step to start.
std::shared_ptr<engine::ScoreTicket> MakeTicket(const std::shared_ptr<ScoreCall>& call,
                                                ThreadPool* couriers, std::string request_id,
                                                int32_t top_k) {
  return std::make_shared<engine::ScoreTicket>(
      [call, couriers, request_id, top_k](absl::StatusOr<engine::ScoreResult> result) {
        auto shared = std::make_shared<absl::StatusOr<engine::ScoreResult>>(std::move(result));
        couriers->Submit([call, shared, request_id, top_k] {
          call->Complete([&](v1::ScoreResponse* response) {
            if (shared->ok()) Encode(request_id, top_k, **shared, response);
            return shared->status();
          });
        });
      });
}

// Sequences count once for each adapter.
int64_t TokensOf(const ParsedScore& parsed) {
  int64_t tokens = 0;
  for (const auto& sequence : parsed.input.sequences) {
    tokens += static_cast<int64_t>(sequence.size());
  }
  return tokens * static_cast<int64_t>(parsed.adapters.size());
}

absl::StatusOr<ParsedScore> Admit(const Services& services, const security::Principal& caller,
                                  const v1::ScoreRequest& request, CallRecord* record) {
  absl::StatusOr<ParsedScore> parsed =
      ParseScore(request, services.limits(), {record->request_id(), ChooseSeed()});
  absl::Status status = parsed.status();
  if (status.ok()) {
    record->set_request_id(parsed->input.request_id);
    if (parsed->adapters.size() == 1) record->NameAdapter(parsed->adapters.front());
  }
  for (size_t i = 0; status.ok() && i < parsed->adapters.size(); ++i) {
    status = CheckAdapterAccess(caller, parsed->adapters[i].name);
  }
  for (size_t i = 0; status.ok() && i < parsed->adapters.size(); ++i) {
    absl::StatusOr<adapter::AdapterLease> lease = services.registry->Acquire(parsed->adapters[i]);
    status = lease.status();
    if (status.ok()) parsed->input.leases.push_back(*std::move(lease));
  }
  if (status.ok() && services.quotas != nullptr) {
    status = services.quotas->AdmitTokens(caller.tenant, TokensOf(*parsed));
  }
  if (status.ok()) {
    parsed->input.tenant = caller.tenant;
    return parsed;
  }
  services.metrics->RequestRefused(RequestKind::kScore, ReasonOf(status));
  return status;
}

}  // namespace

InferenceService::InferenceService(Services* services)
    : LateService("dorad.v1.InferenceService", services) {
  AddServerStream<GenerateReactor>("Generate");
  AddUnary("Score", &InferenceService::Score,
           [](const Services& of) { return MaxScoreBytes(of.limits()); });
  AddUnary("Abort", &InferenceService::Abort);
}

void InferenceService::Score(const std::shared_ptr<ScoreCall>& call,
                             const v1::ScoreRequest& request) {
  call->CountIn(&services_->open_requests);
  absl::StatusOr<ParsedScore> parsed = Admit(*services_, call->caller(), request, &call->record());
  if (!parsed.ok()) return call->End(parsed.status());
  const int64_t tokens = TokensOf(*parsed);
  engine::ScoreInput input = std::move(parsed->input);
  input.log = call->record().log();
  input.deadline = call->record().Deadline(services_->default_deadline());
  auto ticket = MakeTicket(call, services_->couriers, input.request_id, input.top_k);
  const absl::Status status = services_->engine->Submit(std::move(input), ticket);
  if (!status.ok()) {
    if (services_->quotas != nullptr) services_->quotas->TakeTokens(call->caller().tenant, -tokens);
    return call->End(status);
  }
  call->set_on_cancel([ticket, engine = services_->engine] {
    ticket->Cancel();
    engine->NoteCancelled();
  });
}

void InferenceService::Abort(const std::shared_ptr<UnaryCall<v1::AbortResponse>>& call,
                             const v1::AbortRequest& request) {
  absl::StatusOr<engine::AbortTarget> target = ParseAbort(request);
  absl::Status status = target.status();
  if (status.ok()) status = CheckAdapterAccess(call->caller(), target->adapter.name);
  if (!status.ok()) return call->End(status);
  // Ids and "all" mean the tenant's own requests.
  if (!call->caller().roles.Has(security::Role::kAdmin)) target->tenant = call->caller().tenant;
  services_->engine->Abort(*std::move(target), "ended by Abort", [call](int aborted) {
    call->Complete([aborted](v1::AbortResponse* to) {
      to->set_aborted(static_cast<uint32_t>(aborted));
      return absl::OkStatus();
    });
  });
}

}  // namespace dorad::rpc
