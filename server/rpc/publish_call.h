// One Publish call: feeds an upload from the client's stream, then passes it to the loader.
//
// After a disconnect before Commit only an upload with an id stays; after Commit the load continues
// without the client. Lifetime and thread-safety as Call.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dorad/v1/adapters.pb.h"
#include "server/rpc/access.h"
#include "server/rpc/call.h"
#include "server/rpc/upload_store.h"

namespace dorad::rpc {

class PublishCall final : public SingleResponseCall<v1::PublishResponse> {
 public:
  using SingleResponseCall::SingleResponseCall;

  // Limit of one message: a chunk or a configuration. Somewhat larger messages are parsed too, so
  // that the error can name the field.
  static int64_t MaxMessageBytes(const Services& services);

 private:
  absl::Status OnStart() override;
  void OnRead() const override { Reach("rpc_read_done"); }
  absl::Status OnMessage(grpc::ByteBuffer* bytes) override;
  absl::Status NoMessage() const override;
  void CancelWork() override;

  void Load();
  void EndWith(const absl::StatusOr<adapter::PublishResult>& result) ABSL_LOCKS_EXCLUDED(mu_);
  PublishRoom TakeRoom() ABSL_LOCKS_EXCLUDED(mu_);

  // Used by handlers, then by CancelWork.
  std::unique_ptr<UploadStream> stream_;
  // The tenant's reservation for the adapter, from Begin to the load or the end.
  PublishRoom room_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::rpc
