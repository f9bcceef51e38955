// One Watch call: registry events in order, from a generation on.
//
// Holds a small batch of events; a watcher slower than the registry's event log ends with
// OUT_OF_RANGE, one whose token is taken away with UNAUTHENTICATED. Lifetime and thread-safety as
// PumpedWriter.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "dorad/v1/adapters.pb.h"
#include "server/adapter/registry.h"
#include "server/rpc/pumped_writer.h"

namespace dorad::rpc {

class WatchReactor final : public PumpedWriter<v1::WatchRequest, v1::WatchResponse> {
 public:
  WatchReactor(Services* services, grpc::CallbackServerContext* context);

 private:
  absl::Status Begin(const v1::WatchRequest& request) override;
  Turn Next(v1::WatchResponse* response) override;
  void LeaveSource() override;

  // Set once, by Begin.
  std::optional<int64_t> subscription_;
  std::optional<int64_t> rights_subscription_;
  int64_t generation_ ABSL_GUARDED_BY(mu_) = 0;  // of the last event taken
  std::deque<adapter::RegistryEvent> events_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::rpc
