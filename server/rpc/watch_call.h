// One Watch call: registry events in order, from a generation on.
//
// Holds a small batch of events; a watcher slower than the registry's event log ends with
// OUT_OF_RANGE, one whose token is revoked with UNAUTHENTICATED. Lifetime and thread-safety as
// Call.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <deque>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "dorad/v1/adapters.pb.h"
#include "server/adapter/registry/registry.h"
#include "server/rpc/server_stream_call.h"

namespace dorad::rpc {

class WatchCall final : public ServerStreamCall {
 public:
  using ServerStreamCall::ServerStreamCall;

 private:
  absl::Status OnMessage(grpc::ByteBuffer* bytes) override;
  Turn Next() override;
  void Release() override;

  // Set once, by OnMessage.
  std::optional<int64_t> subscription_;
  std::optional<int64_t> rights_subscription_;
  int64_t generation_ ABSL_GUARDED_BY(mu_) = 0;  // of the last event taken
  std::deque<adapter::RegistryEvent> events_ ABSL_GUARDED_BY(mu_);
  v1::WatchResponse response_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::rpc
