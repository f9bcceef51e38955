#include "server/rpc/peer_transfer.h"

#include <grpcpp/completion_queue.h>

#include <algorithm>
#include <chrono>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dorad/v1/adapters.grpc.pb.h"
#include "server/platform/error.h"
#include "server/platform/files/sha256.h"
#include "server/rpc/call_record.h"
#include "server/rpc/peers.h"
#include "server/rpc/publish_validation.h"
#include "server/rpc/upload.h"

namespace dorad::rpc {
namespace {

v1::PublishRequest ToBegin(const v1::PublishFromPeerRequest& request) {
  v1::PublishRequest part;
  v1::PublishBegin& begin = *part.mutable_begin();
  begin.set_name(request.name());
  begin.set_version(request.version());
  begin.set_safetensors_size(request.safetensors_size());
  begin.set_safetensors_sha256(request.safetensors_sha256());
  begin.set_activate(request.activate());
  if (request.has_expected_generation()) {
    begin.set_expected_generation(request.expected_generation());
  }
  *begin.mutable_tags() = request.tags();
  begin.set_durable(request.durable());
  begin.set_upload_id(request.upload_id());
  if (request.has_keep_last()) begin.set_keep_last(request.keep_last());
  begin.set_pinned(request.pinned());
  return part;
}

}  // namespace

// The peer's stream. Each message is awaited for a bounded time.
class PeerTransfer::Reader {
 public:
  Reader(const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext* context,
         const v1::FetchAdapterRequest& request, absl::Duration patience)
      : context_(*context), patience_(patience) {
    call_ =
        v1::AdapterService::NewStub(channel)->AsyncFetchAdapter(context, request, &queue_, nullptr);
    open_ = Wait();
  }
  ~Reader() {
    context_.TryCancel();
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) {
    }
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // False at the end, after a failure and when the peer is silent for too long.
  bool Read(v1::FetchAdapterResponse* message) {
    if (!open_) return false;
    call_->Read(message, nullptr);
    open_ = Wait();
    return open_;
  }
  // After Read has returned false.
  grpc::Status Finish() {
    if (silent_) return {grpc::StatusCode::DEADLINE_EXCEEDED, "it has sent nothing for too long"};
    grpc::Status status;
    call_->Finish(&status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    queue_.Next(&tag, &ok);
    return status;
  }

 private:
  bool Wait() {
    void* tag = nullptr;
    bool ok = false;
    const auto end = std::chrono::system_clock::now() + absl::ToChronoNanoseconds(patience_);
    silent_ = queue_.AsyncNext(&tag, &ok, end) == grpc::CompletionQueue::TIMEOUT;
    return !silent_ && ok;
  }

  grpc::ClientContext& context_;
  const absl::Duration patience_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::ClientAsyncReader<v1::FetchAdapterResponse>> call_;
  bool open_ = false;
  bool silent_ = false;
};

absl::StatusOr<ListenAddress> PeerTransfer::Check(const v1::PublishFromPeerRequest& request) {
  std::vector<Violation> violations;
  (void)ParsePublishOptions(request, &violations);
  if (!request.has_version()) {
    violations.push_back({"version", "ADAPTER_VERSION_INVALID", "the peer's number is missing"});
  }
  CheckUploadId(request.upload_id(), &violations);
  CheckSha256("adapter_config_sha256", request.adapter_config_sha256(), &violations);
  CheckSha256("safetensors_sha256", request.safetensors_sha256(), &violations);
  absl::StatusOr<ListenAddress> peer = ParseListenAddress(request.peer());
  if (!peer.ok() || peer->host.empty() || peer->port == 0) {
    violations.push_back({"peer", "PEER_INVALID", "expected the peer's host:port"});
  }
  if (!violations.empty()) return MakeInvalid("PublishFromPeerRequest", std::move(violations));
  return peer;
}

PeerTransfer::PeerTransfer(Services* services, const char* method,
                           const v1::PublishFromPeerRequest& request, ListenAddress peer,
                           std::string tenant, LoadHolds holds, adapter::PublishCallback answer)
    : services_(services),
      method_(method),
      tenant_(std::move(tenant)),
      peer_(std::move(peer)),
      config_sha256_(request.adapter_config_sha256()),
      begin_(ToBegin(request)),
      holds_(std::move(holds)),
      answer_(std::move(answer)) {}

void PeerTransfer::Run() {
  // The store may still be calling when this transfer has ended.
  UploadStream stream(
      services_->uploads,
      [weak = weak_from_this()](const absl::Status& status) {
        if (const auto self = weak.lock()) self->Cancel(status);
      },
      answer_, tenant_);
  absl::Status status;
  Guarded(
      method_, [&] { status = Receive(&stream); },
      [&](const absl::Status& failure) { status = failure; });
  stream.Leave();
  holds_ = LoadHolds();
  if (!status.ok()) answer_(status);
}

void PeerTransfer::Cancel(const absl::Status& status) {
  {
    absl::MutexLock lock(&mu_);
    if (cancelled_.ok()) cancelled_ = status;
  }
  context_.TryCancel();
}

absl::Status PeerTransfer::cancelled() const {
  absl::MutexLock lock(&mu_);
  return cancelled_;
}

absl::Status PeerTransfer::Receive(UploadStream* stream) {
  v1::FetchAdapterRequest request;
  request.set_name(begin_.begin().name());
  request.set_version(begin_.begin().version());
  request.set_safetensors_sha256(begin_.begin().safetensors_sha256());
  const auto progress = services_->uploads->Find(begin_.begin().upload_id(), tenant_);
  if (progress.ok()) request.set_offset(progress->received);
  DORAD_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel,
                         services_->peers->Connect(peer_, &context_));
  Reader reader(channel, &context_, request, services_->peers->patience());
  absl::Status status = ReceiveFrom(&reader, stream);
  // A cancelled connection looks like a failure of the peer.
  if (absl::Status why = cancelled(); !status.ok() && !why.ok()) return why;
  return status;
}

absl::Status PeerTransfer::ReceiveFrom(Reader* reader, UploadStream* stream) {
  const auto failed = [&] {
    const grpc::Status status = reader->Finish();
    return PeerUnavailable(absl::StrCat(
        name(), ": ", status.ok() ? "it has sent too few bytes" : status.error_message()));
  };
  v1::FetchAdapterResponse message;
  if (!reader->Read(&message)) return failed();
  DORAD_ASSIGN_OR_RETURN(UploadStream::Next next, Begin(message.adapter_config_json(), stream));
  if (next == UploadStream::Next::kAnswer) return absl::OkStatus();
  const uint64_t size = begin_.begin().safetensors_size();
  v1::PublishRequest part;
  while (stream->received() < size) {
    if (!reader->Read(&message)) return failed();
    v1::PublishChunk& chunk = *part.mutable_chunk();
    chunk = std::move(*message.mutable_chunk());
    services_->metrics->PeerBytes(0, static_cast<int64_t>(chunk.data().size()));
    // Another stream may have brought some of these bytes since the request.
    const uint64_t have = stream->received();
    if (chunk.offset() < have) {
      const uint64_t known = std::min<uint64_t>(have - chunk.offset(), chunk.data().size());
      if (known == chunk.data().size()) continue;
      chunk.mutable_data()->erase(0, known);
      chunk.set_offset(have);
    }
    absl::StatusOr<UploadStream::Next> accepted = stream->Accept(&part);
    // Out of order, or too much.
    if (absl::IsInvalidArgument(accepted.status())) {
      return PeerUnavailable(absl::StrCat(name(), ": ", accepted.status().message()));
    }
    DORAD_ASSIGN_OR_RETURN(next, std::move(accepted));
    if (next == UploadStream::Next::kAnswer) return absl::OkStatus();
  }
  DORAD_RETURN_IF_ERROR(cancelled());
  part.mutable_commit();
  DORAD_ASSIGN_OR_RETURN(next, stream->Accept(&part));
  if (next == UploadStream::Next::kLoad) {
    LoadUpload(services_, method_, stream, std::move(holds_), /*of_peer=*/true);
  }
  return absl::OkStatus();
}

absl::StatusOr<UploadStream::Next> PeerTransfer::Begin(const std::string& config_json,
                                                       UploadStream* stream) {
  const auto sha256 = Sha256Of(config_json);
  if (std::string_view(reinterpret_cast<const char*>(sha256.data()), sha256.size()) !=
      config_sha256_) {
    return MakeInvalid("PublishFromPeerRequest",
                       {{"adapter_config_sha256", "PUBLISH_SHA256_MISMATCH",
                         absl::StrCat(name(), " has another adapter_config.json")}});
  }
  begin_.mutable_begin()->set_adapter_config_json(config_json);
  return stream->Accept(&begin_);
}

}  // namespace dorad::rpc
