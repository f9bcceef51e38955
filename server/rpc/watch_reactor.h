// One Watch call: registry events in order, from a generation on.
//
// Holds at most kBatch events; a watcher slower than the registry's event log ends with
// OUT_OF_RANGE. Kept alive by gRPC until OnDone and by posted wake-ups. Thread-safe.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <deque>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "dorad/v1/adapters.pb.h"
#include "server/adapter/registry.h"
#include "server/rpc/call.h"
#include "server/rpc/services.h"

namespace dorad::rpc {

class WatchReactor final : public grpc::ServerWriteReactor<v1::WatchResponse>,
                           public std::enable_shared_from_this<WatchReactor> {
 public:
  static grpc::ServerWriteReactor<v1::WatchResponse>* Start(Services* services,
                                                            grpc::CallbackServerContext* context,
                                                            const v1::WatchRequest& request);

  WatchReactor(Services* services, grpc::CallbackServerContext* context);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  static constexpr int kBatch = 64;

  absl::Status Begin(const v1::WatchRequest& request);
  void Wake();
  void Pump() ABSL_LOCKS_EXCLUDED(mu_);
  void PumpLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Abandon(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  void EndLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Services* const services_;
  std::shared_ptr<WatchReactor> self_;
  std::optional<int64_t> subscription_;  // set once, before the call is bound
  std::atomic<bool> wake_posted_{false};

  absl::Mutex mu_;
  CallRecord record_ ABSL_GUARDED_BY(mu_);
  int64_t generation_ ABSL_GUARDED_BY(mu_) = 0;  // of the last event taken
  std::deque<adapter::RegistryEvent> events_ ABSL_GUARDED_BY(mu_);
  v1::WatchResponse response_ ABSL_GUARDED_BY(mu_);  // of the outstanding write
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<absl::Status> abandoned_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::rpc
