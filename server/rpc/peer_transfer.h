// The work of one PublishFromPeer call: receives a version's files from another server as an
// upload, and passes them to the loader.
//
// Being an upload, it shares the uploads' budget, it is passed on while it arrives, and when the
// peer fails, the received bytes stay for an equal call with another peer. A peer is trusted with
// nothing: the caller names the SHA-256 of both files. Shared by the call and the transfer's
// thread. Thread-safe.
#pragma once

#include <grpcpp/client_context.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "dorad/v1/adapters.pb.h"
#include "server/adapter/publish/publisher.h"
#include "server/platform/net/listen_address.h"
#include "server/rpc/services.h"
#include "server/rpc/upload_load.h"
#include "server/rpc/upload_store.h"

namespace dorad::rpc {

class PeerTransfer : public std::enable_shared_from_this<PeerTransfer> {
 public:
  // The peer's address. INVALID_ARGUMENT: all problems of the request (as of PublishBegin,
  // PEER_INVALID).
  static absl::StatusOr<ListenAddress> Check(const v1::PublishFromPeerRequest& request);

  // peer: from Check, of the same request. answer: runs once, on any thread. tenant: the owner of
  // the upload.
  PeerTransfer(Services* services, const char* method, const v1::PublishFromPeerRequest& request,
               ListenAddress peer, std::string tenant, LoadHolds holds,
               adapter::PublishCallback answer);

  // On a thread that may wait.
  void Run();
  // Ends it unless all bytes have arrived.
  void Cancel(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  class Reader;

  // OK: the answer comes from the loader or from an equal, earlier call.
  absl::Status Receive(UploadStream* stream);
  absl::Status ReceiveFrom(Reader* reader, UploadStream* stream);
  absl::StatusOr<UploadStream::Next> Begin(const std::string& config_json, UploadStream* stream);
  // The peer's, for messages.
  std::string name() const { return JoinHostPort(peer_.host, peer_.port); }
  // OK, or why the transfer was cancelled.
  absl::Status cancelled() const ABSL_LOCKS_EXCLUDED(mu_);

  Services* const services_;
  const char* const method_;
  const std::string tenant_;
  const ListenAddress peer_;
  const std::string config_sha256_;
  v1::PublishRequest begin_;
  LoadHolds holds_;
  const adapter::PublishCallback answer_;
  grpc::ClientContext context_;
  mutable absl::Mutex mu_;
  absl::Status cancelled_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::rpc
