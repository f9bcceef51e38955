#include "server/rpc/inference_service.h"

#include <memory>
#include <string>
#include <utility>

#include "server/platform/error.h"
#include "server/rpc/access.h"
#include "server/rpc/encode.h"
#include "server/rpc/generate_call.h"
#include "server/rpc/request_defaults.h"
#include "server/rpc/unary_call.h"

namespace dorad::rpc {
namespace {

using ScoreCall = UnaryCall<v1::ScoreResponse>;

// The engine's thread delivers the result; the response executor encodes it, so that the engine can
// start its next step.
std::shared_ptr<engine::ScoreTicket> MakeScoreTicket(const std::shared_ptr<ScoreCall>& call,
                                                     ThreadPool* executor, std::string request_id,
                                                     int32_t top_k) {
  return std::make_shared<engine::ScoreTicket>(
      [call, executor, request_id, top_k](absl::StatusOr<engine::ScoreResult> result) {
        auto shared = std::make_shared<absl::StatusOr<engine::ScoreResult>>(std::move(result));
        executor->Submit([call, shared, request_id, top_k] {
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

// The input with its leases, admitted by the tenant's quota.
absl::StatusOr<ParsedScore> Admit(const Services& services, const security::Principal& caller,
                                  const v1::ScoreRequest& request, CallRecord* record) {
  DORAD_ASSIGN_OR_RETURN(ParsedScore parsed,
                         ParseScore(request, services.limits(),
                                    {record->request_id(), ChooseSeed()}, services.shared_memory));
  record->set_request_id(parsed.input.request_id);
  if (parsed.adapters.size() == 1) record->NameAdapter(parsed.adapters.front());
  for (const adapter::AdapterRef& ref : parsed.adapters) {
    DORAD_RETURN_IF_ERROR(CheckAdapterAccess(caller, ref.name));
  }
  DORAD_RETURN_IF_ERROR(
      services.images->Resolve(caller.tenant, absl::MakeSpan(parsed.input.images)));
  for (const adapter::AdapterRef& ref : parsed.adapters) {
    DORAD_ASSIGN_OR_RETURN(adapter::AdapterLease lease, services.registry->Acquire(ref));
    parsed.input.leases.push_back(std::move(lease));
  }
  if (services.quotas != nullptr) {
    DORAD_RETURN_IF_ERROR(services.quotas->AdmitTokens(caller.tenant, TokensOf(parsed)));
  }
  parsed.input.tenant = caller.tenant;
  return parsed;
}

}  // namespace

InferenceService::InferenceService(Services* services)
    : RawService("dorad.v1.InferenceService", services) {
  AddStream<GenerateCall>("Generate",
                          [](const Services& of) { return MaxGenerateBytes(of.limits()); });
  AddUnary("Score", &InferenceService::Score,
           [](const Services& of) { return MaxScoreBytes(of.limits()); });
  AddUnary("Abort", &InferenceService::Abort);
}

absl::Status InferenceService::Score(const std::shared_ptr<ScoreCall>& call,
                                     const v1::ScoreRequest& request) {
  call->CountIn(&services_->open_requests);
  absl::StatusOr<ParsedScore> parsed = Admit(*services_, call->caller(), request, &call->record());
  if (!parsed.ok()) {
    services_->metrics->RequestRefused(RequestKind::kScore, ReasonOf(parsed.status()));
    return parsed.status();
  }
  const int64_t tokens = TokensOf(*parsed);
  engine::ScoreInput input = std::move(parsed->input);
  input.log = call->record().log();
  input.deadline = call->record().Deadline(services_->default_deadline());
  auto session_token =
      MakeScoreTicket(call, services_->response_executor, input.request_id, input.top_k);
  const absl::StatusOr<engine::RequestHandle> submitted =
      services_->engine->Submit(std::move(input), session_token);
  if (!submitted.ok()) {
    if (services_->quotas != nullptr) services_->quotas->TakeTokens(call->caller().tenant, -tokens);
    return submitted.status();
  }
  call->set_on_cancel(
      [request = *submitted, engine = services_->engine] { engine->Cancel(request); });
  return absl::OkStatus();
}

absl::Status InferenceService::Abort(const UnaryPtr<v1::AbortResponse>& call,
                                     const v1::AbortRequest& request) {
  DORAD_ASSIGN_OR_RETURN(engine::AbortTarget target, ParseAbort(request));
  DORAD_RETURN_IF_ERROR(CheckAdapterAccess(call->caller(), target.adapter.name));
  if (!request.allow_missing() || !target.adapter.digest.empty()) {
    DORAD_RETURN_IF_ERROR(services_->registry->CheckExists(target.adapter));
  }
  // Ids and "all" refer to the tenant's own requests.
  if (!call->caller().roles.Has(security::Role::kAdmin)) target.tenant = call->caller().tenant;
  services_->engine->Abort(std::move(target), "ended by Abort", [call](int aborted) {
    call->Complete([aborted](v1::AbortResponse* to) {
      to->set_aborted(static_cast<uint32_t>(aborted));
      return absl::OkStatus();
    });
  });
  return absl::OkStatus();
}

}  // namespace dorad::rpc
