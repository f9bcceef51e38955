#include "server/rpc/generate_call.h"

#include <optional>
#include <utility>

#include "server/platform/error.h"
#include "server/rpc/access.h"
#include "server/rpc/request_defaults.h"

namespace dorad::rpc {

absl::Status GenerateCall::OnMessage(grpc::ByteBuffer* bytes) {
  v1::GenerateRequest request;
  DORAD_RETURN_IF_ERROR(Parse(bytes, &request));
  CountIn(&services_->open_requests);
  absl::StatusOr<engine::GenerateInput> input = Admit(request);
  if (!input.ok()) {
    services_->metrics->RequestRefused(RequestKind::kGenerate, ReasonOf(input.status()));
    return input.status();
  }
  if (!input->images.empty()) {
    // Tells the client that the server has the images. No write can have begun.
    absl::MutexLock lock(&mu_);
    StartSendInitialMetadata();
  }
  input->tenant = caller().tenant;
  input->log = record_.log();
  input->deadline = record_.Deadline(services_->default_deadline());
  header_ = {input->request_id, input->sampling.seed, input->logprobs.top_k};
  const auto prompt_tokens = static_cast<int64_t>(input->prompt.size());
  const bool final_only = request.response_mode() != v1::RESPONSE_MODE_STREAM;
  stream_ = std::make_shared<engine::TokenStream>(final_only);
  stream_->SetWaker([this] { Wake(); });
  const absl::StatusOr<engine::RequestHandle> request_handle =
      services_->engine->Submit(*std::move(input), stream_);
  if (request_handle.ok()) {
    request_ = *request_handle;
  } else if (services_->quotas != nullptr) {
    services_->quotas->TakeTokens(caller().tenant, -prompt_tokens);
  }
  return request_handle.status();
}

absl::StatusOr<engine::GenerateInput> GenerateCall::Admit(const v1::GenerateRequest& request) {
  DORAD_ASSIGN_OR_RETURN(
      engine::GenerateInput input,
      ParseGenerate(request, services_->limits(), {record_.request_id(), ChooseSeed()},
                    services_->shared_memory));
  DORAD_RETURN_IF_ERROR(CheckAdapterAccess(caller(), input.adapter.name));
  record_.set_request_id(input.request_id);
  record_.NameAdapter(input.adapter);
  DORAD_RETURN_IF_ERROR(services_->images->Resolve(caller().tenant, {&input.images, 1}));
  DORAD_ASSIGN_OR_RETURN(input.lease, services_->registry->Acquire(input.adapter));
  if (input.in_flight != engine::InFlightPolicy::kPin) {
    input.follow = [registry = services_->registry, name = input.adapter] {
      return registry->Acquire(name);
    };
  }
  if (services_->quotas != nullptr) {
    DORAD_RETURN_IF_ERROR(
        services_->quotas->AdmitTokens(caller().tenant, static_cast<int64_t>(input.prompt.size())));
  }
  return input;
}

GenerateCall::Turn GenerateCall::Next() {
  if (const std::optional<engine::SampleDelta> delta = stream_->Take()) {
    Encode(header_, *delta, &response_);
    return {.message = &response_};
  }
  return {.end = stream_->Ended()};
}

void GenerateCall::CancelWork() {
  if (request_) services_->engine->Cancel(*request_);
}

void GenerateCall::Release() {
  if (stream_) stream_->SetWaker(nullptr);
}

}  // namespace dorad::rpc
