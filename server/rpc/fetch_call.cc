#include "server/rpc/fetch_call.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/adapter/store/store.h"
#include "server/platform/error.h"
#include "server/platform/files/file.h"
#include "server/rpc/access.h"
#include "server/rpc/peers.h"
#include "server/rpc/publish_validation.h"
#include "server/rpc/upload.h"

namespace dorad::rpc {
namespace {

// Between two looks whether the call is over.
constexpr absl::Duration kLook = absl::Milliseconds(100);

absl::Status CheckRequest(const v1::FetchAdapterRequest& request) {
  DORAD_RETURN_IF_ERROR(
      CheckAdapterVersion("FetchAdapterRequest", request.name(), request.version(), ""));
  std::vector<Violation> violations;
  CheckSha256("safetensors_sha256", request.safetensors_sha256(), &violations);
  if (violations.empty()) return absl::OkStatus();
  return MakeInvalid("FetchAdapterRequest", std::move(violations));
}

absl::Status NoFiles(const std::string& why) {
  return MakeError(absl::StatusCode::kNotFound, "ADAPTER_FILES_GONE", why);
}

}  // namespace

absl::Status FetchCall::OnMessage(grpc::ByteBuffer* bytes) {
  DORAD_RETURN_IF_ERROR(Parse(bytes, &request_));
  DORAD_RETURN_IF_ERROR(CheckRequest(request_));
  DORAD_RETURN_IF_ERROR(CheckAdapterAccess(caller(), request_.name()));
  record_.NameAdapter({request_.name(), request_.version()});
  offset_ = request_.offset();
  return services_->peers->Start(Peers::Direction::kOut,
                                 [self = std::static_pointer_cast<FetchCall>(shared_from_this())] {
                                   absl::Status end;
                                   Guarded(
                                       self->method_.name, [&] { end = self->Send(); },
                                       [&](const absl::Status& status) { end = status; });
                                   {
                                     absl::MutexLock lock(&self->mu_);
                                     self->end_ = end;
                                   }
                                   self->Pump();
                                 });
}

FetchCall::Turn FetchCall::Next() {
  // The token may have been revoked meanwhile.
  if (const absl::Status rights = record_.CheckRights(); !rights.ok()) return {.end = rights};
  if (next_) {
    response_ = *std::move(next_);
    next_.reset();
    return {.message = &response_};
  }
  return {.end = end_};
}

absl::Status FetchCall::Send() {
  const UploadStore::FileKey key{request_.name(), request_.version(),
                                 request_.safetensors_sha256()};
  // The receiver waits as long for a message: it is to hear why there is none.
  const Instant end = FromNow(services_->peers->patience() / 2);
  while (!over()) {
    if (const auto files = services_->uploads->AwaitFiles(key, absl::ZeroDuration())) {
      return SendArriving(*files);
    }
    const absl::StatusOr<std::string> object =
        services_->registry->ObjectOf({request_.name(), request_.version()});
    if (object.ok() && !object->empty()) return SendStored(services_->store->ObjectPath(*object));
    if (object.ok()) return NoFiles("the version is loaded, and it is not durable");
    if (SteadyNow() >= end) return NoFiles("the version neither arrives nor is in the store");
    // A sender may ask before this server hears of the upload: a whole tree begins at once.
    (void)services_->uploads->AwaitFiles(key, kLook);
  }
  return absl::OkStatus();
}

absl::Status FetchCall::SendArriving(const ArrivingFiles& files) {
  if (!HandConfig(files.config_json())) return absl::OkStatus();
  Instant end = FromNow(services_->peers->patience() / 2);
  while (offset_ < files.size()) {
    const uint64_t there = files.Await(offset_, kLook);
    if (over()) return absl::OkStatus();
    if (there > offset_) {
      const uint64_t count = std::min<uint64_t>(there - offset_, kMaxChunkBytes);
      if (!HandChunk(std::string(files.Bytes(offset_, count)))) return absl::OkStatus();
      end = FromNow(services_->peers->patience() / 2);
    } else if (files.ended() || SteadyNow() >= end) {
      return NoFiles(absl::StrCat("the upload stopped at ", there, " of ", files.size(), " bytes"));
    }
  }
  return absl::OkStatus();
}

absl::Status FetchCall::SendStored(const std::string& folder) {
  DORAD_ASSIGN_OR_RETURN(
      const std::string config,
      ReadFileText(absl::StrCat(folder, "/adapter_config.json"), kMaxAdapterConfigBytes));
  DORAD_ASSIGN_OR_RETURN(const RegularFile file,
                         RegularFile::Open(absl::StrCat(folder, "/adapter_model.safetensors"),
                                           static_cast<uint64_t>(services_->max_adapter_bytes)));
  if (!HandConfig(config)) return absl::OkStatus();
  while (offset_ < file.size()) {
    std::string data(std::min<uint64_t>(file.size() - offset_, kMaxChunkBytes), '\0');
    DORAD_RETURN_IF_ERROR(
        file.ReadAt(offset_, {reinterpret_cast<std::byte*>(data.data()), data.size()}));
    if (!HandChunk(std::move(data))) return absl::OkStatus();
  }
  return absl::OkStatus();
}

bool FetchCall::HandConfig(const std::string& config_json) {
  v1::FetchAdapterResponse message;
  message.set_adapter_config_json(config_json);
  return Hand(std::move(message));
}

bool FetchCall::HandChunk(std::string data) {
  const auto count = static_cast<int64_t>(data.size());
  services_->peers->Pace(count);
  v1::FetchAdapterResponse message;
  message.mutable_chunk()->set_offset(offset_);
  message.mutable_chunk()->set_data(std::move(data));
  if (!Hand(std::move(message))) return false;
  services_->metrics->PeerBytes(count, 0);
  offset_ += static_cast<uint64_t>(count);
  return true;
}

bool FetchCall::Hand(v1::FetchAdapterResponse message) {
  {
    absl::MutexLock lock(&mu_);
    const auto free = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      return !next_ || ended_ || abandoned_;
    };
    mu_.Await(absl::Condition(&free));
    if (ended_ || abandoned_) return false;
    next_ = std::move(message);
  }
  Pump();
  return true;
}

bool FetchCall::over() {
  absl::MutexLock lock(&mu_);
  return ended_ || abandoned_;
}

}  // namespace dorad::rpc
