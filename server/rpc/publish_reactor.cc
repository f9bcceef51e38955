#include "server/rpc/publish_reactor.h"

#include <algorithm>
#include <utility>

#include "server/base/error.h"
#include "server/base/failpoint.h"
#include "server/engine/admission.h"
#include "server/rpc/encode.h"
#include "server/rpc/peft_config_json.h"
#include "server/rpc/request_reading.h"

namespace dorad::rpc {
namespace {

constexpr char kMethod[] = "Publish";
// A chunk or a configuration, and twice as much for what is told in more words than too large.
constexpr int64_t kMaxPartBytes = 4 * int64_t{std::max(kMaxChunkBytes, kMaxAdapterConfigBytes)};

}  // namespace

grpc::ServerReadReactor<grpc::ByteBuffer>* PublishReactor::Start(
    Services* services, grpc::CallbackServerContext* context, v1::PublishResponse* response) {
  auto reactor = std::make_shared<PublishReactor>(services, context, response);
  reactor->self_ = reactor;
  Guarded(
      kMethod,
      [&] {
        Failpoint("rpc_handler");
        if (!reactor->admission_.ok()) return reactor->End(reactor->admission_);
        if (services->draining) return reactor->End(engine::ShuttingDown());
        reactor->OpenStream();
        absl::MutexLock lock(&reactor->mu_);
        reactor->Await();
      },
      [&](const absl::Status& status) { reactor->End(status); });
  return reactor.get();
}

PublishReactor::PublishReactor(Services* services, grpc::CallbackServerContext* context,
                               v1::PublishResponse* response)
    : services_(services),
      open_(std::make_shared<const OpenCount>(&services->open_loads)),
      timer_(services->message_deadlines.get()),
      record_(kMethod, context, services),
      response_(response),
      admission_(record_.admission()),
      caller_(record_.caller()) {}

void PublishReactor::OpenStream() {
  // The store calls back only while gRPC still holds the call.
  const std::weak_ptr<PublishReactor> weak = weak_from_this();
  stream_ = std::make_unique<UploadStream>(
      services_->uploads,
      [weak](const absl::Status& status) {
        if (const auto self = weak.lock()) self->End(status);
      },
      [weak](const absl::StatusOr<adapter::PublishResult>& result) {
        if (const auto self = weak.lock()) self->Complete(result);
      },
      caller_->tenant);
}

void PublishReactor::Await() {
  reading_ = true;
  timer_.Start([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->TimeOut();
  });
  StartRead(&bytes_);
}

void PublishReactor::TimeOut() {
  Guarded(
      kMethod,
      [this] {
        absl::MutexLock lock(&mu_);
        if (ended_ || !reading_) return;
        timed_out_ = true;
        EndLocked(MessageTimedOut());
      },
      [this](const absl::Status& status) { End(status); });
}

void PublishReactor::OnReadDone(bool ok) {
  Guarded(
      kMethod, [&] { Read(ok); }, [&](const absl::Status& status) { End(status); });
}

void PublishReactor::Read(bool ok) {
  Failpoint("rpc_read_done");
  timer_.Stop();
  if (!ok) {
    return Break(MakeInvalid("PublishRequest",
                             {{"part", "PUBLISH_INCOMPLETE", "the stream ended before commit"}}));
  }
  {
    // It comes too late: the client has been told to send it again.
    absl::MutexLock lock(&mu_);
    if (timed_out_) return stream_->Leave();
    reading_ = false;
  }
  v1::PublishRequest part;
  const int64_t most = std::min(kMaxPartBytes, services_->max_message_bytes);
  if (const absl::Status parsed = ParseRequest(&bytes_, most, &part); !parsed.ok()) {
    return Break(parsed);
  }
  const bool begins = part.has_begin();
  if (begins) announced_ = static_cast<int64_t>(part.begin().safetensors_size());
  if (const absl::Status allowed = CheckBegin(part); !allowed.ok()) return Break(allowed);
  const absl::StatusOr<UploadStream::Next> next = stream_->Accept(&part);
  if (!next.ok()) return Break(next.status());
  switch (*next) {
    case UploadStream::Next::kRead: {
      if (begins) {
        if (const absl::Status room = Reserve(); !room.ok()) return Break(room);
      }
      absl::MutexLock lock(&mu_);
      if (!ended_) Await();
      break;
    }
    case UploadStream::Next::kLoad:
      Load();
      break;
    case UploadStream::Next::kAnswer:
      break;
  }
}

absl::Status PublishReactor::CheckBegin(const v1::PublishRequest& part) const {
  return part.has_begin() ? CheckAdapterAccess(*caller_, part.begin().name()) : absl::OkStatus();
}

absl::Status PublishReactor::Reserve() {
  DORAD_ASSIGN_OR_RETURN(PublishRoom room, ReservePublish(*services_, *caller_, announced_));
  absl::MutexLock lock(&mu_);
  if (!ended_) room_ = std::move(room);  // else it is free again
  return absl::OkStatus();
}

absl::StatusOr<PublishRoom> PublishReactor::TakeRoom() {
  {
    absl::MutexLock lock(&mu_);
    DORAD_RETURN_IF_ERROR(record_.CheckRights());
    if (room_ != nullptr) return std::move(room_);
  }
  // The client has gone since it sent Commit, and its room with it.
  return ReservePublish(*services_, *caller_, announced_);
}

void PublishReactor::Break(const absl::Status& status) {
  // Before the client learns of the end: it may ask for the upload at once.
  stream_->Leave();
  End(status);
}

void PublishReactor::Load() {
  const std::shared_ptr<Upload> upload = stream_->TakeUpload();
  absl::StatusOr<PublishRoom> room = TakeRoom();
  if (!room.ok()) return stream_->Completion()(room.status());
  std::shared_ptr<security::Quotas::Hold> stream;
  {
    absl::MutexLock lock(&mu_);
    stream = record_.stream();
  }
  // The upload keeps its share of the budget until the load has ended: the image lives as long.
  const adapter::PublishCallback done =
      [upload, open = open_, room = *std::move(room), stream = std::move(stream),
       complete = stream_->Completion()](absl::StatusOr<adapter::PublishResult> result) {
        // Whoever learns of the end may publish the next one.
        for (const auto& hold : {room, stream}) {
          if (hold != nullptr) hold->Release();
        }
        if (!result.ok() && upload->typed_config()) result = NamePeftConfigFields(result.status());
        complete(std::move(result));
      };
  Guarded(
      kMethod,
      [&] {
        adapter::PublishOptions options = upload->TakeOptions();
        std::string config = upload->TakeConfig();
        std::vector<std::byte> image = upload->TakeImage();
        services_->publisher.from_bytes(std::move(options), std::move(config), std::move(image),
                                        upload->read_time(), done);
      },
      [&](const absl::Status& status) { done(status); });
}

void PublishReactor::Complete(const absl::StatusOr<adapter::PublishResult>& result) {
  Guarded(
      kMethod,
      [&] {
        Failpoint("rpc_answer");
        absl::MutexLock lock(&mu_);
        if (ended_) return;
        if (result.ok()) {
          record_.NameAdapter({result->adapter.name, result->adapter.version});
          Encode(result->adapter, response_->mutable_adapter());
          response_->set_generation(result->generation);
        }
        EndLocked(result.status());
      },
      [this](const absl::Status& status) { End(status); });
}

void PublishReactor::End(const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  EndLocked(status);
}

void PublishReactor::EndLocked(const absl::Status& status) {
  if (ended_) return;
  ended_ = true;
  // Whoever learns of the end may publish the next one.
  if (const PublishRoom room = std::exchange(room_, nullptr)) room->Release();
  Finish(record_.End(status));
}

void PublishReactor::OnCancel() {
  Guarded(
      kMethod,
      [this] {
        Failpoint("rpc_cancel");
        absl::MutexLock lock(&mu_);
        EndLocked(record_.CancelStatus());
      },
      [this](const absl::Status& status) { End(status); });
}

void PublishReactor::OnDone() { auto self = std::move(self_); }

}  // namespace dorad::rpc
