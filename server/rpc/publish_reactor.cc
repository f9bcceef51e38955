#include "server/rpc/publish_reactor.h"

#include <utility>

#include "server/base/error.h"
#include "server/rpc/encode.h"

namespace dorad::rpc {
namespace {

constexpr char kMethod[] = "Publish";

}  // namespace

grpc::ServerReadReactor<v1::PublishRequest>* PublishReactor::Start(
    Services* services, std::shared_ptr<UploadBudget> budget, grpc::CallbackServerContext* context,
    v1::PublishResponse* response) {
  auto reactor = std::make_shared<PublishReactor>(services, std::move(budget), context, response);
  reactor->self_ = reactor;
  if (services->draining) {
    reactor->End(
        MakeError(absl::StatusCode::kUnavailable, "SHUTTING_DOWN", "the server is shutting down"));
  } else {
    reactor->StartRead(&reactor->part_);
  }
  return reactor.get();
}

PublishReactor::PublishReactor(Services* services, std::shared_ptr<UploadBudget> budget,
                               grpc::CallbackServerContext* context, v1::PublishResponse* response)
    : services_(services),
      upload_(std::make_unique<Upload>(services->max_adapter_bytes, services->has_store,
                                       std::move(budget))),
      record_(kMethod, context, services->metrics),
      response_(response) {}

void PublishReactor::OnReadDone(bool ok) {
  Guarded(
      kMethod, [&] { Read(ok); }, [&](const absl::Status& status) { End(status); });
}

void PublishReactor::Read(bool ok) {
  const absl::Status status = ok ? upload_->Accept(&part_) : upload_->AcceptEnd();
  if (!status.ok()) {
    upload_.reset();  // gives its memory back now
    End(status);
  } else if (upload_->committed()) {
    Load();
  } else {
    absl::MutexLock lock(&mu_);
    if (!ended_) StartRead(&part_);
  }
}

void PublishReactor::Load() {
  std::shared_ptr<Upload> upload = std::move(upload_);
  adapter::PublishOptions options = upload->TakeOptions();
  std::string config = upload->TakeConfig();
  std::vector<std::byte> image = upload->TakeImage();
  // The upload keeps its share of the budget until the load has ended: the image lives as long.
  services_->publisher.from_bytes(
      std::move(options), std::move(config), std::move(image), upload->read_time(),
      [self = shared_from_this(), upload](const absl::StatusOr<adapter::PublishResult>& result) {
        self->Complete(result);
      });
}

void PublishReactor::Complete(const absl::StatusOr<adapter::PublishResult>& result) {
  absl::MutexLock lock(&mu_);
  if (ended_) return;
  if (result.ok()) {
    Encode(result->adapter, response_->mutable_adapter());
    response_->set_generation(result->generation);
  }
  EndLocked(result.status());
}

void PublishReactor::End(const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  EndLocked(status);
}

void PublishReactor::EndLocked(const absl::Status& status) {
  if (ended_) return;
  ended_ = true;
  Finish(record_.End(status));
}

void PublishReactor::OnCancel() {
  absl::MutexLock lock(&mu_);
  EndLocked(record_.CancelStatus());
}

void PublishReactor::OnDone() { auto self = std::move(self_); }

}  // namespace dorad::rpc
