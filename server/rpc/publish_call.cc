#include "server/rpc/publish_call.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/admission.h"
#include "server/platform/error.h"
#include "server/rpc/encode.h"
#include "server/rpc/publish_validation.h"
#include "server/rpc/upload_load.h"

namespace dorad::rpc {

int64_t PublishCall::MaxMessageBytes(const Services& /*services*/) {
  return 4 * int64_t{std::max(kMaxChunkBytes, kMaxAdapterConfigBytes)};
}

absl::Status PublishCall::OnStart() {
  // Counted before the check of `draining`: a drain that begins later waits for this call.
  CountIn(&services_->open_loads);
  if (services_->draining) return engine::ShuttingDown();
  // The store calls back only while gRPC still holds the call.
  const auto weak =
      std::weak_ptr<PublishCall>(std::static_pointer_cast<PublishCall>(shared_from_this()));
  stream_ = std::make_unique<UploadStream>(
      services_->uploads,
      [weak](const absl::Status& status) {
        if (const auto self = weak.lock()) self->Abandon(status);
      },
      [weak](const absl::StatusOr<adapter::PublishResult>& result) {
        if (const auto self = weak.lock()) self->EndWith(result);
      },
      caller().tenant);
  return absl::OkStatus();
}

absl::Status PublishCall::NoMessage() const {
  return MakeInvalid("PublishRequest",
                     {{"part", "PUBLISH_INCOMPLETE", "the stream ended before commit"}});
}

absl::Status PublishCall::OnMessage(grpc::ByteBuffer* bytes) {
  v1::PublishRequest part;
  DORAD_RETURN_IF_ERROR(Parse(bytes, &part));
  const bool begins = part.has_begin();
  const auto announced = static_cast<int64_t>(part.begin().safetensors_size());
  if (begins) DORAD_RETURN_IF_ERROR(CheckAdapterAccess(caller(), part.begin().name()));
  DORAD_ASSIGN_OR_RETURN(const UploadStream::Next next, stream_->Accept(&part));
  if (next == UploadStream::Next::kLoad) {
    Load();
  } else if (next == UploadStream::Next::kRead) {
    if (begins) {
      DORAD_ASSIGN_OR_RETURN(PublishRoom room, ReservePublish(*services_, caller(),
                                                              {.versions = 1, .bytes = announced}));
      absl::MutexLock lock(&mu_);
      room_ = std::move(room);
    }
    ReadNext();
  }
  return absl::OkStatus();
}

void PublishCall::Load() {
  // The caller's rights may have changed since Begin.
  if (const absl::Status rights = record_.CheckRights(); !rights.ok()) {
    return stream_->Completion()(rights);
  }
  LoadUpload(services_, method_.name, stream_.get(), {open_, TakeRoom(), record_.stream()});
}

void PublishCall::EndWith(const absl::StatusOr<adapter::PublishResult>& result) {
  // Released first: a client that sees the end may publish the next version.
  if (const PublishRoom room = TakeRoom()) room->Release();
  Complete([&](v1::PublishResponse* to) {
    if (!result.ok()) return result.status();
    record_.NameAdapter({result->adapter.name, result->adapter.version});
    Encode(result->adapter, to->mutable_adapter());
    to->set_generation(result->generation);
    return absl::OkStatus();
  });
}

// Runs before the client sees the end: it may ask for the upload, or publish again, at once.
void PublishCall::CancelWork() {
  if (stream_) stream_->Leave();
  if (const PublishRoom room = TakeRoom()) room->Release();
}

PublishRoom PublishCall::TakeRoom() {
  absl::MutexLock lock(&mu_);
  return std::exchange(room_, nullptr);
}

}  // namespace dorad::rpc
