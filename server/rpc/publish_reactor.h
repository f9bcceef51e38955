// One Publish call: feeds an upload from the client's stream, then hands it to the loader.
//
// A client that goes away before Commit leaves nothing behind but an upload that has an id; after
// Commit the load goes on without it. Kept alive by gRPC until OnDone. Thread-safe.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "dorad/v1/adapters.pb.h"
#include "server/rpc/access.h"
#include "server/rpc/call.h"
#include "server/rpc/message_deadlines.h"
#include "server/rpc/services.h"
#include "server/rpc/upload_store.h"

namespace dorad::rpc {

class PublishReactor final : public grpc::ServerReadReactor<grpc::ByteBuffer>,
                             public std::enable_shared_from_this<PublishReactor> {
 public:
  static grpc::ServerReadReactor<grpc::ByteBuffer>* Start(Services* services,
                                                          grpc::CallbackServerContext* context,
                                                          v1::PublishResponse* response);

  PublishReactor(Services* services, grpc::CallbackServerContext* context,
                 v1::PublishResponse* response);

  void OnReadDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  void OpenStream();
  // Waits for the next part.
  void Await() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Whether the caller may publish what a Begin names.
  absl::Status CheckBegin(const v1::PublishRequest& part) const;
  // Room among the tenant's adapters, after a Begin that was taken.
  absl::Status Reserve() ABSL_LOCKS_EXCLUDED(mu_);
  // The room for the load, which the caller must still be allowed.
  absl::StatusOr<PublishRoom> TakeRoom() ABSL_LOCKS_EXCLUDED(mu_);
  void TimeOut() ABSL_LOCKS_EXCLUDED(mu_);
  void Read(bool ok) ABSL_LOCKS_EXCLUDED(mu_);
  // The stream ends before Commit.
  void Break(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  void Load() ABSL_LOCKS_EXCLUDED(mu_);
  void Complete(const absl::StatusOr<adapter::PublishResult>& result) ABSL_LOCKS_EXCLUDED(mu_);
  void End(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  void EndLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Services* const services_;
  // Until gRPC is done and the load, which goes on without it, has ended. Before the look at
  // `draining`: a drain that begins after it waits for this call.
  const std::shared_ptr<const OpenCount> open_;
  std::shared_ptr<PublishReactor> self_;
  grpc::ByteBuffer bytes_;                // of the outstanding read
  MessageTimer timer_;                    // likewise
  std::unique_ptr<UploadStream> stream_;  // touched by reads only
  int64_t announced_ = 0;                 // bytes; likewise

  absl::Mutex mu_;
  CallRecord record_ ABSL_GUARDED_BY(mu_);
  v1::PublishResponse* const response_;
  const absl::Status admission_;
  const Caller caller_;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  bool reading_ ABSL_GUARDED_BY(mu_) = false;  // a part may still come too late
  bool timed_out_ ABSL_GUARDED_BY(mu_) = false;
  PublishRoom room_ ABSL_GUARDED_BY(mu_);  // from Begin to the load or the end
};

}  // namespace dorad::rpc
