// One Generate call: carries deltas from the engine's TokenStream to the client.
//
// At most one write is outstanding; meanwhile the stream merges what the client has not taken. The
// engine's thread only posts a wake-up (TokenStream calls it under its lock); a courier thread or
// gRPC's own takes, encodes and writes. Lock order: mu_, then the stream's, then the couriers'.
// Kept alive by gRPC until OnDone and by posted wake-ups. Thread-safe.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "dorad/v1/inference.pb.h"
#include "server/engine/token_stream.h"
#include "server/rpc/call.h"
#include "server/rpc/encode.h"
#include "server/rpc/services.h"

namespace dorad::rpc {

class GenerateReactor final : public grpc::ServerWriteReactor<v1::GenerateResponse>,
                              public std::enable_shared_from_this<GenerateReactor> {
 public:
  // Validates, takes a lease and submits; a refusal ends the call before its first message.
  static grpc::ServerWriteReactor<v1::GenerateResponse>* Start(Services* services,
                                                               grpc::CallbackServerContext* context,
                                                               const v1::GenerateRequest& request);

  GenerateReactor(Services* services, grpc::CallbackServerContext* context);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  absl::Status Begin(const v1::GenerateRequest& request);
  void Wake();
  void Pump() ABSL_LOCKS_EXCLUDED(mu_);
  void PumpLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Abandon(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  void EndLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Services* const services_;
  std::shared_ptr<GenerateReactor> self_;
  std::shared_ptr<engine::TokenStream> stream_;  // set once, before the call is bound
  GenerateHeader header_;
  std::atomic<bool> wake_posted_{false};

  absl::Mutex mu_;
  CallRecord record_ ABSL_GUARDED_BY(mu_);
  v1::GenerateResponse response_ ABSL_GUARDED_BY(mu_);  // of the outstanding write
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  // The status to end with as soon as the outstanding write is done.
  std::optional<absl::Status> abandoned_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::rpc
