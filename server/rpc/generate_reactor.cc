#include "server/rpc/generate_reactor.h"

#include <optional>
#include <utility>

#include "server/base/error.h"
#include "server/rpc/request_defaults.h"

namespace dorad::rpc {

GenerateReactor::GenerateReactor(Services* services, grpc::CallbackServerContext* context)
    : PumpedWriter("Generate", services, context) {}

int64_t GenerateReactor::MaxRequestBytes() const { return MaxGenerateBytes(services_->limits()); }

absl::Status GenerateReactor::Begin(const v1::GenerateRequest& request) {
  open_.emplace(&services_->open_requests);
  absl::StatusOr<engine::GenerateInput> parsed =
      ParseGenerate(request, services_->limits(), {ChosenRequestId(), ChooseSeed()});
  absl::Status status = parsed.status();
  if (status.ok()) status = CheckAdapterAccess(caller(), parsed->adapter.name);
  if (status.ok()) {
    NameRequest(*parsed);
    absl::StatusOr<adapter::AdapterLease> lease = services_->registry->Acquire(parsed->adapter);
    status = lease.status();
    if (status.ok()) parsed->lease = *std::move(lease);
    if (parsed->in_flight != engine::InFlightPolicy::kPin) {
      parsed->follow = [registry = services_->registry, name = parsed->adapter] {
        return registry->Acquire(name);
      };
    }
  }
  const int64_t prompt_tokens = parsed.ok() ? static_cast<int64_t>(parsed->prompt.size()) : 0;
  if (status.ok()) status = AdmitTokens(prompt_tokens);
  if (!status.ok()) {
    services_->metrics->RequestRefused(RequestKind::kGenerate, ReasonOf(status));
    return status;
  }
  parsed->tenant = caller().tenant;
  header_.request_id = parsed->request_id;
  header_.seed = parsed->sampling.seed;
  header_.top_logprobs = parsed->logprobs.top_k;
  {
    absl::MutexLock lock(&mu_);
    parsed->log = record().log();
    parsed->deadline = record().Deadline(services_->default_deadline());
  }
  const bool final_only = request.response_mode() != v1::RESPONSE_MODE_STREAM;
  stream_ = std::make_shared<engine::TokenStream>(final_only, Meter());
  stream_->SetWaker([this] { Wake(); });
  status = services_->engine->Submit(*std::move(parsed), stream_);
  if (!status.ok() && services_->quotas != nullptr) {
    services_->quotas->TakeTokens(caller().tenant, -prompt_tokens);
  }
  return status;
}

absl::Status GenerateReactor::AdmitTokens(int64_t tokens) const {
  if (services_->quotas == nullptr) return absl::OkStatus();
  return services_->quotas->AdmitTokens(caller().tenant, tokens);
}

// Tokens count when they have been made: a client that goes away before it reads them has had them
// made all the same.
std::function<void(int64_t)> GenerateReactor::Meter() const {
  if (services_->quotas == nullptr) return nullptr;
  return [quotas = services_->quotas, tenant = caller().tenant](int64_t tokens) {
    quotas->TakeTokens(tenant, tokens);
  };
}

std::string GenerateReactor::ChosenRequestId() {
  absl::MutexLock lock(&mu_);
  return record().request_id();
}

void GenerateReactor::NameRequest(const engine::RequestBase& request) {
  absl::MutexLock lock(&mu_);
  record().set_request_id(request.request_id);
  record().NameAdapter(request.adapter);
}

GenerateReactor::Turn GenerateReactor::Next(v1::GenerateResponse* response) {
  if (const std::optional<engine::SampleDelta> delta = stream_->Take()) {
    Encode(header_, *delta, response);
    return {.message = true};
  }
  return {.end = stream_->Ended()};
}

void GenerateReactor::CancelSource() {
  if (!stream_) return;
  stream_->Cancel();
  services_->engine->NoteCancelled();
}

void GenerateReactor::LeaveSource() {
  if (stream_) stream_->SetWaker(nullptr);
  open_.reset();
}

}  // namespace dorad::rpc
